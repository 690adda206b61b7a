"""Intersects target boxes with stored chunks, as torch's planner does, to find what each rank reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ckptlint.errors import BudgetError
from ckptlint.model.tiling import BoolArray, IntArray, Tiling
from ckptlint.planning.job import Target

_BLOCK = 1 << 21  # pairs of a box and a chunk that are looked at at once
_PAIRS, _ITEMS = 1 << 31, 1 << 25


@dataclass(slots=True)
class ReadBudget:
    """The work left for all tensors of a plan together: pairs to compare, and items, which take memory."""

    pairs: int = _PAIRS
    items: int = _ITEMS

    def spend(self, pairs: int, items: int) -> None:
        """Take off what is done, or raise BudgetError where it is used up."""
        self.pairs -= pairs
        self.items -= items
        if self.pairs < 0 or self.items < 0:
            raise BudgetError("the stored chunks and the parts of the ranks are too many to compare: plan fewer ranks")


@dataclass(frozen=True, slots=True, eq=False)
class Reads:
    """The parts of chunks that boxes take; row i is one read item.

    Attributes:
        box: int64 [n], row of the target's boxes, ascending.
        chunk: int64 [n], row of the tiling's chunks.
        in_chunk: int64 [n, d], where the common part starts, from the chunk's own start (torch: `storage_offsets`).
        in_box: int64 [n, d], the same from the box's start (`dest_offsets`).
        lengths: int64 [n, d], extent of the common part; 0 where an empty box is inside a chunk.
    """

    box: IntArray
    chunk: IntArray
    in_chunk: IntArray
    in_box: IntArray
    lengths: IntArray

    def __len__(self) -> int:
        return len(self.box)

    @property
    def volume(self) -> IntArray:
        """int64 [n], elements of each item; 1 for a tensor without axes."""
        return np.asarray(self.lengths.prod(axis=1, dtype=np.int64))


def reads(tiling: Tiling, target: Target, budget: ReadBudget | None = None) -> Reads:
    """Every pair of a box and a chunk that overlap, by box, then chunk, or BudgetError.

    A box and a chunk overlap where on no axis one begins at or after the end of the other: an empty box strictly
    inside a chunk makes an item of no elements, as in torch.

    Source: torch 2.13 `torch.distributed.checkpoint.resharding._check_shard_metadata_pair_overlap`,
    `planner_helpers.create_read_items_for_chunk_list`
    """
    budget, none = budget or ReadBudget(), np.zeros(0, np.int64)
    items = [(none, none)]
    for boxes, chunks in _candidates(tiling, target):
        budget.spend(len(boxes), 0)
        items.append(_overlapping(tiling, target, boxes, chunks))
        budget.spend(0, len(items[-1][0]))
    boxes, chunks = (np.concatenate([pair[side] for pair in items]) for side in (0, 1))
    order = np.lexsort((chunks, boxes))
    boxes, chunks = boxes[order], chunks[order]
    chunk_start, box_start = tiling.offsets[chunks], target.offsets[boxes]
    start = np.maximum(chunk_start, box_start)
    end = np.minimum(chunk_start + tiling.sizes[chunks], box_start + target.sizes[boxes])
    return Reads(boxes, chunks, start - chunk_start, start - box_start, end - start)


def _candidates(tiling: Tiling, target: Target) -> Iterator[tuple[IntArray, IntArray]]:
    """Pairs that may overlap, in blocks: those that meet on the axis where the fewest do."""
    boxes, chunks = np.arange(len(target.offsets)), np.arange(len(tiling.offsets))
    if not len(boxes) or not len(chunks):
        return
    if not tiling.shape:
        yield np.repeat(boxes, len(chunks)), np.tile(chunks, len(boxes))
        return
    order, low, count = min(
        (_along(tiling, target, axis) for axis in range(len(tiling.shape))), key=lambda x: x[2].sum()
    )
    ends = np.cumsum(count)
    first = 0
    while first < len(boxes):
        done = ends[first - 1] if first else 0
        last = max(int(np.searchsorted(ends, done + _BLOCK, "right")), first + 1)
        counts = count[first:last]
        yield np.repeat(boxes[first:last], counts), order[counted(low[first:last], counts)]
        first = last


def counted(low: IntArray, count: IntArray) -> IntArray:
    """The `count[i]` numbers from `low[i]` on, for one i after the other.

    >>> counted(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    numbers: IntArray = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count - low, count)
    return numbers


def _along(tiling: Tiling, target: Target, axis: int) -> tuple[IntArray, IntArray, IntArray]:
    """The chunks by their start on an axis; for each box the first that may meet it, and how many from there on."""
    starts = tiling.offsets[:, axis]
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    reached = np.maximum.accumulate(starts + tiling.sizes[order, axis])
    box_start = target.offsets[:, axis]
    low = np.searchsorted(reached, box_start, "right")
    high = np.searchsorted(starts, box_start + target.sizes[:, axis], "left")
    return order, low, np.maximum(high - low, 0)


def _overlapping(tiling: Tiling, target: Target, boxes: IntArray, chunks: IntArray) -> tuple[IntArray, IntArray]:
    overlap: BoolArray = np.ones(len(boxes), bool)
    for axis in range(len(tiling.shape)):
        chunk_start, box_start = tiling.offsets[chunks, axis], target.offsets[boxes, axis]
        overlap &= box_start < chunk_start + tiling.sizes[chunks, axis]
        overlap &= chunk_start < box_start + target.sizes[boxes, axis]
    return boxes[overlap], chunks[overlap]
