"""Small JSON files beside a checkpoint, read as the libraries that write them read them."""

from __future__ import annotations

import json
from typing import Any

from ckptlint.errors import UnreadableError
from ckptlint.formats.strict_json import why_no_json
from ckptlint.storage.folder import Folder


def read_json(folder: Folder, name: str, limit: int) -> tuple[dict[str, Any], UnreadableError | None]:
    """The object in a file of so many bytes at most, and why it cannot be read; {} without one.

    It may hold NaN, or a name twice. Raises AccessError where a read is refused.
    """
    try:
        document = json.loads(folder.read(name, limit)) if folder.has(name) else {}
    except UnreadableError as error:
        return {}, error
    except (ValueError, RecursionError) as error:
        return {}, UnreadableError(why_no_json(error))
    return document if isinstance(document, dict) else {}, None
