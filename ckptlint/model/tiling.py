"""Box arithmetic on the chunks of one tensor: bounds, duplicates, overlaps, holes and crossing cuts.

Everything is vectorised over the chunks. A healthy tensor is recognised by `_is_complete_grid` alone, at the price
of a few sorts; only what fails is searched for its holes and overlaps (`cover`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

from ckptlint.model.cover import BoolArray as BoolArray
from ckptlint.model.cover import Budget, cover
from ckptlint.model.cover import IntArray as IntArray
from ckptlint.model.cover import distinct as distinct
from ckptlint.model.facts import Facts

COORDINATE_LIMIT = 2**62
"""Offsets and sizes beyond this are refused by the loaders, so that a sum of two never overflows int64."""


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
        """The first index after the box on each axis."""
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
        exact: whether the search came to its end. Otherwise the volumes are at least so many, and what was not found
            may be there.
    """

    missing: tuple[Box, ...] = ()
    missing_volume: int = 0
    doubled: tuple[Box, ...] = ()
    doubled_volume: int = 0
    exact: bool = True


class Crossing(NamedTuple):
    """Two intervals of one axis that do not fit one grid: they cross, or one is strictly inside the other."""

    axis: int
    first: tuple[int, int]
    second: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Tiling:
    """Where the chunks of a tensor lie. Tensors that are cut alike share one, so each verdict is found once.

    Attributes:
        shape: the tensor's global shape, in elements; its volume fits int64.
        offsets: int64 [n, d], first index of each chunk on each axis.
        sizes: int64 [n, d], extent of each chunk on each axis; 0 is legal.
        budget: what the search for holes and overlaps may cost; the tensors of a checkpoint share one.
    """

    shape: tuple[int, ...]
    offsets: IntArray
    sizes: IntArray
    budget: Budget = field(default_factory=Budget, repr=False)
    facts: Facts = field(default_factory=Facts, init=False, repr=False)

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
            first = first if i and same[i - 1] else int(order[i])
            pairs.append((first, int(order[i + 1])))
        return pairs

    @cached_property
    def is_grid(self) -> bool:
        """Whether the live chunks are a complete grid: on every axis one path of intervals, each crossing filled."""
        if len(self.sizes) == 1 and all(self.shape) and (0,) * len(self.shape) == tuple(self.offsets[0].tolist()):
            return self.shape == tuple(self.sizes[0].tolist())
        starts, ends = self._clipped()
        return len(self.outside) == 0 and _is_complete_grid(starts, ends, self.shape)

    @cached_property
    def coverage(self) -> Coverage:
        """The holes and the overlaps inside the tensor; chunks that leave it count as clipped."""
        if prod(self.shape) == 0 or self.is_grid:
            return Coverage()
        if not self.shape:
            count = int(self.live.sum())
            whole = Box((), ())
            return Coverage((whole,) * (count == 0), int(count == 0), (whole,) * (count > 1), int(count > 1))
        covering = cover(*self._clipped(), self.shape, self.budget)
        missing, doubled = (
            tuple(Box(low, tuple(b - a for a, b in zip(low, high, strict=True))) for low, high in spans)
            for spans in (covering.missing, covering.doubled)
        )
        return Coverage(missing, covering.missing_volume, doubled, covering.doubled_volume, covering.exact)

    def touching(self, region: Box) -> list[int]:
        """Rows of the live chunks that share an element with `region`."""
        low, high = np.array(region.offsets, np.int64), np.array(region.ends, np.int64)
        rows: list[int] = self.rows_between(low, high).tolist()
        return rows

    def rows_between(self, low: IntArray, high: IntArray) -> IntArray:
        """int64 [k], ascending, the live chunks that share an element with [low, high)."""
        hit = (self.offsets < high).all(axis=1) & (self.offsets + self.sizes > low).all(axis=1)
        return np.flatnonzero(hit & self.live)

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
        """The first pair on each axis of intervals one of which is strictly inside the other."""
        return self._misfits(nested=True)

    @cached_property
    def is_row_major(self) -> bool:
        """Whether each live chunk is one contiguous run of the flattened tensor."""
        if not self.shape:
            return True
        sizes = self.sizes[self.live]
        lead, trail = np.ones((2, *sizes.shape), bool)
        lead[:, 1:] = np.logical_and.accumulate(sizes[:, :-1] == 1, axis=1)
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
        misfits = []
        for axis in range(len(self.shape)):
            open_intervals: list[tuple[int, int]] = []
            for start, stop in self.intervals(axis).tolist():
                while open_intervals and open_intervals[-1][1] <= start:
                    open_intervals.pop()
                if open_intervals and (open_intervals[-1][0] < start and open_intervals[-1][1] < stop) != nested:
                    misfits.append(Crossing(axis, open_intervals[-1], (start, stop)))
                    break
                open_intervals.append((start, stop))
        return misfits


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
