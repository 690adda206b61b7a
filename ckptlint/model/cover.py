"""What a set of boxes leaves out of a region and what it holds more than once, by work that is bounded.

Where the grid of all coordinates is small, it is painted cell by cell. Otherwise the region is halved again and again
at planes that cut few boxes (`_plane`). Few boxes are compared pair by pair: without an overlap their volumes alone
tell whether something is missing, and only a cell with a deficit is looked at further.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ckptlint.grouping import grouped

_Int = TypeVar("_Int", bound=np.integer[Any])
Shape = tuple[int, ...]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

Span = tuple[tuple[int, ...], tuple[int, ...]]
"""First index of a box and the one past its last, on each axis."""

REGION_LIMIT = 64
_CELL_LIMIT = 2**18
_PAINT_LIMIT = 2**24  # cells and boxes, as often as painting visits them
_CORNERS = 6
_FEW = 128
_CELLS_OF_FEW = 2**12
_SAMPLES = 2048
_LOPSIDED = 0.98

# work is counted in coordinates that are looked at; a million takes some 12 ms
_WORK, _WORK_OF_ALL = 150_000_000, 300_000_000
_WORK_PER_BOX, _WORK_PER_DAMAGED_BOX = 300, 150  # per axis
_WORK_OF_CELL = 16_000


@dataclass(slots=True)
class Budget:
    """The work left for all tensors of a checkpoint together, beyond a share that grows with the number of boxes."""

    left: int = _WORK_OF_ALL


@dataclass(slots=True)
class Cover:
    """The boxes of a region that are in no box, and in two or more; at most `REGION_LIMIT` of each.

    The volumes are of all of them, or at least so many elements where not all of the region was looked at (`exact`).
    """

    missing: list[Span] = field(default_factory=list)
    doubled: list[Span] = field(default_factory=list)
    missing_volume: int = 0
    doubled_volume: int = 0
    exact: bool = True


@dataclass(slots=True)
class _Cell:
    """A part of the region and the boxes inside, clipped; int64 [d, n], one row per axis."""

    starts: IntArray
    ends: IntArray
    low: IntArray
    high: IntArray
    is_covered: bool = False  # by a box that is not listed
    apart: bool = False  # no two boxes are known to overlap
    counted: bool = False  # what is held twice

    @property
    def whole(self) -> Span:
        return tuple(self.low.tolist()), tuple(self.high.tolist())

    @property
    def volume(self) -> int:
        return int(np.prod(self.high - self.low))

    @property
    def filled(self) -> int:
        """Volumes of all boxes together; their sum need not fit int64."""
        volumes = (self.ends - self.starts).prod(axis=0)
        return (int((volumes >> 32).sum()) << 32) + int((volumes & 0xFFFFFFFF).sum())


def distinct(values: npt.NDArray[_Int]) -> npt.NDArray[_Int]:
    """[k], the distinct values, ascending; `np.unique` would import all of numpy.ma for it."""
    ordered: npt.NDArray[_Int] = np.sort(values)
    is_new: BoolArray = np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]
    return ordered[is_new]


def cover(starts: IntArray, ends: IntArray, shape: tuple[int, ...], budget: Budget) -> Cover:
    """What boxes leave out of [0, shape) and hold twice; takes what that costs off the budget.

    Args:
        starts, ends: int64 [n, d], boxes with elements, inside the shape.
        shape: one axis or more, whose volume fits int64.
    """
    low, high = np.zeros(len(shape), np.int64), np.array(shape, np.int64)
    whole = _Cell(np.ascontiguousarray(starts.T), np.ascontiguousarray(ends.T), low, high)
    covering = Cover()
    cuts = _cuts(whole)
    work = _paint_work(whole, cuts)
    is_small = prod(len(cut) - 1 for cut in cuts) <= _CELL_LIMIT and work <= _PAINT_LIMIT
    if is_small and work // 4 <= budget.left + _WORK_PER_DAMAGED_BOX * starts.size:
        budget.left -= min(budget.left, work // 4)
        _paint(whole, cuts, covering)
    else:
        budget.left -= min(budget.left, _search(whole, covering, min(_WORK, budget.left)))
    covering.missing, covering.doubled = _merged(covering.missing), _merged(covering.doubled)
    return covering


def _paint_work(cell: _Cell, cuts: list[IntArray]) -> int:
    """Cells and boxes, as often as painting visits them."""
    active, count = sum(len(cut) > 2 for cut in cuts), int(cell.starts.shape[1])
    return (prod(len(cut) - 1 for cut in cuts) + count) * (1 << active if active <= _CORNERS else count)


def _search(whole: _Cell, cover: Cover, extra: int) -> int:
    """Halves the region until each part can be judged, the rest by volumes alone; returns the work done.

    Damage is certain from its first region on. To name all of it is worth less than to clear what is healthy.
    """
    cells, work = [whole], 0
    while cells:
        cell = cells.pop()
        work += cell.starts.size * 4 + _WORK_OF_CELL
        is_damaged = cover.missing_volume or cover.doubled_volume
        share = _WORK_PER_DAMAGED_BOX if is_damaged else _WORK_PER_BOX
        if work > extra + share * whole.starts.size:
            cover.exact = False
            for left in (cell, *cells):
                cover.missing_volume += 0 if left.is_covered else max(0, left.volume - left.filled)
            return work
        if not _is_settled(cell, cover):
            cuts = _cuts(cell) if cell.starts.shape[1] <= _FEW else []
            if cuts and prod(len(cut) - 1 for cut in cuts) <= _CELLS_OF_FEW:
                work += _paint_work(cell, cuts) // 4
                _paint(cell, cuts, cover)
            else:
                cells += _halves(cell)
    return work


def _is_settled(cell: _Cell, cover: Cover) -> bool:
    """Whether a cell is judged without being cut; what it lacks or holds twice is then counted."""
    fills = ((cell.starts == cell.low[:, None]) & (cell.ends == cell.high[:, None])).all(axis=0)
    if fills.any():
        if cell.is_covered or fills.sum() > 1:
            if not cell.counted:
                _add(cover.doubled, [cell.whole])
                cover.doubled_volume += cell.volume
            return True
        cell.is_covered = True
        cell.starts, cell.ends = cell.starts[:, ~fills], cell.ends[:, ~fills]
    count = cell.starts.shape[1]
    if count == 0:
        if not cell.is_covered:
            _add(cover.missing, [cell.whole])
            cover.missing_volume += cell.volume
        return True
    if cell.is_covered and cell.counted:
        return True
    if count > _FEW:
        return False
    twice = 0
    if not cell.apart:
        firsts, seconds = _overlapping(cell.starts, cell.ends)
        cell.apart = len(firsts) == 0
        if len(firsts) and not cell.is_covered and len(firsts) <= _FEW:
            low = np.maximum(cell.starts[:, firsts], cell.starts[:, seconds])
            high = np.minimum(cell.ends[:, firsts], cell.ends[:, seconds])
            if not len(_overlapping(low, high)[0]):
                twice = int((high - low).prod(axis=0).sum())
                _count_doubled(cell, low, high, twice, cover)
    if cell.is_covered:
        if cell.apart:
            _count_doubled(cell, cell.starts, cell.ends, cell.filled, cover)
        return cell.apart
    if not cell.apart and not twice:
        return False
    lost = cell.volume - cell.filled + twice
    if lost and len(cover.missing) >= REGION_LIMIT:
        cover.missing_volume += lost
        return True
    return not lost


def _count_doubled(cell: _Cell, low: IntArray, high: IntArray, volume: int, cover: Cover) -> None:
    if not cell.counted:
        _add(cover.doubled, list(zip(map(tuple, low.T.tolist()), map(tuple, high.T.tolist()), strict=True)))
        cover.doubled_volume += volume
        cell.counted = True


def _add(regions: list[Span], more: list[Span]) -> None:
    regions.extend(more[: REGION_LIMIT - len(regions)])


def _overlapping(starts: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
    """The pairs i < j of boxes that share an element."""
    meets: BoolArray = np.ones((starts.shape[1],) * 2, bool)
    for start, end in zip(starts, ends, strict=True):
        before = start[:, None] < end[None, :]
        meets &= before
        meets &= before.T
    firsts, seconds = np.nonzero(np.triu(meets, 1))
    return firsts, seconds


def _halves(cell: _Cell) -> list[_Cell]:
    """The two sides of a plane, boxes that it cuts in both; the lower one comes last."""
    axis, place = _plane(cell)
    halves = []
    for above in (True, False):
        keep = cell.ends[axis] > place if above else cell.starts[axis] < place
        starts, ends = cell.starts[:, keep], cell.ends[:, keep]
        low, high = cell.low.copy(), cell.high.copy()
        if above:
            low[axis] = place
            np.maximum(starts[axis], place, out=starts[axis])
        else:
            high[axis] = place
            np.minimum(ends[axis], place, out=ends[axis])
        halves.append(_Cell(starts, ends, low, high, cell.is_covered, cell.apart, cell.counted))
    return halves


def _plane(cell: _Cell) -> tuple[int, int]:
    """Axis and place of the cut that leaves the least work: few boxes on each side, hence few cut boxes."""
    count = cell.starts.shape[1]
    step = max(1, count // _SAMPLES)
    best, plane = np.inf, (0, 0)
    for axis in range(len(cell.low)):
        starts, ends = np.sort(cell.starts[axis]), np.sort(cell.ends[axis])
        places = np.concatenate([ends[::step], starts[::step]])
        if step > 1:  # what is left of an axis may hide between two samples
            places = np.concatenate([places, ends[:1], starts[-1:]])
        places = places[(places > cell.low[axis]) & (places < cell.high[axis])]
        if not len(places):
            continue
        below = np.searchsorted(starts, places, "left")
        above = count - np.searchsorted(ends, places, "right")
        costs = (below / count) ** 2 + (above / count) ** 2 + 4.0 * (np.maximum(below, above) > _LOPSIDED * count)
        least = int(costs.argmin())
        if costs[least] < best:
            best, plane = float(costs[least]), (axis, int(places[least]))
    return plane


# ---------------------------------------------------------------- painting


def _cuts(cell: _Cell) -> list[IntArray]:
    """The coordinates at which a box begins or ends, per axis, both ends of the cell with them."""
    ends = zip(cell.starts, cell.ends, cell.low, cell.high, strict=True)
    return [distinct(np.concatenate([start, end, [low, high]])) for start, end, low, high in ends]


def _paint(cell: _Cell, cuts: list[IntArray], cover: Cover) -> None:
    """Counts the boxes on each cell of the grid of all cuts."""
    counts = _counts(cell, cuts) + cell.is_covered
    missing, doubled = counts == 0, counts > 1
    if missing.any():
        cover.missing_volume += _volume(missing, cuts)
        cover.missing += _maximal_boxes(missing, cuts, REGION_LIMIT - len(cover.missing))
    if doubled.any() and not cell.counted:
        cover.doubled_volume += _volume(doubled, cuts)
        cover.doubled += _maximal_boxes(doubled, cuts, REGION_LIMIT - len(cover.doubled))


def _counts(cell: _Cell, cuts: list[IntArray]) -> IntArray:
    first = [np.searchsorted(cut, start) for cut, start in zip(cuts, cell.starts, strict=True)]
    last = [np.searchsorted(cut, end) for cut, end in zip(cuts, cell.ends, strict=True)]
    active = [a for a, cut in enumerate(cuts) if len(cut) > 2]
    rows = cell.starts.shape[1]
    counts = np.zeros([len(cuts[a]) for a in active], np.int64)
    if not active:
        counts = counts + rows
    elif len(active) <= _CORNERS:
        # a summed difference array: each box adds +-1 at its corners only, whatever number of cells it spans
        for corner in range(2 ** len(active)):
            chosen = [(last if corner >> i & 1 else first)[a] for i, a in enumerate(active)]
            at = np.bincount(np.ravel_multi_index(chosen, counts.shape), minlength=counts.size).reshape(counts.shape)
            counts += -at if corner.bit_count() % 2 else at
        for i in range(len(active)):
            np.cumsum(counts, axis=i, out=counts)
        counts = counts[(slice(-1),) * len(active)]
    else:
        counts = counts[(slice(-1),) * len(active)]
        for row in range(rows):
            counts[tuple(slice(first[a][row], last[a][row]) for a in active)] += 1
    return counts.reshape([len(cut) - 1 for cut in cuts])


def _volume(mask: BoolArray, cuts: list[IntArray]) -> int:
    volume: IntArray = mask.astype(np.int64)
    for cut in reversed(cuts):
        volume = volume @ np.diff(cut)
    return int(volume)


def _maximal_boxes(mask: BoolArray, cuts: list[IntArray], limit: int) -> list[Span]:
    """Greedy maximal boxes of the true cells; each starts at the first cell left, grown from the last axis on."""
    boxes: list[Span] = []
    mask = mask.copy()
    while len(boxes) < limit and mask.any():
        low = [int(i) for i in np.unravel_index(int(mask.argmax()), mask.shape)]
        high = [i + 1 for i in low]
        for axis in reversed(range(mask.ndim)):
            block = list(map(slice, low, high))
            while high[axis] < mask.shape[axis]:
                block[axis] = slice(high[axis], high[axis] + 1)
                if not mask[tuple(block)].all():
                    break
                high[axis] += 1
        mask[tuple(map(slice, low, high))] = False
        starts, ends = (tuple(int(cut[i]) for cut, i in zip(cuts, at, strict=True)) for at in (low, high))
        boxes.append((starts, ends))
    return boxes


def _merged(boxes: list[Span]) -> list[Span]:
    """The boxes with neighbours joined that a plane had cut apart, by their first index."""
    count = 0
    while count != len(boxes) > 1:
        count = len(boxes)
        for axis in range(len(boxes[0][0])):
            boxes = _merged_along(boxes, axis)
    return sorted(boxes)


def _merged_along(boxes: list[Span], axis: int) -> list[Span]:
    merged: list[Span] = []
    rest = [(low[:axis] + low[axis + 1 :], high[:axis] + high[axis + 1 :]) for low, high in boxes]
    for group in grouped(zip(rest, boxes, strict=True)).values():
        group.sort(key=lambda box: box[0][axis])
        merged.append(group[0])
        for low, high in group[1:]:
            if merged[-1][1][axis] == low[axis]:
                merged[-1] = merged[-1][0], high
            else:
                merged.append((low, high))
    return merged
