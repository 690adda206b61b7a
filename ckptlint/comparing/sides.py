"""The checkpoints that a path means, opened to be described or compared, not judged."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckptlint.depth import Depth
from ckptlint.errors import CheckpointError
from ckptlint.loaders.checkpoint import open_checkpoint
from ckptlint.loaders.discover import find
from ckptlint.loaders.readers.common_state import read_numbers
from ckptlint.loaders.reference import obstacle
from ckptlint.model import Checkpoint
from ckptlint.storage.folder import Folder


@dataclass(frozen=True, slots=True)
class OpenedCheckpoint:
    """A checkpoint and where it is."""

    folder: Folder
    ckpt: Checkpoint


def open_side(path: str, files: bool = False, partial: bool = False) -> list[OpenedCheckpoint]:
    """The checkpoints that a path means, with `partial` also one whose metadata describes only part of the save.

    Raises CheckpointError with a line for each that is unsafe or unreadable, NothingToCheckError, or AccessError.
    """
    made = [OpenedCheckpoint(place.folder, open_checkpoint(place, files)) for place in find(path)]
    obstacles = ((item, obstacle(replace(item.ckpt, partial_because="") if partial else item.ckpt)) for item in made)
    if sentences := [f"{item.ckpt.path}: {sentence}" for item, sentence in obstacles if sentence]:
        raise CheckpointError("\n".join(sentences))
    return made


def read_records(side: Sequence[OpenedCheckpoint], depth: Depth) -> list[Checkpoint]:
    """The checkpoints with the numbers in small entries, and records read as deep as `depth`, or AccessError."""
    side = [
        replace(
            opened,
            ckpt=replace(
                opened.ckpt, object_values=opened.ckpt.object_values | read_numbers(opened.folder, opened.ckpt)
            ),
        )
        for opened in side
    ]
    if not depth.opens_records:
        return [item.ckpt for item in side]
    from ckptlint.payload.reader import read_payload
    from ckptlint.payload.reading import default_reading

    return [read_payload(item.folder, item.ckpt, default_reading(depth)) for item in side]


def by_place(side: Sequence[OpenedCheckpoint]) -> dict[str, Checkpoint]:
    """The checkpoints by their place below what they have in common."""
    paths = [f"{item.ckpt.path}/" for item in side]
    # of text, since a URL is no path; cut back to whole names
    above = os.path.commonprefix(paths).rpartition("/")[0]  # noqa: RUF071
    return {item.ckpt.path[len(above) :].strip("/"): item.ckpt for item in side}
