"""What a checkpoint is compared with (`--expect`): a manifest, safetensors, a Hugging Face folder, a checkpoint.

A reference is as untrusted as a checkpoint: files are parsed in a child process under limits, of safetensors files only
the header is read, and a checkpoint is read by the loader that reads every other one.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptlint.architecture.built import built_model
from ckptlint.architecture.expected import NoTable, UnknownModel
from ckptlint.architecture.huggingface import expected_models
from ckptlint.errors import AccessError, CkptlintError, ConfigError, NothingToCheckError, UnreadableError
from ckptlint.formats.safetensors_header import HEADER_LIMIT, read_header
from ckptlint.formats.strict_json import checked_key, checked_shape, json_object
from ckptlint.loaders.checkpoint import open_checkpoint
from ckptlint.loaders.discover import find_at
from ckptlint.loaders.layouts import CheckpointPlace, recognise
from ckptlint.loaders.readers.model_files import is_stale, weight_map
from ckptlint.model import Checkpoint, Reference
from ckptlint.model.checkpoint import RULE_OF_PROBLEM, UNFINISHED
from ckptlint.model.text import printable
from ckptlint.patterns import lazy_pattern
from ckptlint.sandbox import isolated
from ckptlint.seals.row_hashes import VALUES
from ckptlint.storage.folder import READABLE, Folder
from ckptlint.storage.locate import folder_at
from ckptlint.storage.paths import is_safe, shown
from ckptlint.vocabulary.config_fields import read_declared
from ckptlint.vocabulary.dtypes import DTYPES

_DIGEST = lazy_pattern(r"[0-9a-f]{16}")
MANIFEST_SCHEMA = "ckptlint.manifest/1"
_INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"
_MOST_IMPLIED = 500_000  # tensors of a model that is known by its configuration alone
_POINTER = b"version https://git-lfs"

Tensors = dict[str, tuple[str | None, tuple[int, ...] | None]]


def read_reference(path: str) -> Reference:
    """The reference that a path means: a manifest, safetensors or their index, a model folder, or whatever can be
    checked.

    Raises ConfigError where nothing there can be compared with or read.
    """
    source = shown(path)
    try:
        folder, name = folder_at(path)
    except NothingToCheckError:
        raise ConfigError(f"the reference {source} does not exist") from None
    except AccessError as error:
        raise ConfigError(f"the reference {source} cannot be read: {error}") from None
    try:
        reference = _from_file(folder, name, source) if name else _from_folder(folder, source)
        if reference.kind == "Hugging Face folder" and not reference.tensors:
            implied = _with_implied(reference, isolated(partial(_json, folder, _CONFIG), folder.size(_CONFIG)))
            beside = not implied.tensors and _is_model_folder(folder)
            reference = _from_folder(folder, source) if beside else implied
    except ConfigError:
        raise
    except (CkptlintError, OSError) as error:
        raise ConfigError(f"the reference {source} cannot be read: {error}") from None
    if not (reference.tensors or reference.declared or reference.parts):
        why = f": {reference.not_looked_at}" if reference.not_looked_at else ""
        raise ConfigError(f"the reference {source} names no tensors, so any checkpoint would pass{why}")
    return reference


def _from_folder(folder: Folder, source: str) -> Reference:
    recognised = recognise(folder)
    if recognised is None or recognised.kind in ("safetensors", "unsupported"):
        if _is_model_folder(folder):
            size = sum(folder.size(name) for name in (_INDEX, _CONFIG) if folder.has(name))
            size += sum(_header_length(folder, name) for name in _safetensors(folder))
            return isolated(partial(_model_folder, folder, source), size)
        if folder.has(_CONFIG) and (recognised is not None or not folder.folders()):
            return isolated(partial(_model_folder, folder, source), folder.size(_CONFIG))
    return _from_checkpoint(folder, "", source)


def _from_file(folder: Folder, name: str, source: str) -> Reference:
    if name.endswith((".metadata", ".distcp")) or name in ("common.pt", "metadata.json"):
        return _from_checkpoint(folder, name, source)
    if name == _CONFIG:  # what it implies, whatever is next to it
        return isolated(partial(_configuration, folder, source), folder.size(name))
    if folder.stat(name)[0] not in READABLE:
        raise ConfigError(f"the reference {source} is not a regular file")
    if name.endswith(".safetensors"):
        return isolated(partial(_safetensors_file, folder, name, source), _header_length(folder, name))
    size = folder.size(name)
    if name.endswith(".index.json"):
        size += sum(_header_length(folder, file) for file in _safetensors(folder))
        return isolated(partial(_index_file, folder, name, source), size)
    return isolated(partial(_manifest, folder, name, source), size)


def manifest_text(
    checkpoints: Iterable[Checkpoint],
    values: Mapping[str, Mapping[str, int]] | None = None,
    rows: Mapping[str, Mapping[str, npt.NDArray[np.uint64]]] | None = None,
    salt: int = 0,
) -> str:
    """The tensors of a checkpoint, or of all components of one step, as a manifest; raises ConfigError for a key in
    two.

    Names are written as ckptlint prints them; a dtype that the metadata does not state is null. `values` has a digest
    of the elements by key and dtype, `rows` the words of the rows, both made with `salt`.
    """
    merged, _ = _merged({ckpt.path: tensors_of(ckpt) for ckpt in checkpoints})
    lines = []
    for fqn, (dtype, shape) in sorted(merged.items()):
        entry: dict[str, Any] = {"dtype": dtype, "shape": shape}
        if values is not None and fqn in values:
            entry["values"] = {name: f"{number:016x}" for name, number in values[fqn].items()}
        if rows is not None and fqn in rows:
            entry["rows"] = {
                name: b64encode(words.astype("<u8").tobytes()).decode() for name, words in rows[fqn].items()
            }
        lines.append(f"    {json.dumps(fqn, ensure_ascii=False)}: {json.dumps(entry)}")
    body = ",\n".join(lines)
    head = f'\n  "schema": "{MANIFEST_SCHEMA}",'
    if values is not None:
        head += f'\n  "values": {json.dumps({"algorithm": VALUES, "salt": f"{salt:016x}"})},'
    return f'{{{head}\n  "tensors": {{\n{body}\n  }}\n}}\n'


def _manifest(folder: Folder, name: str, source: str) -> Reference:
    """The reference of a manifest, or of the index of a safetensors model."""
    document = _json(folder, name)
    if "weight_map" in document:
        return _index_file(folder, name, source)
    if document.get("schema") != MANIFEST_SCHEMA:
        raise UnreadableError(f"it is not a manifest: its schema is not {MANIFEST_SCHEMA!r}")
    entries = document.get("tensors")
    if not isinstance(entries, dict):
        raise UnreadableError("its `tensors` is not an object of keys")
    # names come from `ckptlint manifest`, made printable already: escaping them again would change them
    named = [(fqn if fqn.isprintable() else printable(fqn), fqn, entry) for fqn, entry in entries.items()]
    tensors = {name: _entry(fqn, entry) for name, fqn, entry in named}
    values = {name: hashes for name, fqn, entry in named if (hashes := _values(fqn, entry))}
    rows = {name: words for name, fqn, entry in named if (words := _rows(fqn, entry))}
    salt = _salt(document.get("values")) if values or rows else 0
    return Reference(source, "manifest", tensors, values=values, rows=rows, salt=salt)


def _safetensors_file(folder: Folder, name: str, source: str) -> Reference:
    header = _header(folder, name)
    if header is None:
        raise UnreadableError("it is a git-lfs pointer, not the file itself")
    return Reference(source, "safetensors", header)


def _index_file(folder: Folder, name: str, source: str) -> Reference:
    return Reference(source, "index", _indexed(folder, _places(folder, name)))


def _model_folder(folder: Folder, source: str) -> Reference:
    """Names, dtypes and shapes of a model folder, and what its configuration says."""
    tensors: Tensors = {}
    places = _places(folder, _INDEX) if folder.has(_INDEX) else None
    if places is not None and not is_stale(folder, _safetensors(folder), places):
        tensors = _indexed(folder, places)
    else:
        for name in _safetensors(folder):
            header = _header(folder, name)
            if header is None:
                raise UnreadableError(f"{printable(name)} is a git-lfs pointer, and no {_INDEX} gives the keys")
            if name.startswith("shard-"):
                header = {fqn: (dtype, None) for fqn, (dtype, _) in header.items()}
            elif twice := next((fqn for fqn in header if fqn in tensors), None):
                raise UnreadableError(f"two of its files hold {twice}")
            tensors |= header
    return replace(_configuration(folder, source), tensors=tensors)


def _configuration(folder: Folder, source: str) -> Reference:
    """What the configuration of a model folder says, its tensors left aside."""
    config = _json(folder, _CONFIG) if folder.has(_CONFIG) else {}
    return Reference(source, "Hugging Face folder", {}, declared=read_declared([("config.json", config)]))


def _with_implied(reference: Reference, config: Mapping[str, Any]) -> Reference:
    """The reference with the tensors that its configuration implies, from a table or as the installed transformers
    builds them; or with why there are none. Tied heads and buffers are left out, and so are the dtypes, which an export
    may change."""
    try:
        saved = next(model for model in expected_models(config, at_most=_MOST_IMPLIED) if model.form == "saved")
        tensors = {fqn: tensor.shape for fqn, tensor in saved.tensors.items() if tensor.needed}
    except UnknownModel as reason:
        try:
            tensors = {printable(fqn): shape for fqn, shape in built_model(config).items()}
        except NoTable as more:
            return replace(reference, not_looked_at=_unseen(reference, f"{reason}, {more}"))
    except NoTable as reason:
        return replace(reference, not_looked_at=_unseen(reference, str(reason)))
    return replace(reference, tensors={fqn: (None, shape) for fqn, shape in tensors.items()})


def _unseen(reference: Reference, reason: str) -> str:
    counts = [name for name in reference.declared if name in ("layers", "hidden", "heads", "experts", "vocab")]
    compared = f"; ckptlint compared only what it declares ({', '.join(counts)})" if counts else ""
    return f"which tensors {reference.source} implies: {reason}{compared}"


def _is_model_folder(folder: Folder) -> bool:
    return folder.has(_INDEX) or bool(_safetensors(folder))


def _safetensors(folder: Folder) -> list[str]:
    """The files of a model; `model.safetensors` alone where a copy in another layout is next to it."""
    weights = [name for name in folder.files_beside() if name.endswith(".safetensors")]
    names = [name for name in weights if folder.stat(name)[0] in READABLE]
    return ["model.safetensors"] if "model.safetensors" in names else names


def _places(folder: Folder, index: str) -> Mapping[str, str]:
    with _named(index):
        return weight_map(folder, index)[0]


def _indexed(folder: Folder, places: Mapping[str, str]) -> Tensors:
    """The keys of an index, with dtypes and shapes from the files that lie beside it."""
    headers: dict[str, Tensors] = {}
    for file in dict.fromkeys(places.values()):
        at_hand = file.endswith(".safetensors") and is_safe(file) and folder.stat(file)[0] in READABLE
        headers[file] = (_header(folder, file) if at_hand else None) or {}
    keys = {fqn: printable(fqn) for fqn in places}
    return {keys[fqn]: headers[file].get(keys[fqn], (None, None)) for fqn, file in places.items()}


def _header_length(folder: Folder, name: str) -> int:
    """Bytes of the header of a safetensors file, bounded by the file and by the limit."""
    head = folder.head(name, 8)
    return min(int.from_bytes(head, "little"), HEADER_LIMIT, folder.size(name))


def _header(folder: Folder, name: str) -> Tensors | None:
    """Dtypes and shapes from the header of a safetensors file; None for a git-lfs pointer to one."""
    if folder.head(name, len(_POINTER)) == _POINTER:
        return None
    with _named(name):
        header = read_header(folder, name, folder.stat(name)[1] or 0)
    # a dtype that torch has no name for counts its shape in other things
    entries = zip(header.names, header.dtypes, header.shapes, strict=True)
    return {printable(fqn): (dtype, None if dtype is None else shape) for fqn, dtype, shape in entries}


def _from_checkpoint(folder: Folder, name: str, source: str) -> Reference:
    parts = {place.folder.name: _readable(place, source) for place in find_at(folder, name)}
    tensors, clashes = _merged({name: tensors_of(ckpt) for name, ckpt in parts.items()}, strict=False)
    if len(parts) == 1:
        return Reference(source, "checkpoint", tensors)
    components = {name: Reference(source, "checkpoint", tensors_of(ckpt)) for name, ckpt in parts.items()}
    return Reference(source, "checkpoint", {} if clashes else tensors, parts=components)


def _readable(place: CheckpointPlace, source: str) -> Checkpoint:
    ckpt = open_checkpoint(place, look_at_files=False)
    if sentence := obstacle(ckpt):
        raise ConfigError(f"the reference {source} cannot be used: {sentence}")
    return ckpt


def obstacle(ckpt: Checkpoint) -> str:
    """Why a checkpoint does not show what another one must hold, with the code of the rule that says more; or ""."""
    for problem in ckpt.problems:
        if problem.blocks or problem.kind in ("unsafe", "unreadable", "limit", "container"):
            return f"{RULE_OF_PROBLEM.get(problem.kind, UNFINISHED)} {problem.message}"
    return f"{UNFINISHED} {ckpt.partial_because}" if ckpt.partial_because else ""


def tensors_of(ckpt: Checkpoint) -> Tensors:
    """Name -> dtype, None where the metadata does not state it, and global shape."""
    return {t.fqn: (None if t.dtype == "unknown" else t.dtype, t.global_shape) for t in ckpt.tensors.values()}


def _merged(parts: Mapping[str, Tensors], strict: bool = True) -> tuple[Tensors, bool]:
    """The tensors of all components, and whether two hold one key; raises ConfigError for that where `strict`."""
    merged: Tensors = {}
    clashes = False
    for name, tensors in parts.items():
        if twice := next((fqn for fqn in tensors if fqn in merged), None):
            clashes = True
            if strict:
                raise ConfigError(f"{name} and another component both hold {twice}: name one of the components")
        merged |= tensors
    return merged, clashes


def _json(folder: Folder, name: str) -> dict[str, Any]:
    with _named(name):
        return json_object(folder.read(name, HEADER_LIMIT))


@contextmanager
def _named(file: str) -> Iterator[None]:
    """Errors of reading a file say its name."""
    try:
        yield
    except UnreadableError as error:
        raise type(error)(f"{printable(file)} {error}") from None


def _salt(made: Any) -> int:
    """The salt with which the values of a manifest were made."""
    algorithm, salt = (made.get("algorithm"), made.get("salt")) if isinstance(made, dict) else (None, None)
    if algorithm != VALUES:
        raise UnreadableError(
            f"its values are not of the kind {VALUES!r}, which this version compares: write it again with "
            "`ckptlint manifest --values`"
        )
    if not (isinstance(salt, str) and _DIGEST.fullmatch(salt)):
        raise UnreadableError("the salt of its values is not 16 hexadecimal digits")
    return int(salt, 16)


def _values(fqn: str, entry: Any) -> dict[str, int]:
    """Dtype -> digest of the values of one tensor of a manifest."""
    values = entry.get("values", {}) if isinstance(entry, dict) else {}
    is_known = isinstance(values, dict) and all(
        dtype in DTYPES and isinstance(text, str) and _DIGEST.fullmatch(text) for dtype, text in values.items()
    )
    if not is_known:
        raise UnreadableError(f"the values of {printable(fqn)} are not digests of 16 hexadecimal digits by dtype")
    return {dtype: int(text, 16) for dtype, text in values.items()}


def _rows(fqn: str, entry: Any) -> dict[str, npt.NDArray[np.uint64]]:
    """Dtype -> words of the rows of one tensor of a manifest."""
    words = {}
    rows: Any = entry.get("rows", {}) if isinstance(entry, dict) else {}
    rows = rows if isinstance(rows, dict) else {"": None}
    for dtype, text in rows.items():
        try:
            data = b64decode(text, validate=True)
        except (TypeError, ValueError):
            data = b"?"
        if dtype not in DTYPES or len(data) % 8:
            raise UnreadableError(f"the rows of {printable(fqn)} are not words in base64 by dtype")
        words[dtype] = np.frombuffer(data, "<u8").astype(np.uint64)
    return words


def _entry(fqn: str, entry: Any) -> tuple[str | None, tuple[int, ...] | None]:
    """Dtype and shape of one tensor of a manifest."""
    shown = printable(checked_key(fqn))
    if not isinstance(entry, dict):
        raise UnreadableError(f"it has no dtype and shape for {shown}")
    dtype, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(dtype, str | None):
        raise UnreadableError(f"the dtype of {shown} is not text")
    return None if dtype is None else printable(dtype), None if shape is None else checked_shape(fqn, shape)
