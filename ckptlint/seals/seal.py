"""The seal of a checkpoint: digests of its tensors as the saving job held them, in `ckptlint.seal.json` beside it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptlint._version import __version__
from ckptlint.errors import AccessError, LimitError, UnreadableError
from ckptlint.formats.safetensors_header import HEADER_LIMIT, checked_shape, json_object
from ckptlint.model import Checkpoint, RecordState, Seal, SealEntry, Tensor, printable
from ckptlint.seals.digests import ALGORITHM
from ckptlint.storage.folder import Folder

SEAL = "ckptlint.seal.json"
SCHEMA = "ckptlint.seal/1"

_METADATA = ".metadata"
_METADATA_LIMIT = 8 * 1024**3
_WORD, _HASH = re.compile(r"[0-9a-f]{16}"), re.compile(r"([0-9a-f]{32})?")
_TEXT_LIMIT = 200


def read_seal(folder: Folder) -> Seal | None:
    """The seal in a folder, None without one.

    Raises:
        UnreadableError: it is no seal; the message goes behind its name.
        LimitError: it is larger than any seal.
        AccessError: a read was refused.
    """
    if not folder.has(SEAL):
        return None
    document = json_object(folder.read(SEAL, HEADER_LIMIT))
    if document.get("schema") != SCHEMA:
        raise UnreadableError(f"is no seal that this version reads: its schema is not {SCHEMA}")
    algorithm, metadata = _text(document, "algorithm"), _text(document, "metadata_blake2b")
    entries, skipped = document.get("entries"), document.get("skipped", {})
    step = document.get("step")
    if not isinstance(entries, dict) or not isinstance(skipped, dict) or not _HASH.fullmatch(metadata):
        raise UnreadableError("is no seal: entries, skipped or metadata_blake2b are not what a seal has there")
    if step is not None and type(step) is not int:
        raise UnreadableError("has a step that is no number")
    return Seal(
        algorithm,
        metadata,
        dict(_entry(key, entry) for key, entry in entries.items()) if algorithm == ALGORITHM else {},
        {_shown(key): _text(skipped, key) for key in skipped},
        step,
        _text(document, "ckptlint"),
    )


def write_seal(folder: Path, seal: Seal) -> Path:
    """Write the seal into a folder: a whole file or none, on disk when this returns.

    Raises:
        AccessError: the operating system refused.
    """
    document = {
        "schema": SCHEMA,
        "algorithm": seal.algorithm,
        "ckptlint": __version__,
        "step": seal.step,
        "metadata_blake2b": seal.metadata,
        "entries": {
            key: {"dtype": entry.dtype, "shape": list(entry.shape), "digest": f"{entry.digest:016x}"}
            for key, entry in seal.entries.items()
        },
        "skipped": seal.skipped,
    }
    path, unfinished = folder / SEAL, folder / f".{SEAL}.part"
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(json.dumps(document, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        raise AccessError(f"{printable(str(path))} cannot be written: {error.strerror}") from None
    return path


def metadata_hash(folder: Folder) -> str:
    """BLAKE2b of `.metadata`, 32 hexadecimal digits; "" for a folder without one.

    torch >= 2.4 stores an id of the save in it, so a later save into the folder has another hash.
    """
    if not folder.has(_METADATA):
        return ""
    return hashlib.blake2b(folder.read(_METADATA, _METADATA_LIMIT), digest_size=16).hexdigest()


# ---------------------------------------------------------------- comparing


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a seal says of the payload.

    Attributes:
        equal: how many tensors hold what was sealed.
        different: key -> the digest of what its tensor holds, where it is another one.
        unknown: reason -> the keys that could not be compared for it.
    """

    equal: int
    different: dict[str, int]
    unknown: dict[str, list[str]] = field(default_factory=dict)


def misfit(ckpt: Checkpoint) -> str:
    """Why the seal is not about this checkpoint, or ""."""
    return misfit_of(ckpt.seal, ckpt.metadata_hash)


def misfit_of(seal: Seal | None, metadata: str) -> str:
    """Why a seal is not about the checkpoint whose metadata has this hash, or ""."""
    if seal is None:
        return f"there is no {SEAL}"
    if seal.algorithm != ALGORITHM:
        return f"its digests are made by {seal.algorithm!r}, and this version knows {ALGORITHM!r}"
    if seal.metadata == metadata:
        return ""
    return f"it belongs to {_named(seal.metadata)}, and here lies {_named(metadata)}"


def comparable(ckpt: Checkpoint) -> Iterator[Tensor]:
    """The tensors whose digest can tell whether they hold what was sealed, once all their records are read."""
    seal = ckpt.seal
    for fqn, entry in seal.entries.items() if seal else ():
        tensor = ckpt.tensors.get(fqn)
        if tensor is not None and not _obstacle(tensor, entry):
            yield tensor


def compare(ckpt: Checkpoint) -> Comparison:
    """The payload against a seal that fits; nothing is equal for want of a look."""
    seal, payload = ckpt.seal, ckpt.payload
    equal, different = 0, {}
    unknown: dict[str, list[str]] = {}
    assert seal is not None and payload is not None
    for fqn, entry in seal.entries.items():
        tensor = ckpt.tensors.get(fqn)
        reason = "not stored here" if tensor is None else _obstacle(tensor, entry)
        if tensor is not None and not reason:
            records = tensor.chunks.record[tensor.layout.live]
            if not payload.digested[records].all():
                is_left_out = payload.state[records] == RecordState.UNSAMPLED
                reason = "left out by --sample" if is_left_out.any() else _UNREAD
            elif (found := int(payload.digest[records].sum())) != entry.digest:
                different[fqn] = found
            else:
                equal += 1
        if reason:
            unknown.setdefault(reason, []).append(fqn)
    for fqn, why in seal.skipped.items():
        unknown.setdefault(f"not sealed by the job ({why})", []).append(fqn)
    if others := [fqn for fqn in ckpt.tensors if fqn not in seal.entries and fqn not in seal.skipped]:
        unknown["not in the seal"] = others
    return Comparison(equal, different, unknown)


_UNREAD = "the records were not read, or hold no plain tensor of the chunk's dtype and shape"


def _obstacle(tensor: Tensor, entry: SealEntry) -> str:
    """Why a tensor cannot be compared with its entry whatever its records hold, or ""."""
    if tensor.global_shape != entry.shape:
        return "sealed with another shape"
    if tensor.dtype != entry.dtype:
        return "sealed with another dtype"
    if not tensor.is_sound or len(tensor.layout.outside):
        return "its chunks do not tile it"
    holes = tensor.layout.coverage
    if holes.missing_volume or holes.doubled_volume or (tensor.chunks.record[tensor.layout.live] < 0).any():
        return "its chunks do not tile it"
    return ""


def _named(metadata: str) -> str:
    return f"a .metadata with the BLAKE2b {metadata[:12]}..." if metadata else "a checkpoint without .metadata"


# ---------------------------------------------------------------- JSON


def _entry(key: str, entry: Any) -> tuple[str, SealEntry]:
    word = entry.get("digest") if isinstance(entry, dict) else None
    if not isinstance(word, str) or not _WORD.fullmatch(word):
        raise UnreadableError(f"has no digest of 16 hexadecimal digits for {printable(key[:_TEXT_LIMIT])}")
    shape = checked_shape(key, entry.get("shape"))
    return _shown(key), SealEntry(_text(entry, "dtype"), shape, int(word, 16))


def _text(document: dict[str, Any], key: str) -> str:
    value = document.get(key, "")
    if not isinstance(value, str):
        raise UnreadableError(f"has something else than a text as {printable(key[:_TEXT_LIMIT])}")
    if len(value) > _TEXT_LIMIT:
        raise LimitError(f"has {len(value):,} characters as {printable(key[:_TEXT_LIMIT])}, the limit is {_TEXT_LIMIT}")
    return printable(value)


def _shown(key: str) -> str:
    """The key as this package prints keys, and as it wrote it: another escape of a backslash would make it another."""
    return key if key.isprintable() else printable(key)
