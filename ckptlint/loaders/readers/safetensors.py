"""Safetensors files as one checkpoint: the shards that torch's DCP writes, and the models of Hugging Face.

A folder may hold several: `model-*.safetensors` with its index, `consolidated.safetensors`, an adapter. Each is a group
of files, known from their names alone, and judged by itself.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckptlint.errors import LimitError, UnreadableError
from ckptlint.formats.safetensors_header import HEADER_LIMIT, Header, layout_faults, read_header
from ckptlint.formats.strict_json import is_size, json_object
from ckptlint.loaders.problems import from_error
from ckptlint.loaders.readers.common_state import read_configs, read_model_config
from ckptlint.loaders.readers.model_files import read_index, read_set
from ckptlint.loaders.readers.rows import Row, tables
from ckptlint.loaders.readers.sets import FileSet
from ckptlint.model import Checkpoint, ModelConfig, Problem, empty_objects
from ckptlint.model.facts import fact
from ckptlint.model.lost_files import by_node
from ckptlint.model.text import first_few, first_names, plural, printable, verb
from ckptlint.patterns import lazy_pattern
from ckptlint.sandbox import isolated
from ckptlint.storage.folder import READABLE, Folder
from ckptlint.vocabulary.config_fields import (
    ADAPTER_CONFIG,
    MISTRAL_CONFIG,
    MODEL_CONFIG,
    QUANTISATION,
    QUANTISATION_FILES,
    read_declared,
)
from ckptlint.vocabulary.keys import parse
from ckptlint.vocabulary.litter import is_system_file
from ckptlint.vocabulary.mesh import read_topology
from ckptlint.vocabulary.schemes import quantised_weights

SHARD = lazy_pattern(r"shard-(?P<rank>\d{5,9})-model-(?P<k>\d{5,9})-of-(?P<n>\d{5,9})\.safetensors")
NUMBERED = lazy_pattern(
    r"(?P<stem>.+?)(?:\.safetensors)?[-_.](?P<k>\d{1,9})-of-(?P<n>\d{1,9})(?P<variant>\.[^-]+)?\.safetensors"
)
"""`model-00001-of-00002.safetensors`; the variant (`fp16`) stands before or behind the numbers."""

_INDEX = lazy_pattern(r"(?P<stem>.+)\.safetensors\.index(?P<variant>\.[^.]+)?\.json")
_FRAGMENT = lazy_pattern(r"model_(?:weight|bias)(?:_pp-rank-.*)?\.safetensors")  # nanotron: one file per module
_ADAPTER = lazy_pattern(r"adapter[_-].*")
_OF_RANK = lazy_pattern(r"model-rank-(?P<rank>\d{1,4})-part-(?P<part>\d{1,4})\.safetensors")  # vLLM's sharded_state
_LOADED = lazy_pattern(r"model[-.](?!rank-)|pytorch_model[-.]|shard-")  # what is loaded by the config.json beside it
_MISTRAL = lazy_pattern(r"consolidated[-.].*")
_VARIANTS = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
_MOST_LEFT_OUT = 8  # files whose headers are read to find layers that an index lacks
_DIGITS = lazy_pattern(r"\d+")
_INFO = "DCP_SHARDING_INFO"
_BITMASK = ".bitmask"  # compressed-tensors 0.17: compressors/sparse_compressors/sparse_bitmask.py


@dataclass(slots=True)
class ModelFiles(FileSet):
    """Files that are one checkpoint together, under the label that they get when the folder holds more than these.

    `sharded` says that every file is one rank's part, as torch's HuggingFaceStorageWriter names them.
    """

    label: str = ""
    sharded: bool = False


@fact
def groups(folder: Folder) -> list[ModelFiles]:
    """The groups of safetensors files in a folder; a model's own comes first.

    They follow from the names; beside others, a file that an index names belongs to the model of that index, and so
    does one with nothing but whole layers that `config.json` declares and the index lacks.

    Source: transformers and diffusers (`model.safetensors.index.json`, variants);
    torch.distributed.checkpoint._hf_utils
    """
    by_stem: dict[str, ModelFiles] = {}
    single: dict[str, str] = {}
    names = [name for name in folder.files_beside() if not _FRAGMENT.fullmatch(name) and not is_system_file(name)]
    for name in names:
        if match := SHARD.fullmatch(name):
            by_stem.setdefault("shard-", ModelFiles(label="shard-*.safetensors", sharded=True)).files.append(name)
        elif match := NUMBERED.fullmatch(name):
            stem = match["stem"] + (match["variant"] or "")
            by_stem.setdefault(stem, ModelFiles(label=f"{stem}-*.safetensors")).files.append(name)
        elif match := _INDEX.fullmatch(name):
            single.setdefault(f"{match['stem']}{match['variant'] or ''}", name)
    lone = [n for n in names if n.endswith(".safetensors") and not (SHARD.fullmatch(n) or NUMBERED.fullmatch(n))]
    for stem, index in single.items():
        if stem not in by_stem:
            alone = [name for name in lone if name == f"{stem}.safetensors"]
            # an index beside files of other names describes all of them, but for adapters
            files = alone or [name for name in lone if not _ADAPTER.fullmatch(name)] * (len(single) == 1)
            by_stem[stem] = ModelFiles(files, label=index)
            lone = [name for name in lone if name not in files]
        by_stem[stem].index = index
    for name in lone:
        # names that differ in numbers alone may be parts of one model: no part is judged as a whole
        pattern = _DIGITS.sub("*", name)
        by_stem.setdefault(pattern, ModelFiles(label=name)).files.append(name)
    indexed = [group for group in by_stem.values() if group.index]
    for group in indexed if len(by_stem) > len(indexed) else ():
        named = _named_files(folder, group.index)
        for candidate in by_stem.values():
            if not candidate.index:
                group.files += [name for name in candidate.files if name in named]
                candidate.files = [name for name in candidate.files if name not in named]
    if len(indexed) == 1 and folder.has(MODEL_CONFIG):
        others = [group for group in by_stem.values() if not (group.index or group.sharded)]
        left_out = _left_out(folder, indexed[0], [name for group in others for name in group.files])
        indexed[0].files += left_out
        for candidate in others:
            candidate.files = [name for name in candidate.files if name not in left_out]
    by_stem = {key: group for key, group in by_stem.items() if group.files or group.index}
    for group in by_stem.values():
        if len(group.files) > 1 and group.label == group.files[0]:
            group.label = _DIGITS.sub("*", group.label)
    return sorted(by_stem.values(), key=lambda group: (not group.label.startswith("model"), group.label))


def _named_files(folder: Folder, index: str) -> frozenset[str]:
    """The files that an index names; none where it cannot be read, which is reported with the model."""
    with suppress(UnreadableError, LimitError):
        return isolated(lambda: frozenset((read_index(folder, index, [])[0] or {}).values()), folder.size(index))
    return frozenset()


def _left_out(folder: Folder, model: ModelFiles, names: list[str]) -> list[str]:
    """The files that hold nothing but layers which the configuration of a model declares, and its index does not list.

    Most of their parameters must be those of a listed layer too: scales or states of a trainer are no layers.
    """
    names = [name for name in names if not (_ADAPTER.fullmatch(name) or _MISTRAL.fullmatch(name))][:_MOST_LEFT_OUT]

    def left_out() -> list[str]:
        places = read_index(folder, model.index, [])[0] or {}
        if {*places.values()}.isdisjoint(model.files):
            return []  # the index is of other files
        declared = read_declared([(MODEL_CONFIG, read_model_config(folder, MODEL_CONFIG))])
        counts = [declared[name].value for name in ("layers", "mtp_layers") if name in declared]
        count = sum(value for value in counts if isinstance(value, int))
        listed = {layer for layer in map(_layer, places) if layer}
        blocks, roles = {block for block, _ in listed}, {parse(key).role for key in places}
        chosen = []
        for name in names:
            with suppress(UnreadableError, LimitError):
                keys = read_header(folder, name, folder.size(name)).names
                layers = {_layer(key) for key in keys}
                if all(layer and layer[0] in blocks and layer[1] < count and layer not in listed for layer in layers):
                    known = sum(parse(key).role in roles for key in keys)
                    chosen += [name] if 2 * known > len(keys) else []
        return chosen

    with suppress(UnreadableError, LimitError):
        if names:
            return isolated(left_out, folder.size(model.index) + sum(min(folder.size(n), HEADER_LIMIT) for n in names))
    return []


def _layer(fqn: str) -> tuple[str, int] | None:
    """What stands before the number of a key's layer, and this number; None outside of layers."""
    number = parse(fqn).layer
    return None if number is None else (fqn.partition(f".{number}.")[0], number)


def header_bytes(folder: Folder) -> int:
    """Bytes of text that `read_safetensors` will parse."""
    size = 0
    for group in groups(folder)[:1]:
        size += folder.entries[group.index].size if group.index else 0
        for name in group.files:
            claimed = int.from_bytes(folder.head(name, 8), "little")
            size += min(claimed, folder.entries[name].size, HEADER_LIMIT)
    return min(size, 16 * HEADER_LIMIT)


def read_safetensors(folder: Folder, look_at_files: bool, is_first: bool = True) -> Checkpoint:
    """The first group of a folder, from the headers of its files, whose sizes are looked at for depth `files`.

    A damaged configuration is reported with the first model of its folder. Raises AccessError where a read is refused.
    """
    group = groups(folder)[0]
    rows: list[Row] = []
    shards: set[int] = set()

    def read(number: int, name: str, size: int, problems: list[Problem]) -> bool:
        contents = _rows(folder, name, size, number, group, problems)
        if contents is not None:
            rows.extend(contents[0])
            shards.update([number] * contents[1])
        return contents is not None

    states = read_set(folder, group.files, group.index, look_at_files, read)
    names, label, partial = states.names, states.label, states.partial_because
    owner = _owners(rows, shards, names, states.places or {})
    is_numbered = all(map(NUMBERED.fullmatch, group.files))
    if not partial and not group.index and not shards and not owner.all() and not is_numbered:
        partial = "files without an index hold the same keys, so they are not parts of one model"
        if all(map(_OF_RANK.fullmatch, group.files)):
            partial = "the files of each rank hold its part of the model"
    tensors, records = tables(rows, owner)
    problems = states.problems + _mixed(rows, shards, names) + _lost_of_ranks(folder, group.files, rows)
    for tensor in tensors.values():
        if not tensor.is_representable:
            shape = list(tensor.global_shape)
            sentence = f"{label}: {tensor.fqn}: size {shape} does not fit 64 bits"
            problems.append(Problem("limit", label, sentence, fqn=tensor.fqn))
    if unknown := [printable(row.fqn) for row in rows if row.dtype == "unknown"]:
        note = f"{plural(len(unknown), 'tensor')} of a dtype that torch does not have: {first_few(unknown, 4)}"
        problems.append(Problem("note", label, note))
    if packed := [row.fqn for row in rows if row.fqn.endswith(_BITMASK)]:
        note = f"{plural(len(packed), 'weight')} with a bitmask, as compressed-tensors stores sparse ones, not judged"
        problems.append(Problem("note", label, f"{note}: {first_names([printable(fqn) for fqn in packed])}"))
    is_loaded = all(_LOADED.match(name) for name in names)
    declared, config, config_problems = read_configs(folder, None, is_loaded)
    base: dict[str, Any] = {}
    if any(_ADAPTER.fullmatch(name) for name in names):  # next to it is its base model's config
        layers = declared["layers"].value if "layers" in declared else 0
        base = {"base": config.values if config else {}, "base_layers": layers if isinstance(layers, int) else 0}
        declared, config = {}, None
    if not (is_loaded or is_first):
        config_problems = []
    if is_loaded and config is not None and quantised_weights(tensors):
        config = _with_quantisation(folder, config)
    beside, own_problems = _own_config(folder, names)
    if beside is not None:
        beside = replace(beside, **base)
    ranks = {int(match["rank"]) - 1 for name in group.files if (match := SHARD.fullmatch(name))}
    return Checkpoint(
        path=folder.display,
        format="dcp-safetensors" if group.sharded else "safetensors",
        writer="torch >= 2.8" if shards else "",
        tensors=tensors,
        records=records,
        files=states.files,
        declared=declared,
        config=beside or (config if is_loaded else None),
        declared_variant=_declared_variant(folder, config) if is_loaded else "",
        index=states.index,
        topology=read_topology(declared, empty_objects(), None, ranks),
        problems=problems + config_problems + own_problems,
        readable=states.is_readable,
        partial_because=partial,
        metadata_file=label,
    )


def _declared_variant(folder: Folder, config: ModelConfig | None) -> str:
    """The file of a variant of the model that has the declared dtype by its name; "" where none lies there.

    Source: transformers 5.23 save_pretrained(variant=...): each save writes config.json, so the dtype of the last stays
    """
    values = config.values if config else {}
    variant = _VARIANTS.get(str(values.get("dtype") or values.get("torch_dtype")).removeprefix("torch."), "")
    names = (f"model.{variant}.safetensors", f"model.safetensors.index.{variant}.json") if variant else ()
    return next((name for name in names if folder.stat(name)[0] in READABLE), "")


def _lost_of_ranks(folder: Folder, files: list[str], rows: list[Row]) -> list[Problem]:
    """The files of ranks that are not there: the ranks, and the files of each, are counted from 0 on.

    The last ranks leave no gap; they are lost where all ranks store fewer rows of the embedding than there are words.

    Source: vllm 0.11, model_executor/model_loader/sharded_state_loader.py, ShardedStateLoader.save_model, and
    model_executor/layers/vocab_parallel_embedding.py, which pads each rank's rows; SGLang has a copy
    """
    there: dict[int, set[int]] = {}
    for match in filter(None, map(_OF_RANK.fullmatch, files)):
        there.setdefault(int(match["rank"]), set()).add(int(match["part"]))
    lost = {
        f"model-rank-{rank}-part-{number}.safetensors": rank
        for rank in range(max(there, default=-1) + 1)
        for number in range(max(there.get(rank, {0})) + 1)
        if number not in there.get(rank, ())
    }
    sentence = f"{first_names([*lost])} {verb(len(lost), 'is')} missing; {plural(len(there), 'rank')} wrote files"
    if there and not lost and (words := _lost_words(folder, rows)):
        lost, sentence = {f"model-rank-{max(there) + 1}-part-0.safetensors": max(there) + 1}, words
    if not lost:
        return []
    why = "each rank loads only its own files, so these ranks miss some or all of their weights"
    hint = "copy the files from where they were written; if they are not there either, save the model again"
    return [Problem("incomplete", next(iter(lost)), sentence, why=why, hint=hint, lost_files=by_node(lost, there))]


def _lost_words(folder: Folder, rows: list[Row]) -> str:
    """That ranks store fewer rows of an embedding than its vocabulary has; "" where that is not so."""
    words: Any = None
    with suppress(UnreadableError, LimitError):
        words = read_model_config(folder, MODEL_CONFIG).get("vocab_size") if folder.has(MODEL_CONFIG) else None
    stored = [row.sizes[0] for row in rows if row.fqn.endswith("embed_tokens.weight") and row.sizes]
    if not stored or not is_size(words) or sum(stored) >= words:
        return ""
    of = f"{sum(stored):,} of {words:,} rows of the embedding"
    return f"the last ranks' files are missing: {plural(len(stored), 'rank')} {verb(len(stored), 'stores')} {of}"


def _own_config(folder: Folder, files: list[str]) -> tuple[ModelConfig | None, list[Problem]]:
    """What an adapter, or a model in Mistral's own format, keeps beside it in place of `config.json`.

    Source: peft `adapter_config.json`; mistral-inference `params.json`, beside `consolidated*.safetensors`
    """
    kinds = ((_ADAPTER, ADAPTER_CONFIG), (_MISTRAL, MISTRAL_CONFIG))
    name = next((name for kind, name in kinds if files and all(map(kind.fullmatch, files))), "")
    if not name or not folder.has(name):
        return None, []
    try:
        return ModelConfig(name, read_model_config(folder, name)), []
    except UnreadableError as error:
        hint = "restore it from where the files were written"
        return None, [from_error(error, name, why="a load starts with it, so it fails", hint=hint)]


def _with_quantisation(folder: Folder, config: ModelConfig) -> ModelConfig:
    """The configuration, with what another file says of the quantisation; in `_beside` where it says it itself, too.

    Source: nvidia-modelopt 0.47 (export_hf_checkpoint); auto-gptq 0.7 (BaseQuantizeConfig); autoawq 0.2 (AwqConfig)
    """
    place = next((name for name in QUANTISATION if config.values.get(name)), QUANTISATION[0])
    stated = config.values.get(place)
    is_modelopt = isinstance(stated, dict) and stated.get("quant_method") == "modelopt"
    for name, method in QUANTISATION_FILES.items():
        if folder.has(name) and (not stated or (is_modelopt and method == "modelopt")):
            values: dict[str, Any] = {}
            with suppress(UnreadableError, LimitError):  # that it is there says that something is declared
                values = read_model_config(folder, name)
            section = values.get("quantization")
            quantisation = {"quant_method": method, **(section if isinstance(section, dict) else values), "_file": name}
            quantisation = {**stated, "_beside": quantisation} if isinstance(stated, dict) and stated else quantisation
            return ModelConfig(config.file, {**config.values, place: quantisation})
    return config


def _rows(
    folder: Folder, name: str, size: int, number: int, group: ModelFiles, problems: list[Problem]
) -> tuple[list[Row], bool] | None:
    """The tensors of a file, and whether it is a shard of torch's DCP; None when they are not known."""
    shown = printable(name)
    try:
        header = read_header(folder, name, size)
        info = sharding_info(header)
        if info is None and group.sharded and header.names:
            raise UnreadableError(f"has the name of one rank's shard, but no {_INFO} in its header", 8)
    except LimitError as error:
        problems.append(from_error(error, shown))
        return None
    except UnreadableError as error:
        unread = _container(shown, f"{shown} {error}", error.position or 0)
        problems.append(replace(unread, blocks=True))
        return None
    for sentence, key, position in layout_faults(header, size):
        problems.append(_container(shown, f"{shown}: {sentence}", position, key or None))
    places = info or {key: ((0,) * len(shape), None) for key, shape in zip(header.names, header.shapes, strict=True)}
    starts, lengths = (header.payload + header.begin).tolist(), (header.end - header.begin).tolist()
    listed = zip(header.names, header.dtypes, header.shapes, starts, lengths, strict=True)
    return [
        Row(key, dtype or "unknown", places[key][1], places[key][0], shape, number, start, length)
        for key, dtype, shape, start, length in listed
    ], info is not None


def _container(file: str, sentence: str, position: int, fqn: str | None = None) -> Problem:
    why = "readers of safetensors refuse the whole file, so none of its tensors loads"
    hint = "copy the file again from where it was written, or save again with only tensors in it"
    detail = (f"byte {position:,} of {file}",)
    return Problem("container", file, sentence, detail=detail, why=why, hint=hint, fqn=fqn)


def sharding_info(header: Header) -> dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] | None:
    """Key -> offsets of the file's part of it, and the global shape where the writer stored it; None without.

    Raises UnreadableError where it does not give the offsets of every tensor in the header.

    Source: torch.distributed.checkpoint.hf_storage (>= 2.8); `global_shape` is a proposal (pytorch#189945)
    """
    text = header.metadata.get(_INFO)
    if not text:
        return None
    try:
        stored = json_object(text.encode("utf-8", "surrogatepass"))
    except UnreadableError as error:
        raise UnreadableError(f"has a {_INFO} that {error}", 8) from None
    info = {}
    for key, shape in zip(header.names, header.shapes, strict=True):
        entry = stored.get(key)
        places = entry if isinstance(entry, dict) else {}
        offsets, whole = _sizes(places.get("saved_offsets")), _sizes(places.get("global_shape", []))
        if offsets is None or whole is None or ("global_shape" in places and len(whole) != len(shape)):
            raise UnreadableError(f"has no saved_offsets of {printable(key)} in its {_INFO}", 8)
        info[key] = offsets, whole if "global_shape" in places else None
    return info


def _sizes(value: Any) -> tuple[int, ...] | None:
    return tuple(value) if isinstance(value, list) and all(map(is_size, value)) else None


def _mixed(rows: list[Row], shards: set[int], files: list[str]) -> list[Problem]:
    """The keys whose shards have different dtypes in different files."""
    places: dict[str, dict[str, str]] = {}
    for row in rows:
        if row.file in shards:
            places.setdefault(row.fqn, {}).setdefault(row.dtype, printable(files[row.file]))
    problems = []
    for name, stated in ((printable(fqn), stated) for fqn, stated in places.items() if len(stated) > 1):
        dtypes = " and ".join(f"{dtype} in {file}" for dtype, file in stated.items())
        why = "a tensor has one dtype: a reader uses one shard's dtype for all, or fails"
        hint = "save again from the job, or restore the header of the file that differs"
        sentence = f"the shards of {name} are {dtypes}"
        problems.append(Problem("container", list(stated.values())[1], sentence, why=why, hint=hint, fqn=name))
    return problems


def _owners(rows: list[Row], shards: set[int], files: list[str], places: dict[str, str]) -> Any:
    """bool [n], the rows that are the tensor: where several files have a key, the one that the index names."""
    owner = np.ones(len(rows), bool)
    first: dict[str, int] = {}
    for number, row in enumerate(rows):
        if row.file not in shards and (earlier := first.setdefault(row.fqn, number)) != number:
            is_named = files[row.file] == places.get(row.fqn)
            owner[earlier if is_named else number] = False
            first[row.fqn] = number if is_named else earlier
    return owner
