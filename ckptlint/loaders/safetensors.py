"""Safetensors files as one checkpoint: the shards that torch's DCP writes, and the models of Hugging Face.

A folder may hold several: `model-*.safetensors` with its index, `consolidated.safetensors`, an adapter. Each is a group
of files, told from their names alone, and judged by itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ckptlint.errors import LimitError, UnreadableError
from ckptlint.formats.safetensors_header import HEADER_LIMIT, Header, layout_faults, read_header
from ckptlint.formats.strict_json import checked_key, is_size, json_object
from ckptlint.loaders.common_state import read_configs, read_model_config
from ckptlint.loaders.problems import from_error
from ckptlint.model import (
    Checkpoint,
    ChunkTable,
    FileState,
    FileTable,
    MalformedChunk,
    ModelConfig,
    Problem,
    RecordTable,
    StoredFile,
    Tensor,
    WeightIndex,
    empty_objects,
)
from ckptlint.model.cover import Budget
from ckptlint.model.facts import fact
from ckptlint.model.layout import IntArray, Layout
from ckptlint.model.text import plural, printable
from ckptlint.storage.folder import Folder
from ckptlint.storage.paths import is_safe
from ckptlint.vocabulary.config_fields import ADAPTER_CONFIG, MISTRAL_CONFIG
from ckptlint.vocabulary.litter import is_litter
from ckptlint.vocabulary.mesh import read_topology

SHARD = re.compile(r"shard-(?P<rank>\d{5,9})-model-(?P<k>\d{5,9})-of-(?P<n>\d{5,9})\.safetensors")
NUMBERED = re.compile(
    r"(?P<stem>.+?)(?:\.safetensors)?[-_.](?P<k>\d{1,9})-of-(?P<n>\d{1,9})(?P<variant>\.[^-]+)?\.safetensors"
)
"""`model-00001-of-00002.safetensors`; the variant (`fp16`) stands before or behind the numbers."""

_INDEX = re.compile(r"(?P<stem>.+)\.safetensors\.index(?P<variant>\.[^.]+)?\.json")
_FRAGMENT = re.compile(r"model_(?:weight|bias)(?:_pp-rank-.*)?\.safetensors")  # nanotron: one file per module
_ADAPTER = re.compile(r"adapter[_-].*")
_LOADED = re.compile(r"model[-.]|pytorch_model[-.]|shard-")  # what a library loads by the config.json beside it
_MISTRAL = re.compile(r"consolidated[-.].*")
_WHOLE = re.compile(r"(pytorch_)?model(\.\w+)?\.(safetensors|bin)")
_DIGITS = re.compile(r"\d+")
_AT_HAND = ("ok", "link-outside")  # a model cache keeps the files elsewhere and links to them
_INFO = "DCP_SHARDING_INFO"


@dataclass(slots=True)
class ModelFiles:
    """Files that are one checkpoint together.

    Attributes:
        label: the name to report it under, when the folder holds more than this group.
        files: names, in order.
        index: name of the index, "" without one.
        sharded: whether every file is one rank's part, as torch's HuggingFaceStorageWriter names them.
    """

    label: str
    files: list[str] = field(default_factory=list)
    index: str = ""
    sharded: bool = False


@fact
def groups(folder: Folder) -> list[ModelFiles]:
    """The groups of safetensors files in a folder, by their names; a model's own comes first.

    Source:
        transformers and diffusers (`model.safetensors.index.json`, variants); torch.distributed.checkpoint._hf_utils
    """
    found: dict[str, ModelFiles] = {}
    single: dict[str, str] = {}
    names = [name for name in folder.files_beside() if not _FRAGMENT.fullmatch(name) and not is_litter(name)]
    for name in names:
        if match := SHARD.fullmatch(name):
            found.setdefault("shard-", ModelFiles("shard-*.safetensors", sharded=True)).files.append(name)
        elif match := NUMBERED.fullmatch(name):
            stem = match["stem"] + (match["variant"] or "")
            found.setdefault(stem, ModelFiles(f"{stem}-*.safetensors")).files.append(name)
        elif match := _INDEX.fullmatch(name):
            single.setdefault(f"{match['stem']}{match['variant'] or ''}", name)
    lone = [n for n in names if n.endswith(".safetensors") and not (SHARD.fullmatch(n) or NUMBERED.fullmatch(n))]
    for stem, index in single.items():
        if stem not in found:
            own = [name for name in lone if name == f"{stem}.safetensors"]
            # an index beside files of other names describes all of them, but for adapters
            files = own or [name for name in lone if not _ADAPTER.fullmatch(name)] * (len(single) == 1)
            found[stem] = ModelFiles(index, files)
            lone = [name for name in lone if name not in files]
        found[stem].index = index
    for name in lone:
        # names that differ in numbers alone may be parts of one model: no part is judged as a whole
        pattern = _DIGITS.sub("*", name)
        found.setdefault(pattern, ModelFiles(name)).files.append(name)
    for group in found.values():
        if len(group.files) > 1 and group.label == group.files[0]:
            group.label = _DIGITS.sub("*", group.label)
    return sorted(found.values(), key=lambda group: (not group.label.startswith("model"), group.label))


def header_bytes(folder: Folder) -> int:
    """Bytes of text that `read_safetensors` will parse."""
    size = 0
    for group in groups(folder)[:1]:
        size += folder.entries[group.index].size if group.index else 0
        for name in group.files:
            claimed = int.from_bytes(folder.head(name, 8), "little")
            size += min(claimed, folder.entries[name].size, HEADER_LIMIT)
    return min(size, 16 * HEADER_LIMIT)


@dataclass(slots=True)
class _Chunks:
    """The tensors of all files as parallel lists; row i is one tensor of one file."""

    names: list[str] = field(default_factory=list)
    dtypes: list[str | None] = field(default_factory=list)
    offsets: list[tuple[int, ...]] = field(default_factory=list)
    sizes: list[tuple[int, ...]] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    begin: list[IntArray] = field(default_factory=list)
    length: list[IntArray] = field(default_factory=list)
    is_shard: list[bool] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    by_dcp: bool = False


def read_safetensors(folder: Folder, look_at_files: bool, is_first: bool = True) -> Checkpoint:
    """The first group of a folder, from the headers of its files.

    Args:
        look_at_files: whether to tell the sizes of files (depth `files`); their headers are read in any case.
        is_first: whether it is the first model of its folder, with which a damaged configuration is told.

    Raises:
        AccessError: the operating system refused a read.
    """
    group = groups(folder)[0]
    problems: list[Problem] = []
    places, total = read_index(folder, group.index, problems)
    stale = is_stale(folder, group.files, places)
    names = list(dict.fromkeys((*group.files, *({} if stale else places or {}).values())))
    chunks = _Chunks()
    files: list[StoredFile] = []
    unread: list[str] = []
    absent: list[str] = []
    for number, name in enumerate(names):
        state, size = folder.look_at(name)
        shown: FileState = state if look_at_files else "unchecked"
        path = name if is_safe(name) else None
        files.append(StoredFile(printable(name), path, size if look_at_files else None, shown, True))
        if state not in _AT_HAND or size is None:
            absent.append(printable(name))
        elif not _read_file(folder, name, size, number, group, chunks, problems):
            unread.append(printable(name))
    unread += absent
    by_index = "" if stale else group.index
    label = printable(by_index or (names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"))
    readable = bool(chunks.names) or len(unread) < len(names)
    if not readable:
        problems = [replace(problem, blocks=True) for problem in problems] or [no_files(label, absent)]
    partial = f"{len(unread)} of {len(files)} files of this model are missing or unreadable" if unread else ""
    owner = _owners(chunks, names, places or {})
    if not partial and not group.index and not chunks.by_dcp and not owner.all() and not _is_numbered(group):
        partial = "files without an index hold the same keys, so they are not parts of one model"
    tensors, records = _tables(chunks, owner)
    problems += _mixed(chunks, names)
    for tensor in tensors.values():
        if not tensor.is_representable:
            shape = list(tensor.global_shape)
            sentence = f"{label}: {tensor.fqn}: size {shape} does not fit 64 bits"
            problems.append(Problem("limit", label, sentence, fqn=tensor.fqn))
    if chunks.unknown:
        shown_keys = ", ".join(chunks.unknown[:4]) + (", ..." if len(chunks.unknown) > 4 else "")
        note = f"{plural(len(chunks.unknown), 'tensor')} of a dtype that torch does not have: {shown_keys}"
        problems.append(Problem("note", label, note))
    is_loaded = all(_LOADED.match(name) for name in names)
    declared, config, config_problems = read_configs(folder, None, is_loaded)
    if any(_ADAPTER.fullmatch(name) for name in names):  # beside it lies its base model's config
        declared, config = {}, None
    if not (is_loaded or is_first):
        config_problems = []
    own, own_problems = _own_config(folder, names)
    ranks = {int(match["rank"]) - 1 for name in group.files if (match := SHARD.fullmatch(name))}
    return Checkpoint(
        path=folder.display,
        format="dcp-safetensors" if group.sharded else "safetensors",
        writer="torch >= 2.8" if chunks.by_dcp else "",
        tensors=tensors,
        records=records,
        files=FileTable.of(files),
        declared=declared,
        config=own or (config if is_loaded else None),
        index=None if places is None else weight_index(printable(group.index), places, total, absent, unread, stale),
        topology=read_topology(declared, empty_objects(), None, ranks),
        problems=problems + config_problems + own_problems,
        readable=readable,
        partial=partial,
        metadata_file=label,
    )


def _is_numbered(group: ModelFiles) -> bool:
    return all(NUMBERED.fullmatch(name) for name in group.files)


def _own_config(folder: Folder, files: list[str]) -> tuple[ModelConfig | None, list[Problem]]:
    """What an adapter, or a model in Mistral's own format, keeps beside it in place of `config.json`.

    Source:
        peft `adapter_config.json`; mistral-inference `params.json`, beside `consolidated*.safetensors`
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


# ---------------------------------------------------------------- the index


def read_index(folder: Folder, index: str, problems: list[Problem]) -> tuple[dict[str, str] | None, int | None]:
    """Raw key -> raw file name, and the bytes of all tensors; None for what is not said or cannot be read."""
    if not index:
        return None, None
    try:
        document = json_object(folder.read(index, HEADER_LIMIT))
        places = document.get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise UnreadableError("has no weight_map from names to files")
        for name in places:
            checked_key(name)
    except UnreadableError as error:
        why = "loaders use it to find the file of each key"
        hint = "write the index again from the headers of the files"
        problems.append(from_error(error, printable(index), why=why, hint=hint))
        return None, None
    about = document.get("metadata")
    total = about.get("total_size") if isinstance(about, dict) else None
    if isinstance(total, float) and total.is_integer():  # transformers wrote it so for some years
        total = int(total)
    return places, total if is_size(total) else None


def is_stale(folder: Folder, files: list[str], places: Mapping[str, str] | None) -> bool:
    """Whether nothing that an index names is there, beside the whole model that transformers looks for first.

    Source:
        transformers 5.23 modeling_utils: save_pretrained removes the shards of an earlier save, and leaves their index
    """
    if not places or len(files) != 1 or not _WHOLE.fullmatch(files[0]):
        return False
    return all(folder.look_at(name)[0] == "absent" for name in {*places.values()})


def weight_index(
    file: str, places: dict[str, str], total: int | None, absent: list[str], unread: list[str], stale: bool
) -> WeightIndex:
    """The index with names that are safe to print."""
    shown = {name: printable(name) for name in dict.fromkeys(places.values())}
    by_key = {printable(key): shown[name] for key, name in places.items()}
    return WeightIndex(file, by_key, total, frozenset(absent), frozenset(unread), stale)


def no_files(label: str, absent: list[str]) -> Problem:
    """That nothing of what an index names is there."""
    return Problem(
        "incomplete",
        label,
        f"{label} names {plural(len(absent), 'file')}, and none of them is there"
        if absent
        else f"{label} names no file",
        why="a writer writes the index after the files, so a copy left them out",
        hint="copy the files again from where the index came from",
        blocks=True,
    )


# ---------------------------------------------------------------- one file


def _read_file(
    folder: Folder, name: str, size: int, number: int, group: ModelFiles, chunks: _Chunks, problems: list[Problem]
) -> bool:
    """Add the tensors of a file; False when they are not known."""
    shown = printable(name)
    try:
        header = read_header(folder, name, size)
        info = sharding_info(header)
        if info is None and group.sharded and header.names:
            raise UnreadableError(f"has the name of one rank's shard, but no {_INFO} in its header", 8)
    except LimitError as error:
        problems.append(from_error(error, shown))
        return False
    except UnreadableError as error:
        unread = _container(shown, f"{shown} {error}", error.position or 0)
        problems.append(replace(unread, blocks=True))
        return False
    for sentence, key, position in layout_faults(header, size):
        problems.append(_container(shown, f"{shown}: {sentence}", position, key or None))
    chunks.by_dcp = chunks.by_dcp or info is not None
    for key, dtype, shape in zip(header.names, header.dtypes, header.shapes, strict=True):
        offsets, whole = (info or {}).get(key, ((0,) * len(shape), None))
        if whole is not None:
            chunks.shapes.setdefault(key, whole)
        if dtype is None:
            chunks.unknown.append(printable(key))
        chunks.names.append(key)
        chunks.dtypes.append(dtype)
        chunks.offsets.append(offsets)
        chunks.sizes.append(shape)
    count = len(header.names)
    chunks.files += [number] * count
    chunks.is_shard += [info is not None] * count
    chunks.begin.append(header.payload + header.begin)
    chunks.length.append(header.end - header.begin)
    return True


def _container(file: str, sentence: str, position: int, fqn: str | None = None) -> Problem:
    return Problem(
        "container",
        file,
        sentence,
        detail=(f"byte {position:,} of {file}",),
        why="readers of safetensors refuse the whole file, so none of its tensors loads",
        hint="copy the file again from where it was written, or save again with only tensors in it",
        fqn=fqn,
    )


def sharding_info(header: Header) -> dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] | None:
    """Key -> offsets of the file's part of it, and the global shape where the writer stored it; None without.

    Raises:
        UnreadableError: it does not give the offsets of every tensor in the header.

    Source:
        torch.distributed.checkpoint.hf_storage (>= 2.8); `global_shape` is a proposal (pytorch#189945)
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


def _mixed(chunks: _Chunks, files: list[str]) -> list[Problem]:
    """The keys whose shards have different dtypes in different files."""
    places: dict[str, dict[str, str]] = {}
    for name, dtype, file, is_shard in zip(chunks.names, chunks.dtypes, chunks.files, chunks.is_shard, strict=True):
        if is_shard:
            places.setdefault(name, {}).setdefault(dtype or "unknown", printable(files[file]))
    return [
        Problem(
            "container",
            list(found.values())[1],
            f"the shards of {printable(name)} are "
            + " and ".join(f"{dtype} in {file}" for dtype, file in found.items()),
            why="a tensor has one dtype: a reader uses one shard's dtype for all, or fails",
            hint="save again from the job, or restore the header of the file that differs",
            fqn=printable(name),
        )
        for name, found in places.items()
        if len(found) > 1
    ]


# ---------------------------------------------------------------- tables


def _owners(chunks: _Chunks, files: list[str], places: dict[str, str]) -> Any:
    """bool [n], the rows that are the tensor: where a key lies in several files, the one that the index names."""
    owner = np.ones(len(chunks.names), bool)
    first: dict[str, int] = {}
    for row, name in enumerate(chunks.names):
        if chunks.is_shard[row]:
            continue
        other = first.setdefault(name, row)
        if other != row:
            is_named = files[chunks.files[row]] == places.get(name)
            owner[other if is_named else row] = False
            first[name] = row if is_named else other
    return owner


def _tables(chunks: _Chunks, owner: Any) -> tuple[dict[str, Tensor], RecordTable]:
    number = {name: i for i, name in enumerate(dict.fromkeys(chunks.names))}
    rows: dict[str, list[int]] = {name: [] for name in number}
    for row in np.flatnonzero(owner).tolist():
        rows[chunks.names[row]].append(row)
    layouts: dict[tuple[Any, ...], Layout] = {}
    budget = Budget()
    tensors = [_tensor(chunks, name, own, layouts, budget) for name, own in rows.items()]
    none = np.zeros(0, np.int64)
    records = RecordTable(
        fqns=[printable(name) for name in number],
        fqn=np.fromiter((number[name] for name in chunks.names), np.int32, len(chunks.names)),
        file=np.array(chunks.files, np.int32),
        byte_offset=np.concatenate([none, *chunks.begin]),
        byte_length=np.concatenate([none, *chunks.length]),
        transformed=np.zeros(len(chunks.names), bool),
        owned=owner,
        strays={row: chunks.offsets[row] for row in np.flatnonzero(~owner).tolist()},
    )
    return {tensor.fqn: tensor for tensor in tensors}, records


def _tensor(
    chunks: _Chunks, name: str, rows: list[int], layouts: dict[tuple[Any, ...], Layout], budget: Budget
) -> Tensor:
    axes = len(chunks.sizes[rows[0]])
    fitting = [row for row in rows if len(chunks.sizes[row]) == len(chunks.offsets[row]) == axes]
    others = sorted(set(rows) - set(fitting))
    offsets = np.array([chunks.offsets[row] for row in fitting], np.int64).reshape(len(fitting), axes)
    sizes = np.array([chunks.sizes[row] for row in fitting], np.int64).reshape(len(fitting), axes)
    reached = (offsets + sizes).max(axis=0, initial=0)
    shape = chunks.shapes.get(name) or tuple(reached.tolist())
    layout = layouts.setdefault(
        (shape, len(offsets), offsets.tobytes(), sizes.tobytes()), Layout(shape, offsets, sizes, budget)
    )
    return Tensor(
        fqn=printable(name),
        dtype=chunks.dtypes[rows[0]] or "unknown",
        global_shape=shape,
        chunks=ChunkTable(layout, np.array(fitting, np.int64)),
        malformed=tuple(MalformedChunk(chunks.offsets[row], chunks.sizes[row], row) for row in others),
    )
