"""What the checksums of its records say about a tensor's bytes, without reading them."""

from __future__ import annotations

import numpy as np

from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.tiling import IntArray


def chunk_sums(ckpt: Checkpoint, tensor: Tensor) -> IntArray | None:
    """The checksum of each chunk that has elements, sorted by offsets.

    Returns:
        (offsets, bytes of the record, its CRC-32) a row; None where a record was not read or has no checksum.
    """
    payload, chunks = ckpt.payload, tensor.chunks
    live = tensor.tiling.live
    rows = chunks.record[live]
    if payload is None or not len(rows) or (rows < 0).any() or (payload.crc[rows] <= 0).any():
        return None
    table = np.column_stack([tensor.tiling.offsets[live], payload.size[rows], payload.crc[rows]])
    return table[np.lexsort(table.T[::-1])]
