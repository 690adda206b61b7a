"""Checksums of whole files: those that Megatron-Core keeps beside a checkpoint, and the names of a cache's blobs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath

from ckptlint.errors import UnreadableError
from ckptlint.loaders.json_file import read_json
from ckptlint.loaders.problems import from_error
from ckptlint.model import Checkpoint, Damage, Problem
from ckptlint.model.text import printable
from ckptlint.payload.archives.members import members_of
from ckptlint.payload.stream import Meter, stream
from ckptlint.storage.folder import READABLE, Folder

INTEGRITY = "integrity.json"
_BLOB = "the name of its blob"
_JSON_LIMIT = 64 * 1024**2
_SHA256 = re.compile(r"[0-9a-f]{64}")


def recorded_sums(folder: Folder) -> tuple[dict[str, str], set[str] | None, list[Problem]]:
    """File -> its checksum as text with who says it; the files that Megatron-Core lists, None where it lists none."""
    listed, problems = _integrity(folder)
    sums = ((_BLOB, _blob_names(folder)), (INTEGRITY, listed or {}))
    found = {name: f"SHA-256 {recorded:64} of {source}" for source, own in sums for name, recorded in own.items()}
    return found, None if listed is None else {*listed}, problems


def differs(computed: str, recorded: str) -> bool:
    """Whether a file with this SHA-256 is another one than recorded, as `recorded_sums` has it."""
    return computed != recorded[8:72].strip()


def compare_others(folder: Folder, ckpt: Checkpoint, recorded: Mapping[str, str]) -> list[Damage]:
    """The files with a checksum that are absent, or are no payload and differ.

    Raises:
        AccessError: a read was refused.
    """
    payload = {file.path for file in ckpt.files if file.path is not None and file.size is not None}
    damages = []
    for name, own in recorded.items():
        if name in payload:
            continue
        state, size = folder.look_at(name)
        is_there = state in ("ok", "link-outside") and size is not None
        computed = stream(folder, name, members_of([]), {}, size, Meter()).sha256 if is_there else "absent"
        if not is_there or differs(computed, own):
            damages.append(Damage(-1, printable(name), "", own, computed))
    return damages


def _integrity(folder: Folder) -> tuple[dict[str, str] | None, list[Problem]]:
    """The SHA-256 of each file as Megatron-Core recorded it, None where it did not.

    Source:
        megatron.core.dist_checkpointing (>= 0.18) with verify_integrity: `algorithm`, `files` name -> hex digest
    """
    if not folder.has(INTEGRITY):
        return None, []
    listed, error = read_json(folder, INTEGRITY, _JSON_LIMIT)
    if error is not None:
        return None, [from_error(error, INTEGRITY)]
    files = listed.get("files")
    if not isinstance(files, dict) or listed.get("algorithm") != "sha256":
        return None, [from_error(UnreadableError("lists no SHA-256 checksums of files"), INTEGRITY)]
    return {name: str(text).lower() for name, text in files.items()}, []


def _blob_names(folder: Folder) -> dict[str, str]:
    """The SHA-256 of each file that is a link to a blob of that name.

    Source:
        huggingface_hub (2.4) file_download: `snapshots/<commit>/<file>` is a link to `blobs/<etag>`, and the etag of a
        file in LFS is its SHA-256; that of others is a Git hash of 40 digits
    """
    targets = {name: PurePath(folder.outside(name)) for name in folder.files_beside()}
    return {
        name: target.name
        for name, target in targets.items()
        if target.parent.name == "blobs" and _SHA256.fullmatch(target.name) and folder.look_at(name)[0] in READABLE
    }
