"""Where a finding is, for formats that want a file."""

from __future__ import annotations

from ckptlint.model import Checkpoint
from ckptlint.storage.paths import is_safe


def file_of(ckpt: Checkpoint, name: str) -> str:
    """The file to point at, relative to the checkpoint: the one of this name, or the metadata where there is none.

    A stored path that leaves the folder is never pointed at, since a viewer would follow it.
    """
    return name if is_safe(name) else ckpt.metadata_file
