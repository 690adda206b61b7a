"""Small JSON files beside a checkpoint, read as the libraries that write them read them."""

from __future__ import annotations

import json
from typing import Any

from ckptlint.errors import UnreadableError
from ckptlint.model.text import printable
from ckptlint.storage.folder import Folder


def read_json(folder: Folder, name: str, limit: int) -> tuple[dict[str, Any], UnreadableError | None]:
    """The object in a file, and why it cannot be read; {} without one. It may hold NaN, or a name twice.

    Args:
        limit: bytes that the file may have.

    Raises:
        AccessError: the operating system refused a read.
    """
    try:
        document = json.loads(folder.read(name, limit)) if folder.has(name) else {}
    except UnreadableError as error:
        return {}, error
    except (ValueError, RecursionError) as error:
        return {}, UnreadableError(f"is not JSON ({printable(str(error)[:200])})")
    return document if isinstance(document, dict) else {}, None
