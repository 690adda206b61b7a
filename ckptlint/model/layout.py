"""Box arithmetic on the chunks of one tensor: bounds, duplicates, overlaps, holes and crossing cuts.

Everything is vectorised over the chunks. A healthy tensor is recognised by `_is_complete_grid` alone, at the price
of a few sorts; only what fails is painted cell by cell to name the holes and overlaps.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

_Int = TypeVar("_Int", bound=np.integer[Any])
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

COORDINATE_LIMIT = 2**62
"""Offsets and sizes beyond this are refused by the loaders, so that a sum of two never overflows int64."""

_CELL_LIMIT = 2**22
_BOX_LIMIT = 64


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open region of a tensor, in elements.

    >>> str(Box((8, 0), (4, 8)))
    '[8:12, 0:8]'
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """The first index behind the box on each axis."""
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    @property
    def volume(self) -> int:
        """How many elements the box holds; 1 for a box without axes."""
        return prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """The common part of two boxes of equal rank, or None when they share no element."""
        low = tuple(map(max, self.offsets, other.offsets))
        high = tuple(map(min, self.ends, other.ends))
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(b - a for a, b in zip(low, high, strict=True)))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.offsets, self.ends, strict=True)) + "]"


@dataclass(frozen=True, slots=True)
class Coverage:
    """What the chunks of a tensor leave out and what they hold more than once, inside the tensor's bounds.

    Attributes:
        missing: maximal boxes in no chunk, at most 64 of them.
        missing_volume: elements in no chunk, exact.
        doubled: maximal boxes in two or more chunks, at most 64 of them.
        doubled_volume: elements in two or more chunks, exact; each counts once.
    """

    missing: tuple[Box, ...] = ()
    missing_volume: int = 0
    doubled: tuple[Box, ...] = ()
    doubled_volume: int = 0


@dataclass(frozen=True, slots=True)
class Crossing:
    """Two intervals of one axis that do not fit one grid: they cross, or one lies strictly inside the other."""

    axis: int
    first: tuple[int, int]
    second: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the chunks of a tensor lie. Tensors that are cut alike share one, so each verdict is found once.

    Attributes:
        shape: the tensor's global shape, in elements; its volume fits int64.
        offsets: int64 [n, d], first index of each chunk on each axis.
        sizes: int64 [n, d], extent of each chunk on each axis; 0 is legal.
        facts: what was worked out about it (`fact`).
    """

    shape: tuple[int, ...]
    offsets: IntArray
    sizes: IntArray
    facts: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def box(self, row: int) -> Box:
        """Chunk `row` as a box, not clipped."""
        return Box(tuple(self.offsets[row].tolist()), tuple(self.sizes[row].tolist()))

    @cached_property
    def live(self) -> BoolArray:
        """bool [n], the chunks that hold at least one element."""
        return np.asarray((self.sizes > 0).all(axis=1))

    @cached_property
    def outside(self) -> IntArray:
        """Rows of the chunks that leave the tensor on some axis, empty ones included."""
        shape = np.array(self.shape, np.int64)
        bad = (self.offsets < 0) | (self.sizes < 0) | (self.offsets + self.sizes > shape)
        return np.flatnonzero(bad.any(axis=1))

    @cached_property
    def duplicates(self) -> list[tuple[int, int]]:
        """Pairs of live rows with equal offsets, each further row paired with the first one."""
        rows = np.flatnonzero(self.live)
        if len(rows) < 2:
            return []
        if not self.shape:
            return [(int(rows[0]), int(row)) for row in rows[1:]]
        order = rows[np.lexsort(self.offsets[rows].T[::-1])]
        same = (self.offsets[order[1:]] == self.offsets[order[:-1]]).all(axis=1)
        pairs, first = [], 0
        for i in np.flatnonzero(same).tolist():
            if i == 0 or not same[i - 1]:
                first = int(order[i])
            pairs.append((first, int(order[i + 1])))
        return pairs

    @cached_property
    def is_grid(self) -> bool:
        """Whether the live chunks are a complete grid: on every axis one path of intervals, each crossing filled."""
        starts, ends = self._clipped()
        return len(self.outside) == 0 and _is_complete_grid(starts, ends, self.shape)

    @cached_property
    def coverage(self) -> Coverage:
        """The holes and the overlaps inside the tensor; chunks that leave it count as clipped."""
        if prod(self.shape) == 0 or self.is_grid:
            return Coverage()
        starts, ends = self._clipped()
        if not self.shape:
            count = int(self.live.sum())
            whole = Box((), ())
            return Coverage((whole,) * (count == 0), int(count == 0), (whole,) * (count > 1), int(count > 1))
        missing: list[Box] = []
        doubled: list[Box] = []
        volumes = [0, 0]
        shape = np.array(self.shape, np.int64)
        for counts, cuts in _paint(starts, ends, np.zeros_like(shape), shape):
            for i, (mask, found) in enumerate(((counts == 0, missing), (counts > 1, doubled))):
                if mask.any():
                    volumes[i] += _volume(mask, cuts)
                    found.extend(_maximal_boxes(mask, cuts, _BOX_LIMIT - len(found)))
        return Coverage(tuple(_merged(missing)), volumes[0], tuple(_merged(doubled)), volumes[1])

    def touching(self, region: Box) -> list[int]:
        """Rows of the live chunks that share an element with `region`."""
        low, high = np.array(region.offsets, np.int64), np.array(region.ends, np.int64)
        hit = (self.offsets < high).all(axis=1) & (self.offsets + self.sizes > low).all(axis=1)
        return [int(row) for row in np.flatnonzero(hit & self.live)]

    def intervals(self, axis: int) -> IntArray:
        """int64 [k, 2], the distinct [start, stop) that live chunks occupy on an axis, by start, longest first."""
        starts, sizes = self.offsets[self.live, axis], self.sizes[self.live, axis]
        order = np.lexsort((-sizes, starts))
        pairs: IntArray = np.stack([starts, starts + sizes], axis=1)[order]
        is_new: BoolArray = np.append(True, (pairs[1:] != pairs[:-1]).any(axis=1))[: len(pairs)]
        return pairs[is_new]

    @cached_property
    def crossings(self) -> list[Crossing]:
        """The first pair on each axis of intervals that cross: s1 < s2 < e1 < e2."""
        return self._misfits(nested=False)

    @cached_property
    def nestings(self) -> list[Crossing]:
        """The first pair on each axis of intervals one of which lies strictly inside the other."""
        return self._misfits(nested=True)

    @cached_property
    def is_row_major(self) -> bool:
        """Whether each live chunk is one contiguous run of the flattened tensor."""
        if not self.shape:
            return True
        sizes = self.sizes[self.live]
        n, d = sizes.shape
        lead = np.ones((n, d), bool)
        lead[:, 1:] = np.logical_and.accumulate(sizes[:, :-1] == 1, axis=1)
        trail = np.ones((n, d), bool)
        full = sizes[:, 1:] == np.array(self.shape[1:], np.int64)
        trail[:, :-1] = np.logical_and.accumulate(full[:, ::-1], axis=1)[:, ::-1]
        return bool((lead & trail).any(axis=1).all())

    def _clipped(self) -> tuple[IntArray, IntArray]:
        """Starts and ends of the live chunks, cut at the tensor's bounds; chunks wholly outside are left out."""
        shape = np.array(self.shape, np.int64)
        starts = np.clip(self.offsets[self.live], 0, shape)
        ends = np.clip(self.offsets[self.live] + self.sizes[self.live], 0, shape)
        inside = (starts < ends).all(axis=1)
        return starts[inside], ends[inside]

    def _misfits(self, nested: bool) -> list[Crossing]:
        found = []
        for axis in range(len(self.shape)):
            open_intervals: list[tuple[int, int]] = []
            for start, stop in self.intervals(axis).tolist():
                while open_intervals and open_intervals[-1][1] <= start:
                    open_intervals.pop()
                if open_intervals:
                    outer = open_intervals[-1]
                    is_crossing = outer[0] < start and outer[1] < stop
                    if is_crossing != nested:
                        found.append(Crossing(axis, outer, (start, stop)))
                        break
                open_intervals.append((start, stop))
        return found


def distinct(values: npt.NDArray[_Int]) -> npt.NDArray[_Int]:
    """[k], the distinct values, ascending; `np.unique` would import all of numpy.ma for it."""
    ordered: npt.NDArray[_Int] = np.sort(values)
    is_new: BoolArray = np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]
    return ordered[is_new]


def _is_complete_grid(starts: IntArray, ends: IntArray, shape: tuple[int, ...]) -> bool:
    if len(starts) == 0:
        return False
    cells, cell = 1, np.zeros(len(starts), np.int64)
    for axis, size in enumerate(shape):
        lows, place = np.unique(starts[:, axis], return_inverse=True)
        highs = np.append(lows[1:], size)
        if lows[0] != 0 or (highs[place] != ends[:, axis]).any():
            return False
        cells *= len(lows)
        if cells > len(starts):
            return False
        cell = cell * len(lows) + place.reshape(-1)
    return cells == len(starts) == len(distinct(cell))


def _paint(
    starts: IntArray, ends: IntArray, low: IntArray, high: IntArray
) -> Iterator[tuple[IntArray, list[IntArray]]]:
    """Yield (chunks per cell, cut points per axis) for parts that together fill [low, high).

    Coordinates are compressed to the cut points. Where that still makes too many cells (cuts that differ everywhere),
    the region is halved at a cut, so memory stays bounded.
    """
    inside = ((starts < high) & (ends > low)).all(axis=1)
    starts, ends = np.maximum(starts[inside], low), np.minimum(ends[inside], high)
    cuts = [distinct(np.concatenate([starts[:, a], ends[:, a], [low[a], high[a]]])) for a in range(len(low))]
    if prod(len(cut) - 1 for cut in cuts) > _CELL_LIMIT:
        axis = max(range(len(cuts)), key=lambda a: len(cuts[a]))
        middle = cuts[axis][len(cuts[axis]) // 2]
        below, above = high.copy(), low.copy()
        below[axis] = above[axis] = middle
        yield from _paint(starts, ends, low, below)
        yield from _paint(starts, ends, above, high)
        return
    first = [np.searchsorted(cut, starts[:, a]) for a, cut in enumerate(cuts)]
    last = [np.searchsorted(cut, ends[:, a]) for a, cut in enumerate(cuts)]
    active = [a for a, cut in enumerate(cuts) if len(cut) > 2]
    counts = np.zeros([len(cuts[a]) for a in active], np.int64)
    if not active:
        counts = counts + len(starts)
    elif 2 ** len(active) <= 64:
        # a summed difference array: each chunk adds +-1 at its corners only, whatever number of cells it spans
        for corner in range(2 ** len(active)):
            chosen = [(last if corner >> i & 1 else first)[a] for i, a in enumerate(active)]
            at = np.ravel_multi_index(chosen, counts.shape)
            sign = -1 if corner.bit_count() % 2 else 1
            counts += sign * np.bincount(at, minlength=counts.size).reshape(counts.shape)
        for i in range(len(active)):
            np.cumsum(counts, axis=i, out=counts)
        counts = counts[(slice(-1),) * len(active)]
    else:
        counts = counts[(slice(-1),) * len(active)]
        for row in range(len(starts)):
            counts[tuple(slice(first[a][row], last[a][row]) for a in active)] += 1
    yield counts.reshape([len(cut) - 1 for cut in cuts]), cuts


def _volume(mask: BoolArray, cuts: list[IntArray]) -> int:
    volume: IntArray = mask.astype(np.int64)
    for cut in reversed(cuts):
        volume = volume @ np.diff(cut)
    return int(volume)


def _maximal_boxes(mask: BoolArray, cuts: list[IntArray], limit: int) -> list[Box]:
    """Greedy maximal boxes of the true cells; each starts at the first cell left, grown from the last axis on."""
    boxes: list[Box] = []
    mask = mask.copy()
    while len(boxes) < limit and mask.any():
        low = [int(i) for i in np.unravel_index(int(mask.argmax()), mask.shape)]
        high = [i + 1 for i in low]
        for axis in reversed(range(mask.ndim)):
            block = [slice(a, b) for a, b in zip(low, high, strict=True)]
            while high[axis] < mask.shape[axis]:
                block[axis] = slice(high[axis], high[axis] + 1)
                if not mask[tuple(block)].all():
                    break
                high[axis] += 1
        mask[tuple(slice(a, b) for a, b in zip(low, high, strict=True))] = False
        starts = tuple(int(cut[i]) for cut, i in zip(cuts, low, strict=True))
        ends = tuple(int(cut[i]) for cut, i in zip(cuts, high, strict=True))
        boxes.append(Box(starts, tuple(b - a for a, b in zip(starts, ends, strict=True))))
    return boxes


def _merged(boxes: list[Box]) -> list[Box]:
    """The boxes with neighbours joined that a halving of `_paint` had cut apart."""
    if len(boxes) < 2:
        return boxes
    for axis in range(len(boxes[0].offsets)):
        by_rest: dict[tuple[object, ...], list[Box]] = {}
        for box in boxes:
            rest = box.offsets[:axis] + box.offsets[axis + 1 :], box.sizes[:axis] + box.sizes[axis + 1 :]
            by_rest.setdefault(rest, []).append(box)
        boxes = []
        for group in by_rest.values():
            group.sort(key=lambda box: box.offsets[axis])
            boxes.append(group[0])
            for box in group[1:]:
                if boxes[-1].ends[axis] == box.offsets[axis]:
                    sizes = list(boxes[-1].sizes)
                    sizes[axis] += box.sizes[axis]
                    boxes[-1] = Box(boxes[-1].offsets, tuple(sizes))
                else:
                    boxes.append(box)
    return sorted(boxes, key=lambda box: box.offsets)
