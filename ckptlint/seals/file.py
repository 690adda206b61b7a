"""The file of a seal, `ckptlint.seal.json`: digests of the tensors as the saving job held them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ckptlint._version import __version__
from ckptlint.errors import AccessError, LimitError, UnreadableError
from ckptlint.formats.safetensors_header import HEADER_LIMIT
from ckptlint.formats.strict_json import checked_shape, json_object
from ckptlint.model import Seal, SealEntry
from ckptlint.model.text import printable
from ckptlint.patterns import lazy_pattern
from ckptlint.seals.digests import ALGORITHM
from ckptlint.storage.folder import Folder
from ckptlint.storage.writing import write_whole

SEAL = "ckptlint.seal.json"
SCHEMA = "ckptlint.seal/1"
_METADATA = ".metadata"
_METADATA_LIMIT = 8 * 1024**3
_WORD, _HASH = lazy_pattern(r"[0-9a-f]{16}"), lazy_pattern(r"([0-9a-f]{32})?")
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
        raise UnreadableError(f"is not a seal that this version reads: its schema is not {SCHEMA}")
    algorithm, metadata = _text(document, "algorithm"), _text(document, "metadata_blake2b")
    entries, skipped = document.get("entries"), document.get("skipped", {})
    step = document.get("step")
    if not isinstance(entries, dict) or not isinstance(skipped, dict) or not _HASH.fullmatch(metadata):
        raise UnreadableError("is not a seal: its entries, skipped or metadata_blake2b have another form")
    if step is not None and type(step) is not int:
        raise UnreadableError("has a step that is not a number")
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
    path = folder / SEAL
    try:
        write_whole(path, json.dumps(document, indent=1) + "\n", on_disk=True)
    except OSError as error:
        raise AccessError(f"{printable(str(path))} cannot be written: {error.strerror}") from None
    return path


def metadata_hash(folder: Folder) -> str:
    """BLAKE2b of `.metadata`, 32 hexadecimal digits; "" for a folder without one.

    torch >= 2.4 stores an id of the save in it, so a later save into the folder has another hash.
    """
    if not folder.has(_METADATA):
        return ""
    from hashlib import blake2b  # it loads a library of its own

    return blake2b(folder.read(_METADATA, _METADATA_LIMIT), digest_size=16).hexdigest()


def _entry(key: str, entry: Any) -> tuple[str, SealEntry]:
    word = entry.get("digest") if isinstance(entry, dict) else None
    if not isinstance(word, str) or not _WORD.fullmatch(word):
        raise UnreadableError(f"has no digest of 16 hexadecimal digits for {printable(key[:_TEXT_LIMIT])}")
    shape = checked_shape(key, entry.get("shape"))
    return _shown(key), SealEntry(_text(entry, "dtype"), shape, int(word, 16))


def _text(document: dict[str, Any], key: str) -> str:
    value = document.get(key, "")
    name = printable(key[:_TEXT_LIMIT])
    if not isinstance(value, str):
        raise UnreadableError(f"has a {name} that is not text")
    if len(value) > _TEXT_LIMIT:
        raise LimitError(f"has {len(value):,} characters in {name}, the limit is {_TEXT_LIMIT}")
    return printable(value)


def _shown(key: str) -> str:
    """The key as this package prints keys, and as it wrote it: another escape of a backslash would make it another."""
    return key if key.isprintable() else printable(key)
