"""Draws the same elements from tensors that follow from each other, in one step or two, and measures them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice, zip_longest
from math import prod

import numpy as np
import numpy.typing as npt

from ckptlint.model import ChangeTable, Checkpoint, Follow, Pair, PairTable, RecordState, Tensor
from ckptlint.model.payload import change_rows, pair_rows, plain_content
from ckptlint.model.tiling import BoolArray, Box, IntArray
from ckptlint.numerics.chunks import may_be_padding
from ckptlint.numerics.decode import decoded
from ckptlint.numerics.laws import changed, odd_elements
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
    reasons = {pair: _cannot(ckpt.tensors[pair.first]) or _cannot(ckpt.tensors[pair.second]) for pair in pairs}
    firsts = [ckpt.tensors[pair.first] for pair in pairs]
    places = _places(ckpt, firsts, [not reasons[pair] for pair in pairs])
    reader, rows = Elements(folder, ckpt), list[tuple[float, ...]]()
    for number, chunk in _in_turn(places, most):
        pair = pairs[number]
        first, second = firsts[number], ckpt.tensors[pair.second]
        box = first.tiling.box(chunk)
        at = _drawn(box.volume, per_chunk)
        numbers = [reader.read(tensor, first, box, at) for tensor in (first, second)]
        if numbers[0] is None or numbers[1] is None:
            continue
        is_odd, worst = odd_elements(pair, numbers[0], numbers[1], (first.dtype, second.dtype))
        odd = np.flatnonzero(is_odd)
        lines = box.offsets[0] + at[odd] // prod(box.sizes[1:]) if len(odd) and box.sizes else np.zeros(1, np.int64)
        rows.append((number, chunk, len(at), len(odd), worst, int(lines.min()), int(lines.max()) + 1))
    unread = {pair: reason for pair, reason in reasons.items() if reason}
    chunks = sum(
        int(_holding_numbers(first).sum()) for first, pair in zip(firsts, pairs, strict=True) if not reasons[pair]
    )
    return PairTable(list(pairs), pair_rows(rows), chunks, unread)


def records_to_draw(ckpt: Checkpoint, after: Checkpoint, groups: Sequence[Sequence[str]], most: int) -> IntArray:
    """int64 [k], ascending, the records of a checkpoint that hold what is drawn of some tensors.

    Args:
        after: the step whose chunks are drawn: the checkpoint itself, or the step after it.
        groups: keys of which the first one's chunks are drawn, from all of them.
        most: chunks to draw from, as `draw_pairs` has it.
    """
    firsts = [after.tensors[group[0]] for group in groups]
    rows = [np.zeros(0, np.int64)]
    for number, chunk in _in_turn(_places(after, firsts, [not _cannot(first) for first in firsts]), most):
        box = firsts[number].tiling.box(chunk)
        for tensor in filter(None, map(ckpt.tensors.get, groups[number])):
            if tensor.is_tiled and tensor.volume == firsts[number].volume:
                rows.append(tensor.chunks.record[_touching(tensor, *_ends(tensor, firsts[number], box))])
    wanted = np.unique(np.concatenate(rows))
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
    places, rows = _places(now.ckpt, tensors, can), list[tuple[float, ...]]()
    for number, chunk in _in_turn(places, most):
        follow, tensor = follows[number], tensors[number]
        box = tensor.tiling.box(chunk)
        at = _drawn(box.volume, per_chunk)
        both = [step.read(step.ckpt.tensors[follow.key], tensor, box, at) for step in (now, was)]
        beside: list[Floats | None] = [None, None]
        if follow.second:
            beside = [step.read(step.ckpt.tensors[follow.second], tensor, box, at) for step in (now, was)]
        if both[0] is not None and both[1] is not None:
            dtypes = tensor.dtype, now.ckpt.tensors[follow.second or follow.key].dtype
            rows.append((number, chunk, *changed(follow, both[0], both[1], beside[0], beside[1], dtypes)))
    return ChangeTable(list(follows), change_rows(rows), sum(map(len, places.values())))


def _places(ckpt: Checkpoint, tensors: Sequence[Tensor], can: Sequence[bool]) -> dict[str, list[tuple[int, int]]]:
    """File -> the chunks in it that can be drawn from, as (position of the tensor, row of the chunk)."""
    by_file: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for number, tensor in enumerate(tensors):
        if not can[number]:
            continue
        drawn = _holding_numbers(tensor)
        if ckpt.payload is not None:
            drawn &= (tensor.chunks.record < 0) | (ckpt.payload.state[tensor.chunks.record] != RecordState.UNSAMPLED)
        for chunk in np.flatnonzero(drawn).tolist():
            by_file[ckpt.chunk_file(tensor, chunk)].append((number, chunk))
    return by_file


def _holding_numbers(tensor: Tensor) -> BoolArray:
    return np.asarray(tensor.tiling.live & ~may_be_padding(tensor))


def _in_turn(places: Mapping[str, Sequence[tuple[int, int]]], most: int) -> list[tuple[int, int]]:
    """At most so many places, in order, as many of each file as of the others; of a file at equal distances.

    Each file begins at another one, so that all tensors are among the places of many files.
    """
    share = max(most // max(len(places), 1), 1)
    steps = [max(len(members) // share, 1) for members in places.values()]
    spread = [members[at % step :: step] for at, (members, step) in enumerate(zip(places.values(), steps, strict=True))]
    in_turn = (place for members in zip_longest(*spread) for place in members if place is not None)
    return sorted(islice(in_turn, most))


def _cannot(tensor: Tensor) -> str:
    """Why elements cannot be drawn from a tensor; "" where they can."""
    if tensor.dtype not in ENCODINGS or tensor.dtype.startswith("complex"):
        return f"{tensor.dtype} holds no plain numbers"
    return "" if tensor.is_tiled else "its chunks do not tile it"


def _drawn(volume: int, most: int) -> IntArray:
    """int64 [k], ascending, positions among the elements of a chunk: all, or runs at equal distances."""
    if volume <= most:
        return np.arange(volume)
    starts = np.arange(most // _RUN) * (volume - _RUN) // max(most // _RUN - 1, 1)
    return np.asarray((starts[:, None] + np.arange(_RUN)).reshape(-1))


class Elements:
    """Reads elements of the tensors of a checkpoint, whose payload was read."""

    def __init__(self, folder: Folder, ckpt: Checkpoint) -> None:
        self.folder, self.ckpt = folder, ckpt
        self._damaged = {damage.record for damage in ckpt.payload.damages} if ckpt.payload is not None else set()

    def read(self, tensor: Tensor, first: Tensor, box: Box, at: IntArray) -> Floats | None:
        """float64 [k], the elements of a tensor that stand beside some of another's region; None if one is unreadable.

        Args:
            first: the tensor of the region, of the same shape, or else `tensor` is it as one row.
            at: int64 [k], ascending, their positions in the region, in C order.

        Raises:
            AccessError: a read was refused.
        """
        tiling, is_row = tensor.tiling, tensor.global_shape != first.global_shape
        low, high = _ends(tensor, first, box)
        touching = _touching(tensor, low, high)
        if self._damaged.intersection(tensor.chunks.record[touching].tolist()):
            return None
        if is_row:
            places = _in_row(at, box, first)
        else:
            if len(touching) == 1 and tiling.box(int(touching[0])) == box:
                return _of_chunk(self.folder, self.ckpt, tensor, int(touching[0]), at)
            places = np.stack(np.unravel_index(at, box.sizes), axis=1) + low
        elements, left = np.empty(len(at), np.float64), np.ones(len(at), bool)
        for chunk in touching.tolist():
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


def _ends(tensor: Tensor, first: Tensor, box: Box) -> tuple[IntArray, IntArray]:
    """Where a region of another tensor begins and ends in this one, which has its shape or is it as one row."""
    if tensor.global_shape == first.global_shape:
        return np.array(box.offsets, np.int64), np.array(box.ends, np.int64)
    begin, last = _in_row(np.array([0, box.volume - 1]), box, first)
    return begin, last + 1


def _touching(tensor: Tensor, low: IntArray, high: IntArray) -> IntArray:
    """int64 [k], the live chunks of a tensor that have elements in a region."""
    offsets, ends = tensor.tiling.offsets, tensor.tiling.offsets + tensor.tiling.sizes
    return np.flatnonzero(tensor.tiling.live & (offsets < high).all(axis=1) & (ends > low).all(axis=1))


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
    elements = np.empty(len(at), np.float64)
    elements[order] = read
    return elements
