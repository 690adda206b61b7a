"""The checksums that Megatron-Core keeps beside a checkpoint."""

from __future__ import annotations

import json

from ckptlint.errors import UnreadableError
from ckptlint.loaders.problems import from_error
from ckptlint.model import Problem
from ckptlint.model.text import printable
from ckptlint.storage.folder import Folder

INTEGRITY = "integrity.json"
_JSON_LIMIT = 64 * 1024**2


def read_integrity(folder: Folder) -> tuple[dict[str, str] | None, list[Problem]]:
    """The SHA-256 of each file as Megatron-Core recorded it, None where it did not.

    Source:
        megatron.core.dist_checkpointing (>= 0.18) with verify_integrity: `algorithm`, `files` name -> hex digest
    """
    if not folder.has(INTEGRITY):
        return None, []
    try:
        listed = json.loads(folder.read(INTEGRITY, _JSON_LIMIT))
    except UnreadableError as error:
        return None, [from_error(error, INTEGRITY)]
    except (ValueError, RecursionError) as error:
        return None, [from_error(UnreadableError(f"is not JSON ({printable(str(error))})"), INTEGRITY)]
    files = listed.get("files") if isinstance(listed, dict) else None
    if not isinstance(files, dict) or listed.get("algorithm") != "sha256":
        return None, [from_error(UnreadableError("lists no SHA-256 checksums of files"), INTEGRITY)]
    return {name: str(text).lower() for name, text in files.items()}, []
