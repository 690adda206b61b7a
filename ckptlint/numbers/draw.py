"""Draws the same elements from two tensors that follow from each other, and counts those that break their law."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice, zip_longest
from math import prod

import numpy as np
import numpy.typing as npt

from ckptlint.model import Checkpoint, Pair, PairTable, RecordState, Tensor
from ckptlint.model.payload import pair_rows, plain_content
from ckptlint.model.tiling import Box, IntArray
from ckptlint.numbers.chunks import may_be_padding
from ckptlint.numbers.decode import decoded
from ckptlint.numbers.laws import odd_elements
from ckptlint.storage.folder import Folder
from ckptlint.vocabulary.dtypes import ENCODINGS, ITEM_BITS

_RUN = 256  # neighbouring elements, which one read takes
_GAP = 64  # elements between two that are wanted, up to which reading on costs less than a read of its own

Floats = npt.NDArray[np.float64]


def draw_pairs(folder: Folder, ckpt: Checkpoint, pairs: Sequence[Pair], per_chunk: int, most: int) -> PairTable:
    """What drawn elements say of pairs of tensors.

    Args:
        ckpt: with its payload.
        per_chunk: elements of a chunk; of smaller chunks all are taken.
        most: chunks to draw from; of more, as many of each file are taken in turn.

    Raises:
        AccessError: a read was refused.
    """
    unread: dict[Pair, str] = {}
    by_file: dict[str, list[tuple[int, int]]] = defaultdict(list)
    damaged = {damage.record for damage in ckpt.payload.damages} if ckpt.payload is not None else set()
    for number, pair in enumerate(pairs):
        tensors = ckpt.tensors[pair.first], ckpt.tensors[pair.second]
        if reason := _cannot(ckpt, tensors):
            unread[pair] = reason
            continue
        for chunk in np.flatnonzero(tensors[0].tiling.live & ~may_be_padding(tensors[0])).tolist():
            by_file[ckpt.chunk_file(tensors[0], chunk)].append((number, chunk))
    in_turn = (place for places in zip_longest(*by_file.values()) for place in places if place is not None)
    rows: list[tuple[float, ...]] = []
    for number, chunk in sorted(islice(in_turn, most)):
        pair = pairs[number]
        first, second = ckpt.tensors[pair.first], ckpt.tensors[pair.second]
        box = first.tiling.box(chunk)
        at = _drawn(box.volume, per_chunk)
        numbers = [_elements(folder, ckpt, tensor, first, box, at, damaged) for tensor in (first, second)]
        if numbers[0] is None or numbers[1] is None:
            continue
        is_odd, worst = odd_elements(pair, numbers[0], numbers[1], (first.dtype, second.dtype))
        odd = np.flatnonzero(is_odd)
        lines = box.offsets[0] + at[odd] // prod(box.sizes[1:]) if len(odd) and box.sizes else np.zeros(1, np.int64)
        rows.append((number, chunk, len(at), len(odd), worst, int(lines.min()), int(lines.max()) + 1))
    return PairTable(list(pairs), pair_rows(rows), sum(map(len, by_file.values())), unread)


def _cannot(ckpt: Checkpoint, tensors: Sequence[Tensor]) -> str:
    """Why elements cannot be drawn from these tensors; "" where they can."""
    for tensor in tensors:
        if tensor.dtype not in ENCODINGS or tensor.dtype.startswith("complex"):
            return f"{tensor.dtype} holds no plain numbers"
        if not tensor.is_tiled:
            return "its chunks do not tile it"
    return ""


def _drawn(volume: int, most: int) -> IntArray:
    """int64 [k], ascending, positions among the elements of a chunk: all, or runs at equal distances."""
    if volume <= most:
        return np.arange(volume)
    starts = np.arange(most // _RUN) * (volume - _RUN) // max(most // _RUN - 1, 1)
    return np.asarray((starts[:, None] + np.arange(_RUN)).reshape(-1))


def _elements(
    folder: Folder, ckpt: Checkpoint, tensor: Tensor, first: Tensor, box: Box, at: IntArray, damaged: set[int]
) -> Floats | None:
    """float64 [k], the elements of a tensor that stand beside some of another's region; None where one cannot be read.

    Args:
        first: the tensor of the region, of the same shape, or else `tensor` is it as one row.
        at: int64 [k], ascending, their positions in the region, in C order.
        damaged: records that do not match their checksum.

    Raises:
        AccessError: a read was refused.
    """
    tiling = tensor.tiling
    low, high = np.array(box.offsets, np.int64), np.array(box.ends, np.int64)
    is_row = tensor.global_shape != first.global_shape
    if is_row:
        places = _in_row(at, box, first)
        low, high = places[0], places[-1] + 1
    ends = tiling.offsets + tiling.sizes
    touching = np.flatnonzero(tiling.live & (tiling.offsets < high).all(axis=1) & (ends > low).all(axis=1))
    if damaged.intersection(tensor.chunks.record[touching].tolist()):
        return None
    if not is_row:
        if len(touching) == 1 and tiling.box(int(touching[0])) == box:
            return _of_chunk(folder, ckpt, tensor, int(touching[0]), at)
        places = np.stack(np.unravel_index(at, box.sizes), axis=1) + low
    found, left = np.empty(len(at), np.float64), np.ones(len(at), bool)
    for chunk in touching.tolist():
        inner = places - tiling.offsets[chunk]
        inside = ((inner >= 0) & (inner < tiling.sizes[chunk])).all(axis=1)
        if not inside.any():
            continue
        flat = np.ravel_multi_index(tuple(inner[inside].T), tuple(tiling.sizes[chunk].tolist()))
        numbers = _of_chunk(folder, ckpt, tensor, chunk, np.asarray(flat, np.int64))
        if numbers is None:
            return None
        found[inside] = numbers
        left &= ~inside
    return None if left.any() else found


def _in_row(at: IntArray, box: Box, tensor: Tensor) -> IntArray:
    """int64 [k, 1], ascending, where elements of a region are in the row of all elements of the tensor."""
    places = [place + low for place, low in zip(np.unravel_index(at, box.sizes), box.offsets, strict=True)]
    return np.asarray(np.ravel_multi_index(places, tensor.global_shape), np.int64)[:, None]


def _of_chunk(folder: Folder, ckpt: Checkpoint, tensor: Tensor, chunk: int, at: IntArray) -> Floats | None:
    """float64 [k], the elements at ascending positions of a chunk, in C order; None where they cannot be read."""
    record, payload, item = int(tensor.chunks.record[chunk]), ckpt.payload, ITEM_BITS[tensor.dtype] // 8
    if record < 0 or payload is None:
        return None
    content, start, size = payload.of(record), int(payload.start[record]), int(payload.size[record])
    sizes = tensor.tiling.box(chunk).sizes
    plain = plain_content(tensor.dtype, sizes)
    if content is None and payload.state[record] == RecordState.RAW:
        content = plain
        start, size = int(ckpt.records.byte_offset[record]), int(ckpt.records.byte_length[record])
    if content is None or (content.form, content.dtype, content.shape) != ("tensor", tensor.dtype, sizes) or start < 0:
        return None
    path = ckpt.files[int(ckpt.records.file[record])].path
    if path is None or (content.offset + content.extent) * item > size:
        return None
    order = None
    if content.strides != plain.strides:
        at = np.stack(np.unravel_index(at, sizes), axis=1) @ np.array(content.strides, np.int64)
        order = np.argsort(at, kind="stable")
        at = at[order]
    cuts = np.flatnonzero(np.diff(at) > _GAP) + 1
    groups = np.split(at + content.offset, cuts)
    spans = [(start + int(group[0]) * item, (int(group[-1]) - int(group[0]) + 1) * item) for group in groups]
    parts = folder.ranges(path, spans)
    if any(len(part) != length for part, (_, length) in zip(parts, spans, strict=True)):
        return None
    words = [np.frombuffer(part, f"<u{item}")[group - group[0]] for part, group in zip(parts, groups, strict=True)]
    numbers = decoded(np.concatenate(words), tensor.dtype)
    if numbers is None:
        return None
    with np.errstate(invalid="ignore"):
        read = numbers.astype(np.float64)
    if order is None:
        return read
    found = np.empty(len(at), np.float64)
    found[order] = read
    return found
