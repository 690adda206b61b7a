"""The numbers that choose what to look at: never a false alarm on random tilings, and every class of damage is seen."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support import examples

from ckptlint.live.collect.extract import RankChunk
from ckptlint.live.compare import fingerprints as fp

CHUNK = RankChunk("w", "tensor", "plain", "float32", (4,), (0,), (4,), 0, 0, None)


@st.composite
def tilings(draw: Any, empty: bool = True) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """A shape and boxes that cover it once: a box is halved again and again at random places of random axes."""
    ndim = draw(st.integers(0, 4))
    shape = tuple(draw(st.lists(st.integers(1, 40), min_size=ndim, max_size=ndim)))
    boxes = [((0,) * ndim, shape)]
    for _ in range(draw(st.integers(0, 12)) if ndim else 0):
        at = draw(st.integers(0, len(boxes) - 1))
        axis = draw(st.integers(0, ndim - 1))
        offsets, sizes = boxes[at]
        cut = draw(st.integers(0 if empty else 1, max(0 if empty else 1, sizes[axis] - (0 if empty else 1))))
        if cut > sizes[axis] or (not empty and cut >= sizes[axis]):
            continue
        boxes[at] = offsets, (*sizes[:axis], cut, *sizes[axis + 1 :])
        rest = (*offsets[:axis], offsets[axis] + cut, *offsets[axis + 1 :])
        boxes.append((rest, (*sizes[:axis], sizes[axis] - cut, *sizes[axis + 1 :])))
    return shape, boxes


def held(shape: tuple[int, ...], boxes: list[Any], **changes: Any) -> list[RankChunk]:
    return [CHUNK._replace(shape=shape, offsets=offsets, sizes=sizes, **changes) for offsets, sizes in boxes]


def words(rows: list[RankChunk]) -> Any:
    records = fp.chunk_rows(rows, [0] * len(rows), {})
    return fp.tiling(records, fp.marks(records, True))


def is_even(shape: tuple[int, ...], boxes: list[Any]) -> bool:
    """Whether every cell of the tensor is in m boxes and none outside does, m being the boxes at the origin.

    The cells are counted one by one, but those that no edge of a box parts count as one.
    """
    origin = sum(all(s > 0 for s in sizes) and not any(offsets) for offsets, sizes in boxes)
    edges = [
        np.unique([0, size, *(edge for o, s in boxes for edge in (o[axis], o[axis] + s[axis]))])
        for axis, size in enumerate(shape)
    ]
    grid = np.zeros([len(edge) for edge in edges], int)

    def cells(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
        spans = zip(edges, offsets, sizes, strict=True)
        return tuple(slice(*np.searchsorted(edge, [o, o + s])) for edge, o, s in spans)

    for box in boxes:
        grid[cells(*box)] += 1
    grid[cells((0,) * len(shape), shape)] -= origin
    return not grid.any()


@pytest.mark.sweep
@given(tilings())
@settings(max_examples=examples(15, 2000))
def test_a_tiling_is_never_suspicious(tiling: Any) -> None:
    shape, boxes = tiling
    assert not words(held(shape, boxes)).any()
    assert not words(held(shape, boxes * 2)).any(), "each chunk twice is a matter of owners, not of coverage"
    assert not words([*held(shape, boxes), *held(shape, boxes[:1], replica=1)]).any(), "copies take no part"


@pytest.mark.sweep
@given(tilings(), st.data())
@settings(max_examples=examples(15, 2000))
def test_any_damage_is_suspicious_exactly_when_the_cells_are(tiling: Any, data: Any) -> None:
    shape, boxes = tiling
    at = data.draw(st.integers(0, len(boxes) - 1))
    offsets, sizes = boxes[at]
    kinds = ["drop", "double"] + ["shift", "grow", "shrink"] * bool(shape)
    kind = data.draw(st.sampled_from(kinds))
    if kind in ("drop", "double"):
        damaged = boxes[:at] + boxes[at + 1 :] if kind == "drop" else [*boxes, boxes[at]]
    else:
        axis = data.draw(st.integers(0, len(shape) - 1))
        step = data.draw(st.integers(1, 3))
        new = list(offsets if kind == "shift" else sizes)
        new[axis] = max(0, new[axis] + (-step if kind == "shrink" else step))
        changed = (tuple(new), sizes) if kind == "shift" else (offsets, tuple(new))
        damaged = [*boxes[:at], changed, *boxes[at + 1 :]]
    assert words(held(shape, damaged)).any() != is_even(shape, damaged)


@pytest.mark.sweep
@given(tilings(), tilings())
@settings(max_examples=examples(15, 500))
def test_a_gap_and_an_overlap_of_equal_volume_do_not_cancel(one: Any, other: Any) -> None:
    shape, boxes = one
    if len(boxes) > 1 and all(boxes[1][1]):
        moved = [*boxes[:1], *boxes[:1], *boxes[2:]]
        assert words(held(shape, moved)).any() != is_even(shape, moved)
    both = [*held(shape, boxes), *[item._replace(fqn="v") for item in held(*other)]]
    assert not words(both).any(), "names do not disturb each other"


def test_shape_dtype_kind_and_rank_are_part_of_the_sum() -> None:
    whole = CHUNK._replace(shape=(8, 1), offsets=(0, 0), sizes=(4, 1))
    rest = whole._replace(offsets=(4, 0))
    assert not words([whole, rest]).any()
    others = [
        rest._replace(shape=(8,), offsets=(4,), sizes=(4,)),
        rest._replace(shape=(9, 1)),
        rest._replace(dtype="bfloat16"),
        rest._replace(kind="object", dtype=""),
        rest._replace(fqn="w2"),
    ]
    for other in others:
        assert words([whole, other]).any(), other


def test_copies_of_a_known_number_are_compared_without_a_table() -> None:
    rows = [CHUNK._replace(writer="dtensor", replica=i, copies=3) for i in range(3)]

    def compared(rows: list[RankChunk], digests: list[int]) -> bool:
        records = fp.chunk_rows(rows, digests, {})
        return bool(fp.tiling(records, fp.marks(records, True))[2].any())

    assert not compared(rows, [5, 5, 5])
    assert compared(rows, [5, 5, 6])
    assert compared(rows, [6, 5, 5])
    assert compared(rows[:2], [5, 5]), "a lost copy"


@given(st.integers(0, 2**32), st.integers(1, 64), st.floats(0.05, 0.7))
@settings(max_examples=examples(15, 60))
def test_all_keys_come_out_of_the_table_again(seed: int, holders: int, load: float) -> None:
    rng = np.random.default_rng(seed)
    cells = 3 * 2**10
    keys = np.unique(rng.integers(0, 2**44, int(load * cells), dtype=np.uint64))
    count = rng.integers(1, holders + 1, len(keys))
    value = rng.integers(0, 2**63, len(keys), dtype=np.uint64)
    owned = rng.random(len(keys)) < 0.5
    summed = np.zeros((cells, fp.CELL_WORDS), np.uint64)
    for rank in range(holders):
        here = count > rank
        mains = (owned & (rank == 0)).astype(np.uint64)
        summed += fp.table([fp.Entries(keys[here], value[here], mains[here], owned[here], np.flatnonzero(here))], cells)
    peeled = fp.peel(summed)
    assume(not 0 < peeled.unresolved < 8)  # of few tables two or three keys share all their cells
    assert peeled.unresolved == 0
    assert (peeled.key == keys).all()
    assert (peeled.count == count.astype(np.uint64)).all()
    assert (peeled.value == value * count.astype(np.uint64)).all()
    assert (peeled.mains == owned).all()
    part = fp.Entries(keys, value, owned.astype(np.uint64), owned, np.arange(len(keys)))
    assert not fp.disagreeing(part, peeled).any()
    other = replace(part, value=value ^ np.uint64(1))
    assert fp.disagreeing(other, peeled).all()


def test_a_table_that_is_too_small_says_so() -> None:
    keys = np.random.default_rng(1).integers(0, 2**44, 4000, dtype=np.uint64)
    part = fp.Entries(keys, keys, keys, np.ones(len(keys), bool), np.arange(len(keys)))
    peeled = fp.peel(fp.table([part], 3 * 2**10))
    assert peeled.unresolved
    assert 0.8 < peeled.estimate / len(keys) < 1.2
    turns = [fp.sample(part, 2, turn).row for turn in range(4)]
    assert sorted(np.concatenate(turns).tolist()) == list(range(len(keys))), "four turns take all of them"


def test_cells_of_a_grid_of_objects_count_like_elements() -> None:
    cells = [
        CHUNK._replace(kind="object", dtype="", shape=(2, 3), offsets=at, sizes=(1, 1))
        for at in product(range(2), range(3))
    ]
    assert not words(cells).any()
    assert words(cells[:-1]).any()
