"""What the metadata says of the records: the bytes that each needs, their files, and which of them hold chunks."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.layout import IntArray
from ckptlint.storage.folder import READABLE
from ckptlint.vocabulary.dtypes import nbytes


def needed_bytes(ckpt: Checkpoint) -> tuple[IntArray, np.ndarray]:
    """For each record the bytes of its chunk, -1 where they are not known; and whether it holds a chunk at all."""
    needed = np.full(len(ckpt.records), -1, np.int64)
    is_tensor = np.zeros(len(ckpt.records), bool)
    by_rank = defaultdict[int, list[Tensor]](list)
    for tensor in ckpt.tensors.values():
        by_rank[tensor.layout.sizes.shape[1]].append(tensor)
        if tensor.malformed:
            is_tensor[[chunk.record for chunk in tensor.malformed if chunk.record >= 0]] = True
    for tensors in by_rank.values():
        record = np.concatenate([tensor.chunks.record for tensor in tensors])
        sizes = np.concatenate([tensor.layout.sizes for tensor in tensors])
        known = [nbytes(tensor.dtype, 1) if tensor.is_sound else None for tensor in tensors]
        counts = [len(tensor.chunks) for tensor in tensors]
        item = np.repeat(np.array([-1 if size is None else size for size in known], np.int64), counts)
        volume = sizes.astype(float).prod(axis=1)
        fits = (record >= 0) & (item >= 0) & (sizes >= 0).all(axis=1) & (volume < 2**55)
        is_tensor[record[record >= 0]] = True
        needed[record[fits]] = sizes[fits].prod(axis=1) * item[fits]
    return needed, is_tensor


def is_bare(ckpt: Checkpoint, needed: IntArray) -> bool:
    """Whether every tensor's record is exactly as long as its elements: then there is no archive around them.

    Source:
        dlrover.trainer.torch.flash_checkpoint.fsdp_engine and ByteCheckpoint write raw bytes
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
    parts = np.split(rows, np.flatnonzero(np.diff(file[rows])) + 1) if len(rows) else []
    return {int(file[part[0]]): part for part in parts}
