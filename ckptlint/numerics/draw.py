"""Draws the same elements from tensors that follow from each other, in one step or two, and measures them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import compress
from math import prod

import numpy as np

from ckptlint.model import ChangeTable, Checkpoint, Follow, Pair, PairTable, RecordState, Tensor
from ckptlint.model.payload import CHANGE_ROW, PAIR_ROW, plain_content
from ckptlint.model.tiling import Box, IntArray, distinct
from ckptlint.numerics.chunks import Floats, may_be_padding
from ckptlint.numerics.decode import decoded
from ckptlint.numerics.laws import changed, odd_elements
from ckptlint.storage.folder import Folder
from ckptlint.vocabulary.dtypes import ENCODINGS, ITEM_BITS

_RUN = 1_024  # neighbouring elements, which one read takes
_GAP = 64  # elements between two that are wanted, up to which reading on costs less than a read of its own


def draw_pairs(folder: Folder, ckpt: Checkpoint, pairs: Sequence[Pair], per_chunk: int, most: int) -> PairTable:
    """What drawn elements say of pairs of tensors.

    Args:
        per_chunk: elements of a chunk; of smaller chunks all are taken.
        most: chunks to draw from; of more, as many of each file are taken in turn.

    Raises:
        AccessError: a read was refused.
    """
    reasons = {pair: _cannot(ckpt.tensors[pair.first]) or _cannot(ckpt.tensors[pair.second]) for pair in pairs}
    firsts = [ckpt.tensors[pair.first] for pair in pairs]
    places, chunks = _chunks_in_turn(ckpt, firsts, [not reasons[pair] for pair in pairs], most)
    reader, rows = Elements(folder, ckpt), list[tuple[float, ...]]()
    for number, chunk in places:
        pair = pairs[number]
        first, second = firsts[number], ckpt.tensors[pair.second]
        box = first.tiling.box(chunk)
        at = drawn_places(box.volume, per_chunk)
        numbers = [reader.read(tensor, first, chunk, at) for tensor in (first, second)]
        if numbers[0] is None or numbers[1] is None:
            continue
        is_odd, worst = odd_elements(pair, numbers[0], numbers[1], (first.dtype, second.dtype))
        odd = np.flatnonzero(is_odd)
        lines = box.offsets[0] + at[odd] // prod(box.sizes[1:]) if len(odd) and box.sizes else np.zeros(1, np.int64)
        rows.append((number, chunk, len(at), len(odd), int(lines.min()), int(lines.max()) + 1, worst))
    unread = {pair: reason for pair, reason in reasons.items() if reason}
    return PairTable(list(pairs), np.array(rows, PAIR_ROW), chunks, unread)


def records_to_draw(ckpt: Checkpoint, after: Checkpoint, groups: Sequence[Sequence[str]], most: int) -> IntArray:
    """int64 [k], ascending, the records of a checkpoint that hold what is drawn of some tensors.

    Args:
        after: the step whose chunks are drawn: the checkpoint itself, or the step after it.
        groups: keys of which the first one's chunks are drawn, from all of them.
        most: chunks to draw from, as `draw_pairs` has it.
    """
    firsts = [after.tensors[group[0]] for group in groups]
    rows = [np.zeros(0, np.int64)]
    for number, chunk in _chunks_in_turn(after, firsts, [not _cannot(first) for first in firsts], most)[0]:
        for tensor in filter(None, map(ckpt.tensors.get, groups[number])):
            if tensor.is_tiled and tensor.volume == firsts[number].volume:
                rows.append(tensor.chunks.record[touching(tensor, firsts[number], chunk)])
    wanted = distinct(np.concatenate(rows))
    return wanted[wanted >= 0]


def draw_changes(now: Elements, was: Elements, follows: Sequence[Follow], per_chunk: int, most: int) -> ChangeTable:
    """What drawn elements of a step are beside those of the step before, at the same places.

    Args:
        now, was: this step and the one before, which have the tensors of `follows` in the same shape.
        per_chunk, most: as `draw_pairs` has them.

    Raises:
        AccessError: a read was refused.
    """
    tensors = [now.ckpt.tensors[follow.key] for follow in follows]
    can = [not _cannot(tensor) and not _cannot(was.ckpt.tensors[tensor.fqn]) for tensor in tensors]
    places, chunks = _chunks_in_turn(now.ckpt, tensors, can, most)
    first_of = {follow.second: number for number, follow in enumerate(follows) if follow.second}
    # a second moment comes right after the first one beside which it was read
    places.sort(key=lambda at: (first_of.get(follows[at[0]].key, at[0]), at[1], not follows[at[0]].second))
    rows, beside, place_beside = list[tuple[float, ...]](), list[Floats | None](), None
    for number, chunk in places:
        follow, tensor = follows[number], tensors[number]
        box = tensor.tiling.box(chunk)
        at = drawn_places(box.volume, per_chunk)
        both, place = beside, (follow.key, box)
        if place != place_beside:
            both = [step.read(step.ckpt.tensors[follow.key], tensor, chunk, at) for step in (now, was)]
        beside, place_beside = [None, None], (follow.second, box)
        if follow.second:
            beside = [step.read(step.ckpt.tensors[follow.second], tensor, chunk, at) for step in (now, was)]
        if both[0] is not None and both[1] is not None:
            dtypes = tensor.dtype, now.ckpt.tensors[follow.second or follow.key].dtype
            rows.append((number, chunk, *changed(follow, both[0], both[1], beside, dtypes)))
    rows.sort(key=lambda row: row[:2])
    return ChangeTable(list(follows), np.array(rows, CHANGE_ROW), chunks)


def _chunks_in_turn(
    ckpt: Checkpoint, tensors: Sequence[Tensor], can: Sequence[bool], most: int
) -> tuple[list[tuple[int, int]], int]:
    """The chunks to draw from, as (position of the tensor, row of the chunk), in order; and how many there are in all.

    At most so many, as many of each file as of the others, of a file at equal distances. Each file begins at another
    one, so that all tensors are among those of many files.
    """
    none, total = np.zeros(0, np.int64), 0
    columns = [(none, none, none)]
    for number, tensor in compress(enumerate(tensors), can):
        rows = np.flatnonzero(tensor.tiling.live & ~may_be_padding(tensor))
        total += len(rows)
        if ckpt.payload is not None:
            record = tensor.chunks.record[rows]
            rows = rows[(record < 0) | (ckpt.payload.state[record] != RecordState.UNSAMPLED)]
        columns.append((np.full(len(rows), number), rows, tensor.chunks.record[rows]))
    at, chunk, record = map(np.concatenate, zip(*columns, strict=True))
    file = np.where(record < 0, -1, ckpt.records.file[record]) if len(record) else none
    order = np.argsort(file, kind="stable")
    _, begin, count = np.unique(file[order], return_index=True, return_counts=True)
    step = np.maximum(count // max(most // max(len(count), 1), 1), 1)
    place = np.arange(len(order)) - np.repeat(begin + np.arange(len(count)) % step, count)
    turn, rest = np.divmod(place, np.repeat(step, count))
    is_drawn = (place >= 0) & (rest == 0)
    drawn = np.sort(order[is_drawn][np.argsort(turn[is_drawn], kind="stable")][:most])
    return [*zip(at[drawn].tolist(), chunk[drawn].tolist(), strict=True)], total


def _cannot(tensor: Tensor) -> str:
    """Why elements cannot be drawn from a tensor; "" where they can."""
    if tensor.dtype not in ENCODINGS or tensor.dtype.startswith("complex"):
        return f"{tensor.dtype} holds no plain numbers"
    return "" if tensor.is_tiled else "its chunks do not tile it"


@lru_cache(64)
def drawn_places(volume: int, most: int) -> IntArray:
    """int64 [k], ascending, positions among the elements of a chunk: all, or runs at equal distances."""
    if volume <= most:
        return np.arange(volume)
    count = most // _RUN
    starts = np.linspace(0, volume - _RUN, count).astype(np.int64) if count > 1 else np.array([(volume - _RUN) // 2])
    return np.asarray((starts[:, None] + np.arange(_RUN)).reshape(-1))


class Elements:
    """Reads elements of the tensors of a checkpoint, whose payload was read."""

    def __init__(self, folder: Folder, ckpt: Checkpoint) -> None:
        self.folder, self.ckpt = folder, ckpt
        self._damaged = {damage.record for damage in ckpt.payload.damages} if ckpt.payload is not None else set()

    def read(self, tensor: Tensor, first: Tensor, chunk: int, at: IntArray) -> Floats | None:
        """float64 [k], the elements of a tensor that stand beside some of another's chunk; None if one is unreadable.

        Args:
            first: the tensor of the chunk, of the same shape, or else `tensor` is it as one row.
            at: int64 [k], ascending, their positions in the chunk, in C order.

        Raises:
            AccessError: a read was refused.
        """
        rows, box = touching(tensor, first, chunk), first.tiling.box(chunk)
        if not self._damaged.isdisjoint(tensor.chunks.record[rows].tolist()):
            return None
        if tensor.global_shape != first.global_shape:
            places = _in_row(at, box, first)
        elif len(rows) == 1 and _is_same(tensor, int(rows[0]), first, chunk):
            return _of_chunk(self.folder, self.ckpt, tensor, int(rows[0]), at)
        else:
            places = np.stack(np.unravel_index(at, box.sizes), axis=1) + np.array(box.offsets, np.int64)
        return self._of_chunks(tensor, rows, places)

    def read_places(self, tensor: Tensor, places: IntArray) -> Floats | None:
        """float64 [k], the elements of a tensor at places [k, axes] in C order; None if one is unreadable.

        Raises:
            AccessError: a read was refused.
        """
        rows = tensor.tiling.rows_between(places.min(axis=0), places.max(axis=0) + 1)
        if not self._damaged.isdisjoint(tensor.chunks.record[rows].tolist()):
            return None
        return self._of_chunks(tensor, rows, places)

    def _of_chunks(self, tensor: Tensor, rows: IntArray, places: IntArray) -> Floats | None:
        tiling = tensor.tiling
        elements, left = np.empty(len(places), np.float64), np.ones(len(places), bool)
        for chunk in rows.tolist():
            inner = places - tiling.offsets[chunk]
            inside = ((inner >= 0) & (inner < tiling.sizes[chunk])).all(axis=1)
            if not inside.any():
                continue
            flat = np.ravel_multi_index(tuple(inner[inside].T), tuple(tiling.sizes[chunk].tolist()))
            numbers = _of_chunk(self.folder, self.ckpt, tensor, chunk, np.asarray(flat, np.int64))
            if numbers is None:
                return None
            elements[inside] = numbers
            left &= ~inside
        return None if left.any() else elements


def touching(tensor: Tensor, first: Tensor, chunk: int) -> IntArray:
    """int64 [k], the live chunks of a tensor that have elements in a chunk of another, which it has the shape of.

    Or it is the other tensor as one row.
    """
    box = first.tiling.box(chunk)
    if tensor.global_shape != first.global_shape:
        low, last = _in_row(np.array([0, box.volume - 1]), box, first)
        high = last + 1
    elif chunk < len(tensor.chunks) and tensor.tiling.live[chunk] and _is_same(tensor, chunk, first, chunk):
        return np.array([chunk])  # most are cut alike
    else:
        low, high = np.array(box.offsets, np.int64), np.array(box.ends, np.int64)
    return tensor.tiling.rows_between(low, high)


def _is_same(tensor: Tensor, row: int, first: Tensor, chunk: int) -> bool:
    """Whether a chunk of a tensor is the region of a chunk of another of its shape."""
    tiling, first_tiling = tensor.tiling, first.tiling
    return row == chunk if tiling is first_tiling else tiling.box(row) == first_tiling.box(chunk)


def _in_row(at: IntArray, box: Box, tensor: Tensor) -> IntArray:
    """int64 [k, 1], ascending, where elements of a region are in the row of all elements of the tensor."""
    places = [place + low for place, low in zip(np.unravel_index(at, box.sizes), box.offsets, strict=True)]
    return np.asarray(np.ravel_multi_index(places, tensor.global_shape), np.int64)[:, None]


def _of_chunk(folder: Folder, ckpt: Checkpoint, tensor: Tensor, chunk: int, at: IntArray) -> Floats | None:
    """float64 [k], the elements at ascending positions of a chunk, in C order; None where they cannot be read."""
    record, payload, item = int(tensor.chunks.record[chunk]), ckpt.payload, ITEM_BITS[tensor.dtype] // 8
    if record < 0 or payload is None:
        return None
    row, content = payload.rows[record], payload.of(record)
    start, size = int(row["start"]), int(row["size"])
    sizes = tuple(tensor.tiling.sizes[chunk].tolist())
    plain = plain_content(tensor.dtype, sizes)
    if content is None and row["state"] == RecordState.RAW:
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
    at = at + content.offset
    is_run = order is None and int(at[-1]) - int(at[0]) == len(at) - 1  # as most are
    groups = [at] if is_run else np.split(at, np.flatnonzero(np.diff(at) > _GAP) + 1)
    spans = [(start + int(group[0]) * item, (int(group[-1]) - int(group[0]) + 1) * item) for group in groups]
    pieces = [folder.read_range(path, *spans[0])] if is_run else folder.ranges(path, spans)
    if any(len(piece) != length for piece, (_, length) in zip(pieces, spans, strict=True)):
        return None
    words = [np.frombuffer(piece, f"<u{item}") for piece in pieces]
    if not is_run:
        words = [np.concatenate([piece[group - group[0]] for piece, group in zip(words, groups, strict=True)])]
    numbers = decoded(words[0], tensor.dtype)
    if numbers is None:
        return None
    with np.errstate(invalid="ignore"):
        read = numbers.astype(np.float64)
    if order is None:
        return read
    elements = np.empty(len(at), np.float64)
    elements[order] = read
    return elements
