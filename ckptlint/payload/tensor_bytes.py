"""Some rows of a tensor, put together from its chunks, after its records were read at depth headers or data."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from ckptlint.model import Checkpoint, RecordState, Tensor
from ckptlint.model.cover import Shape
from ckptlint.model.tiling import Box
from ckptlint.numerics.decode import decoded
from ckptlint.payload.archives.members import bare_content, places_of
from ckptlint.seals.row_hashes import Bits, blocks, first_place, matrix, word_of
from ckptlint.storage.folder import Folder
from ckptlint.vocabulary.dtypes import ITEM_BITS

Matrix = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """A readable tensor, or one layer of a stacked tensor."""

    folder: Folder
    ckpt: Checkpoint
    tensor: Tensor
    layer: int | None = None

    @property
    def shape(self) -> Shape:
        """Of the tensor, or of the layer in it."""
        return self.tensor.global_shape[0 if self.layer is None else 1 :]

    def rows(self, first: int, last: int, shape: Shape | None = None) -> Bits | None:
        """The rows [first, last), as unsigned words: [rows, columns]; None where the chunks' places are not known.

        `shape` divides the elements into rows (`seals.row_hashes.matrix`), by default the global one. Raises
        AccessError where a read is refused.
        """
        tensor = self.tensor
        shape = self.shape if shape is None else shape
        columns = matrix(shape)[2]
        if self.layer is not None:
            top = self.layer * prod(shape) // columns
            if prod(shape) % columns:
                return None
            first, last, shape = first + top, last + top, (tensor.global_shape[0] * prod(shape) // columns, columns)
        if self.ckpt.payload is None or tensor.dtype.startswith("complex") or ITEM_BITS.get(tensor.dtype, 1) % 8:
            return None
        end = min(last * columns, prod(shape))  # the last row of a long vector may be shorter
        words = np.zeros((last - first, columns), word_of(tensor.dtype))
        left = end - first * columns
        for row in _touching(tensor, first * columns, end):
            added = self._add(row, first, end, shape, words)
            if added is None:
                return None
            left -= added
        return None if left else words

    def numbers(self, first: int, last: int, shape: Shape | None = None) -> Matrix | None:
        """The rows [first, last) as float32, as `rows` has them; None where their numbers are not known."""
        bits = self.rows(first, last, shape)
        values = None if bits is None else decoded(bits, self.tensor.dtype)
        return None if values is None else np.asarray(values, np.float32)

    def whole(self) -> Matrix | None:
        """All of it as float32 in its shape; None where its numbers are not known."""
        slices, per, _ = matrix(self.shape)
        values = self.numbers(0, slices * per)
        return None if values is None else values.reshape(-1)[: prod(self.shape)].reshape(self.shape)

    def _add(self, row: int, first: int, end: int, shape: Shape, words: Bits) -> int | None:
        """Copy what a chunk has of the elements from row `first` on to element `end`: how many; None if it cannot."""
        tensor, table = self.tensor, self.ckpt.payload
        record = int(tensor.chunks.record[row])
        if table is None or record < 0:
            return None
        content, start = table.of(record), int(table.start[record])
        if content is None and table.state[record] == RecordState.RAW:
            content, start = bare_content(tensor, row), int(self.ckpt.records.byte_offset[record])
        where = None if content is None or content.form != "tensor" else places_of(tensor, row, content)
        if content is None or where is None or start < 0:
            return None
        if list(where.strides) != sorted(where.strides, reverse=True) or (*where.strides, 1)[-1] != 1:
            return None  # stored in another order of the axes
        begin = first * words.shape[1]
        run = where.sizes[-1] if where.sizes else 1
        runs = range(where.volume // run)
        low = max(bisect_right(runs, begin, key=lambda number: first_place(where, number)) - 1, 0)
        high = bisect_left(runs, end, key=lambda number: first_place(where, number))
        if low >= high:
            return 0
        at = low * run + min(max(begin - first_place(where, low), 0), run)
        count = (high - 1) * run + min(end - first_place(where, high - 1), run) - at
        item, path = ITEM_BITS[tensor.dtype] // 8, self.ckpt.files[int(self.ckpt.records.file[record])].path
        if path is None or count <= 0:
            return None if path is None else 0
        data = self.folder.read_range(path, start + (content.offset + at) * item, count * item)
        if len(data) != count * item:
            return None
        bits = np.frombuffer(data, words.dtype)
        for number, column, position, rows, width in blocks(where, at, count, shape):
            block = bits[position : position + rows * width].reshape(rows, width)
            words[number - first : number - first + rows, column : column + width] = block
        return int(count)


def _touching(tensor: Tensor, first: int, end: int) -> list[int]:
    """The chunks whose rows along the first axis contain some of the elements [first, end)."""
    if not tensor.global_shape:
        return [int(row) for row in np.flatnonzero(tensor.tiling.live)]
    axes, inner = len(tensor.global_shape) - 1, max(prod(tensor.global_shape[1:]), 1)
    low, high = first // inner, -(-end // inner)
    return tensor.tiling.touching(Box((low, *[0] * axes), (high - low, *tensor.global_shape[1:])))


BytesByKey = Mapping[str, TensorBytes]
