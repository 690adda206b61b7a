"""Tensors cut into chunks, whole or damaged, for hypothesis; and their cells, counted one by one."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import strategies as st

from ckptlint.model.tiling import Box, Tiling

Chunk = tuple[tuple[int, ...], tuple[int, ...]]


def layout(shape: tuple[int, ...], chunks: list[Chunk]) -> Tiling:
    rank = len(shape)
    offsets = np.array([o for o, _ in chunks], np.int64).reshape(len(chunks), rank)
    sizes = np.array([s for _, s in chunks], np.int64).reshape(len(chunks), rank)
    return Tiling(shape, offsets, sizes)


def cells_of(shape: tuple[int, ...], chunk: Chunk) -> set[tuple[int, ...]]:
    """The indices of the tensor that a chunk holds."""
    axes = [range(max(0, o), min(n, o + s)) for o, s, n in zip(*chunk, shape, strict=True)]
    return set(product(*axes))


def counted(shape: tuple[int, ...], chunks: list[Chunk]) -> dict[tuple[int, ...], int]:
    """How many chunks hold each index of the tensor."""
    counts = dict.fromkeys(product(*map(range, shape)), 0)
    for chunk in chunks:
        for cell in cells_of(shape, chunk):
            counts[cell] += 1
    return counts


def box_cells(found: tuple[Box, ...]) -> list[tuple[int, ...]]:
    return [
        cell for box in found for cell in product(*(range(a, b) for a, b in zip(box.offsets, box.ends, strict=True)))
    ]


def cut(draw: st.DrawFn, offsets: tuple[int, ...], sizes: tuple[int, ...], splits: int) -> list[Chunk]:
    """A box cut in two, again and again, at random places: a tiling that need not be a grid."""
    parts = [(offsets, sizes)]
    for _ in range(splits):
        at = draw(st.integers(0, len(parts) - 1))
        low, size = parts[at]
        axis = draw(st.integers(0, len(sizes) - 1))
        if size[axis] < 2:
            continue
        middle = draw(st.integers(1, size[axis] - 1))
        below = (*size[:axis], middle, *size[axis + 1 :])
        above = (*size[:axis], size[axis] - middle, *size[axis + 1 :])
        parts[at : at + 1] = [(low, below), ((*low[:axis], low[axis] + middle, *low[axis + 1 :]), above)]
    return parts


@st.composite
def tilings(draw: st.DrawFn, least: int = 0) -> tuple[tuple[int, ...], list[Chunk]]:
    shape = tuple(draw(st.lists(st.integers(least, 6), max_size=4)))
    if not shape:
        return (), [((), ())]
    return shape, cut(draw, (0,) * len(shape), shape, draw(st.integers(0, 6)))


@st.composite
def damaged(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Chunk]]:
    """A tiling with chunks taken away, repeated, moved, resized, or emptied."""
    shape, chunks = draw(tilings())
    chunks = list(chunks)
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["hole", "duplicate", "move", "resize", "empty", "anywhere"]))
        if kind == "anywhere" or not chunks:
            offset = tuple(draw(st.integers(-2, n + 2)) for n in shape)
            chunks.append((offset, tuple(draw(st.integers(0, 4)) for _ in shape)))
            continue
        at = draw(st.integers(0, len(chunks) - 1))
        offset, size = chunks[at]
        if kind == "hole":
            del chunks[at]
        elif kind == "duplicate":
            chunks.insert(draw(st.integers(0, len(chunks))), chunks[at])
        elif kind == "move":
            chunks[at] = tuple(o + draw(st.integers(-2, 2)) for o in offset), size
        elif kind == "resize":
            chunks[at] = offset, tuple(max(0, s + draw(st.integers(-2, 2))) for s in size)
        else:
            chunks.append((tuple(draw(st.integers(0, n)) for n in shape), tuple(0 for _ in shape)))
    return shape, draw(st.permutations(chunks))


@st.composite
def tangled(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Chunk]]:
    """An irregular tiling of 1 to 8 axes, without some boxes, and with others that lie anywhere."""
    rank = draw(st.integers(1, 8))
    most = {1: 40, 2: 12, 3: 7, 4: 5}.get(rank, 3 if rank < 7 else 2)
    shape = tuple(draw(st.integers(1, most)) for _ in range(rank))
    chunks = cut(draw, (0,) * rank, shape, draw(st.integers(0, 20)))
    for _ in range(draw(st.integers(0, min(3, len(chunks))))):
        del chunks[draw(st.integers(0, len(chunks) - 1))]
    for _ in range(draw(st.integers(0, 4))):
        low = tuple(draw(st.integers(0, size - 1)) for size in shape)
        chunks.append((low, tuple(draw(st.integers(1, size - o)) for o, size in zip(low, shape, strict=True))))
    return shape, draw(st.permutations(chunks))
