"""Checksums of whole files: those that Megatron-Core keeps beside a checkpoint, and the names of a cache's blobs."""

from __future__ import annotations

import re
from pathlib import PurePath

from ckptlint.errors import UnreadableError
from ckptlint.loaders.json_file import read_json
from ckptlint.loaders.problems import from_error
from ckptlint.model import Problem
from ckptlint.storage.folder import READABLE, Folder

INTEGRITY = "integrity.json"
_JSON_LIMIT = 64 * 1024**2
_SHA256 = re.compile(r"[0-9a-f]{64}")


def read_integrity(folder: Folder) -> tuple[dict[str, str] | None, list[Problem]]:
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


def blob_names(folder: Folder) -> dict[str, str]:
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
