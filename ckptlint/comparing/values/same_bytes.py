"""Whether two sides hold the same bytes under the same names: found in one reading of both, without hashes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ckptlint.comparing.sides import OpenedCheckpoint
from ckptlint.depth import Depth
from ckptlint.model import Tensor
from ckptlint.payload.reader import read_payload
from ckptlint.payload.reading import default_reading
from ckptlint.payload.tensor_bytes import TensorBytes
from ckptlint.seals.digests import Words
from ckptlint.seals.row_hashes import Bits, RowHashes, canonical, matrix
from ckptlint.vocabulary.dtypes import ITEM_BITS


class UnequalError(Exception):
    """Some bytes differ, or cannot be compared this way."""


@dataclass(slots=True, eq=False)
class Twin(RowHashes):
    """Holds the elements of a tensor against those of the other side, and gathers no hashes.

    Attributes:
        other: the tensor there.
    """

    other: TensorBytes = field(kw_only=True)

    def __post_init__(self) -> None:
        self.rows = self.columns = np.zeros(0, np.uint64)

    def add(self, bits: Bits, row: int, column: int) -> None:
        """Compare a block of elements, given as `RowHashes.add` has it, or raise UnequalError or AccessError."""
        # of a part of several rows all of these would be read there
        count, width = bits.shape
        twin_rows = self.other.rows(row, row + count) if count == 1 or width == matrix(self.shape)[2] else None
        theirs = None if twin_rows is None else twin_rows[:, column : column + width]
        if theirs is None or not (np.array_equal(bits, theirs) or np.array_equal(bits, canonical(theirs, self.dtype))):
            raise UnequalError
        with self.lock:
            self.count += bits.size

    def scatter(self, bits: Bits, places: Words) -> None:
        """Raises UnequalError, since scattered elements are not compared."""
        raise UnequalError


def twins_of(
    tensors: Mapping[str, Tensor], side: Sequence[OpenedCheckpoint], there: Mapping[str, Tensor], jobs: int | None
) -> dict[str, tuple[RowHashes, ...]]:
    """Key -> comparison of a tensor with its twin in `there`; {} unless all are alike in name, shape, dtype."""
    for name, tensor in tensors.items():
        twin = there.get(name)
        if twin is None or (tensor.global_shape, tensor.dtype) != (twin.global_shape, twin.dtype):
            return {}
        if not (tensor.is_tiled and twin.is_tiled) or ITEM_BITS.get(tensor.dtype, 1) % 8 or "complex" in tensor.dtype:
            return {}
    if len(tensors) != len(there):
        return {}
    twins: dict[str, tuple[RowHashes, ...]] = {}
    how = default_reading(Depth.HEADERS)
    how = replace(how, hashes_only=True, jobs=jobs or how.jobs)
    for opened in side:
        ckpt = read_payload(opened.folder, opened.ckpt, how)
        if ckpt.problems != opened.ckpt.problems or (ckpt.payload and ckpt.payload.damages):
            return {}
        for name, tensor in ckpt.tensors.items():
            if opened.ckpt.tensors[name] is there.get(name):
                place = TensorBytes(opened.folder, ckpt, tensor)
                twins[name] = (Twin(tensor.global_shape, tensor.dtype, 0, other=place),)
    return twins
