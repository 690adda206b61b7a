"""Boxes that are hard to judge: irregular tilings, with holes and overlaps, and boxes anywhere."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

Boxes = tuple[tuple[int, ...], npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""A shape, and int64 [n, d] offsets and sizes."""


def irregular(count: int, rank: int, seed: int = 0, extent: int = 0) -> Boxes:
    """A whole tensor cut in two at a random place, again and again: a tiling that is no grid."""
    rng = random.Random(seed)
    shape = (extent or _extent(rank),) * rank
    parts = [((0,) * rank, shape)]
    while len(parts) < count:
        at, axis = rng.randrange(len(parts)), rng.randrange(rank)
        low, size = parts[at]
        if size[axis] < 2:
            continue
        middle = rng.randrange(1, size[axis])
        parts[at] = low, (*size[:axis], middle, *size[axis + 1 :])
        above = (*low[:axis], low[axis] + middle, *low[axis + 1 :])
        parts.append((above, (*size[:axis], size[axis] - middle, *size[axis + 1 :])))
    rng.shuffle(parts)
    return shape, np.array([low for low, _ in parts], np.int64), np.array([size for _, size in parts], np.int64)


def anywhere(count: int, rank: int, seed: int = 0, largest: float = 0.5) -> Boxes:
    """Boxes at random places, of random sizes up to a share of each axis."""
    rng = np.random.default_rng(seed)
    extent = _extent(rank)
    sizes = rng.integers(1, max(2, int(extent * largest)), (count, rank))
    offsets = (rng.random((count, rank)) * (extent - sizes)).astype(np.int64)
    return (extent,) * rank, offsets, sizes


def spiral(count: int) -> Boxes:
    """Two axes, one strip cut off each side in turn: no plane leaves strips whole on both sides."""
    extent = 4 * count
    low, high = [0, 0], [extent, extent]
    offsets, sizes = [], []
    for number in range(count - 1):
        axis, at_end = number % 2, number % 4 > 1
        start, stop = list(low), list(high)
        if at_end:
            start[axis] = high[axis] = high[axis] - 1
        else:
            stop[axis] = low[axis] = low[axis] + 1
        offsets.append(start)
        sizes.append([b - a for a, b in zip(start, stop, strict=True)])
    offsets.append(low)
    sizes.append([b - a for a, b in zip(low, high, strict=True)])
    return (extent, extent), np.array(offsets, np.int64), np.array(sizes, np.int64)


def with_holes(boxes: Boxes, count: int = 20) -> Boxes:
    """The boxes without some of them."""
    shape, offsets, sizes = boxes
    keep = np.ones(len(offsets), bool)
    keep[np.random.default_rng(1).choice(len(keep), count, replace=False)] = False
    return shape, offsets[keep], sizes[keep]


def with_overlaps(boxes: Boxes, count: int = 20) -> Boxes:
    """The boxes, some of them grown into a neighbour by one on each axis where there is room."""
    shape, offsets, sizes = boxes
    sizes = sizes.copy()
    grown = np.random.default_rng(2).choice(len(sizes), count, replace=False)
    sizes[grown] = np.minimum(sizes[grown] + 1, np.array(shape) - offsets[grown])
    return shape, offsets, sizes


def _extent(rank: int) -> int:
    return 2 ** min(40, 60 // rank)
