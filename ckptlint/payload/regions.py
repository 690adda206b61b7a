"""Some rows of a tensor, put together from its chunks, after its records were read at depth headers or data."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptlint.model import Checkpoint, RecordState, Tensor
from ckptlint.seals.words import matrix, word_of
from ckptlint.storage.folder import Folder
from ckptlint.vocabulary.dtypes import ITEM_BITS

Bits = npt.NDArray[np.unsignedinteger[Any]]


def rows_of(folder: Folder, ckpt: Checkpoint, tensor: Tensor, first: int, last: int) -> Bits | None:
    """The rows [first, last) as unsigned words, [rows, columns]; None where they cannot be told from the chunks' bytes.

    Axes but the last are joined to rows. Chunks may be cut on the first and on the last axis.

    Raises:
        AccessError: a read was refused.
    """
    slices, per, columns = matrix(tensor.global_shape)
    if (
        ckpt.payload is None
        or tensor.dtype.startswith("complex")
        or (prod(tensor.global_shape) != slices * per * columns)
    ):
        return None
    shape = tensor.global_shape if len(tensor.global_shape) > 1 else (prod(tensor.global_shape), 1)
    middle = prod(shape[1:-1])
    found = np.zeros((last - first, columns), word_of(tensor.dtype))
    is_there = 0
    for row in np.flatnonzero(tensor.layout.live).tolist():
        box, record = tensor.layout.box(row), int(tensor.chunks.record[row])
        offsets = box.offsets if len(tensor.global_shape) > 1 else (*(box.offsets or (0,)), 0)
        sizes = box.sizes if len(tensor.global_shape) > 1 else (*(box.sizes or (1,)), 1)
        if sizes[1:-1] != shape[1:-1]:
            return None
        begin, end = max(offsets[0] * middle, first), min((offsets[0] + sizes[0]) * middle, last)
        if begin >= end or not prod(sizes):
            continue
        part = _read(folder, ckpt, tensor, record, sizes, begin - offsets[0] * middle, end - offsets[0] * middle)
        if part is None:
            return None
        found[begin - first : end - first, offsets[-1] : offsets[-1] + sizes[-1]] = part
        is_there += part.size
    return found if is_there == found.size else None


def _read(
    folder: Folder, ckpt: Checkpoint, tensor: Tensor, record: int, sizes: tuple[int, ...], first: int, last: int
) -> Bits | None:
    """The rows [first, last) of a chunk, which lie one after the other in its record."""
    table = ckpt.payload
    if table is None or record < 0 or table.start[record] < 0:
        return None
    item, offset = ITEM_BITS[tensor.dtype] // 8, 0
    content = table.of(record)
    if content is not None:
        plain = tuple(prod(content.shape[axis + 1 :]) for axis in range(len(content.shape)))
        is_plain = all(
            size == 1 or own == wanted for size, own, wanted in zip(content.shape, content.strides, plain, strict=True)
        )
        if content.form != "tensor" or content.dtype != tensor.dtype or not is_plain:
            return None
        offset = content.offset * item
    elif table.state[record] != RecordState.RAW:
        return None
    path = ckpt.files[int(ckpt.records.file[record])].path
    if path is None:
        return None
    start = int(table.start[record]) + offset + first * sizes[-1] * item
    data = folder.read_range(path, start, (last - first) * sizes[-1] * item)
    if len(data) != (last - first) * sizes[-1] * item:
        return None
    return np.frombuffer(data, word_of(tensor.dtype)).reshape(last - first, sizes[-1])


def numbers(bits: Bits, dtype: str) -> npt.NDArray[np.float64] | None:
    """The numbers that unsigned words stand for; None for dtypes of which that is not known."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    views = {"float64": np.float64, "float32": np.float32, "float16": np.float16}
    views |= {name: np.dtype(name).type for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")}
    return bits.view(views[dtype]).astype(np.float64) if dtype in views else None
