"""Records as the metadata describes them: needed bytes, files, and those with chunks."""

from __future__ import annotations

import numpy as np

from ckptlint.model import Checkpoint
from ckptlint.model.tiling import IntArray
from ckptlint.storage.folder import READABLE


def is_bare(ckpt: Checkpoint, needed: IntArray) -> bool:
    """Whether every tensor's record is exactly as long as its elements: then there is no archive around them.

    Source: dlrover.trainer.torch.flash_checkpoint.fsdp_engine and ByteCheckpoint write raw bytes
    """
    known = needed > 0
    return bool(known.any() and (needed[known] == ckpt.records.byte_length[known]).all())


def path_of(ckpt: Checkpoint, file: int) -> str:
    """The raw path of a payload file that can be opened."""
    path = ckpt.files[file].path
    assert path is not None
    return path


def file_sizes(ckpt: Checkpoint) -> IntArray:
    """Bytes of each file, -1 for one that is not to be opened."""
    sizes = np.where(ckpt.files.are(*READABLE), ckpt.files.size, -1)
    sizes[[row for row, path in ckpt.files.paths.items() if path is None]] = -1
    return sizes if len(sizes) else np.array([-1])


def by_file(rows: IntArray, file: np.ndarray, offset: IntArray) -> dict[int, IntArray]:
    """The rows of each file in the order of their bytes."""
    rows = rows[np.lexsort((offset[rows], file[rows]))]
    groups = np.split(rows, np.flatnonzero(np.diff(file[rows])) + 1) if len(rows) else []
    return {int(file[mine[0]]): mine for mine in groups}
