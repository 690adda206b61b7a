"""Box arithmetic against brute-force cell counting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations, product
from math import prod

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support import bench, ends, examples, swept
from tilings import Chunk, box_cells, cells_of, counted, damaged, layout, tangled, tilings

from ckptlint.model import cover as boxes
from ckptlint.model.tiling import COORDINATE_LIMIT, Box, Coverage, Crossing, Tiling


def assert_exact(found: tuple[Box, ...], volume: int, cells: set[tuple[int, ...]]) -> None:
    """The boxes are disjoint and hold the cells, neither more nor fewer."""
    listed = box_cells(found)
    assert volume == len(cells)
    assert len(listed) == len(set(listed)), "boxes share a cell"
    if len(found) < boxes.REGION_LIMIT:
        assert set(listed) == cells
    else:
        assert set(listed) <= cells
    assert all(box.volume > 0 for box in found)


@contextmanager
def searched(few: int, cells: int) -> Iterator[None]:
    """Nothing is painted as a whole, boxes are compared and cells painted only in so small parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes, "_CELL_LIMIT", 0)
        patch.setattr(boxes, "_FEW", few)
        patch.setattr(boxes, "_CELLS_OF_FEW", cells)
        yield


# ---------------------------------------------------------------- coverage


@given(tilings())
def test_a_tiling_has_no_hole_and_no_overlap(case: tuple[tuple[int, ...], list[Chunk]]) -> None:
    shape, chunks = case
    coverage = layout(shape, chunks).coverage
    assert (coverage.missing, coverage.missing_volume, coverage.doubled, coverage.doubled_volume) == ((), 0, (), 0)


@settings(max_examples=examples(15, 400))
@given(damaged())
def test_holes_and_overlaps_equal_counted_cells(case: tuple[tuple[int, ...], list[Chunk]]) -> None:
    shape, chunks = case
    counts = counted(shape, chunks)
    coverage = layout(shape, chunks).coverage
    assert_exact(coverage.missing, coverage.missing_volume, {cell for cell, n in counts.items() if n == 0})
    assert_exact(coverage.doubled, coverage.doubled_volume, {cell for cell, n in counts.items() if n > 1})


@settings(max_examples=examples(15, 400))
@given(st.one_of(damaged(), tangled()), st.sampled_from([0, 2, 9]), st.sampled_from([1, 3, 60]))
def test_searching_gives_what_painting_gives(case: tuple[tuple[int, ...], list[Chunk]], few: int, cells: int) -> None:
    shape, chunks = case
    assume(prod(shape) > 0)
    whole = layout(shape, chunks).coverage
    with searched(few, cells):
        parts = layout(shape, chunks).coverage
    assert parts.exact
    assert (parts.missing_volume, parts.doubled_volume) == (whole.missing_volume, whole.doubled_volume)
    for in_parts, at_once in ((parts.missing, whole.missing), (parts.doubled, whole.doubled)):
        cells_of_parts = box_cells(in_parts)
        assert len(cells_of_parts) == len(set(cells_of_parts))
        if len(in_parts) < boxes.REGION_LIMIT > len(at_once):
            assert set(cells_of_parts) == set(box_cells(at_once))


@settings(max_examples=examples(15, 200))
@given(st.one_of(damaged(), tangled()), st.integers(0, 6))
def test_what_a_search_without_budget_says_is_true(case: tuple[tuple[int, ...], list[Chunk]], budget: int) -> None:
    shape, chunks = case
    assume(prod(shape) > 0)
    counts = counted(shape, chunks)
    with searched(2, 1), pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes, "_WORK", budget * boxes._WORK_OF_CELL)
        patch.setattr(boxes, "_WORK_PER_BOX", 0)
        patch.setattr(boxes, "_WORK_PER_DAMAGED_BOX", 0)
        found = layout(shape, chunks).coverage
    for region, volume, wanted in (
        (found.missing, found.missing_volume, {cell for cell, n in counts.items() if n == 0}),
        (found.doubled, found.doubled_volume, {cell for cell, n in counts.items() if n > 1}),
    ):
        assert set(box_cells(region)) <= wanted
        assert volume <= len(wanted)
        assert volume == len(wanted) or not found.exact


@pytest.mark.parametrize("count", [1, 300, 3000])
def test_a_spiral_is_whole_and_one_strip_less_is_a_hole(count: int) -> None:
    """Two axes, a strip cut off each side in turn: no plane leaves all strips whole."""
    low, high = [0, 0], [4 * count, 4 * count]
    chunks: list[Chunk] = []
    for number in range(count):
        axis, at_end = number % 2, number % 4 > 1
        start, stop = list(low), list(high)
        if at_end:
            start[axis] = high[axis] = high[axis] - 1
        else:
            stop[axis] = low[axis] = low[axis] + 1
        chunks.append((tuple(start), tuple(b - a for a, b in zip(start, stop, strict=True))))
    chunks.append((tuple(low), tuple(b - a for a, b in zip(low, high, strict=True))))
    shape = (4 * count, 4 * count)
    assert layout(shape, chunks).coverage == Coverage()
    lost = chunks.pop(count // 2)
    assert layout(shape, chunks).coverage == Coverage((Box(*lost),), prod(lost[1]))


@pytest.mark.sweep
@pytest.mark.parametrize("rank", [2, 8, 1, 3, 4, 6][: examples(2, 6)])
def test_many_irregular_chunks_are_judged_exactly(rank: int) -> None:
    shape, *columns = bench("speed/irregular").irregular(examples(10_000, 60_000), rank)
    chunks = list(zip(*(map(tuple, column.tolist()) for column in columns), strict=True))
    assert layout(shape, chunks).coverage == Coverage()
    lost = chunks[100:2000:100]
    kept = [chunk for chunk in chunks if chunk not in lost]
    holes = layout(shape, kept).coverage
    assert (holes.missing_volume, holes.doubled, holes.exact) == (sum(prod(size) for _, size in lost), (), True)
    assert sum(box.volume for box in holes.missing) == holes.missing_volume
    twice = [((*chunk[0][:-1], chunk[0][-1]), chunk[1]) for chunk in lost]
    overlaps = layout(shape, chunks + twice).coverage
    assert (overlaps.doubled_volume, overlaps.missing, overlaps.exact) == (holes.missing_volume, (), True)


@pytest.mark.sweep
@pytest.mark.parametrize("rank", [2, *swept(8, 4, 5)])
def test_boxes_anywhere_are_told_within_the_budget(rank: int) -> None:
    random = np.random.default_rng(rank)
    extent = 2 ** (60 // rank)
    sizes = random.integers(1, extent // 2, (examples(10_000, 60_000), rank))
    offsets = (random.random(sizes.shape) * (extent - sizes)).astype(np.int64)
    with ends(20):
        found = Tiling((extent,) * rank, offsets, sizes).coverage
    assert found.doubled and found.missing
    for box in found.doubled:
        middle = np.array(box.offsets) + np.array(box.sizes) // 2
        assert ((offsets <= middle) & (offsets + sizes > middle)).all(axis=1).sum() >= 2
    for box in found.missing:
        low, high = np.array(box.offsets), np.array(box.ends)
        assert not ((offsets < high) & (offsets + sizes > low)).all(axis=1).any()


def test_one_hole_that_a_plane_cuts_is_one_box_again() -> None:
    chunks = [((0, 0), (2, 8)), ((6, 0), (2, 8)), *(((row, 0), (1, 2)) for row in range(2, 6))]
    whole = layout((8, 8), chunks).coverage
    with searched(2, 1):
        assert layout((8, 8), chunks).coverage.missing == whole.missing == (Box((2, 2), (4, 6)),)


def test_many_axes_are_painted_chunk_by_chunk() -> None:
    shape = (2,) * 7
    chunks = [(corner, (1,) * 7) for corner in product(range(2), repeat=7)]
    assert layout(shape, chunks).is_grid
    coverage = layout(shape, [*chunks[1:], chunks[-1]]).coverage
    assert coverage.missing == (Box((0,) * 7, (1,) * 7),)
    assert coverage.doubled == (Box((1,) * 7, (1,) * 7),)
    assert (coverage.missing_volume, coverage.doubled_volume) == (1, 1)


def test_volumes_stay_exact_when_more_boxes_are_found_than_are_named() -> None:
    chunks = [((i,), (1,)) for i in range(0, 400, 2)]
    coverage = layout((400,), chunks).coverage
    assert len(coverage.missing) == 64
    assert coverage.missing_volume == 200
    assert coverage.missing[0] == Box((1,), (1,))


@pytest.mark.parametrize(
    ("chunks", "missing", "doubled"),
    [([], 1, 0), ([((), ())], 0, 0), ([((), ())] * 3, 0, 1)],
    ids=["none", "one", "three"],
)
def test_a_scalar_is_stored_once(chunks: list[Chunk], missing: int, doubled: int) -> None:
    coverage = layout((), chunks).coverage
    assert (coverage.missing_volume, coverage.doubled_volume) == (missing, doubled)
    assert coverage.missing == (Box((), ()),) * missing
    assert coverage.doubled == (Box((), ()),) * doubled


def test_a_chunk_that_leaves_the_tensor_covers_what_lies_inside() -> None:
    made = layout((8,), [((-2,), (4,)), ((6,), (40,))])
    assert made.outside.tolist() == [0, 1]
    assert made.coverage.missing == (Box((2,), (4,)),)


# ---------------------------------------------------------------- bounds, duplicates, grids


@given(damaged())
def test_outside_lists_each_chunk_that_leaves_the_tensor(case: tuple[tuple[int, ...], list[Chunk]]) -> None:
    shape, chunks = case
    expected = [
        row
        for row, (offset, size) in enumerate(chunks)
        if any(o < 0 or o + s > n for o, s, n in zip(offset, size, shape, strict=True))
    ]
    assert layout(shape, chunks).outside.tolist() == expected


def test_an_empty_chunk_beyond_the_end_is_outside_and_one_at_the_end_is_not() -> None:
    assert layout((4,), [((4,), (0,)), ((5,), (0,)), ((-1,), (0,))]).outside.tolist() == [1, 2]


@given(damaged())
def test_duplicates_pair_each_further_live_row_with_the_first(case: tuple[tuple[int, ...], list[Chunk]]) -> None:
    shape, chunks = case
    first: dict[tuple[int, ...], int] = {}
    expected = []
    for row, (offset, size) in enumerate(chunks):
        if all(s > 0 for s in size):
            if offset in first:
                expected.append((first[offset], row))
            first.setdefault(offset, row)
    assert sorted(layout(shape, chunks).duplicates) == sorted(expected)


def grid_cells(shape: tuple[int, ...], chunks: list[Chunk]) -> bool:
    """Whether the live chunks are exactly the product of one tiling per axis."""
    live = [(o, s) for o, s in chunks if all(s)]
    if any(o < 0 or o + s > n for chunk in chunks for o, s, n in zip(*chunk, shape, strict=True)) or not live:
        return False
    axes = []
    for axis, size in enumerate(shape):
        spans = sorted({(o[axis], o[axis] + s[axis]) for o, s in live})
        ends = [0, *(stop for _, stop in spans)]
        if [start for start, _ in spans] != ends[:-1] or ends[-1] != size:
            return False
        axes.append(spans)
    wanted = sorted(product(*axes))
    return wanted == sorted(tuple((a, a + b) for a, b in zip(o, s, strict=True)) for o, s in live)


@settings(max_examples=examples(15, 300))
@given(damaged())
def test_is_grid_equals_the_product_of_the_paths(case: tuple[tuple[int, ...], list[Chunk]]) -> None:
    shape, chunks = case
    assert layout(shape, chunks).is_grid == grid_cells(shape, chunks)


@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1, max_size=4), st.randoms())
def test_a_shuffled_grid_with_empty_chunks_is_a_grid(paths: list[list[int]], random: object) -> None:
    starts = [[sum(path[:i]) for i in range(len(path))] for path in paths]
    shape = tuple(map(sum, paths))
    chunks = [
        (tuple(s[i] for s, i in zip(starts, at, strict=True)), tuple(p[i] for p, i in zip(paths, at, strict=True)))
        for at in product(*(range(len(path)) for path in paths))
    ]
    chunks.append((shape, (0,) * len(shape)))
    random.shuffle(chunks)  # type: ignore[attr-defined]
    assert layout(shape, chunks).is_grid
    live = next(i for i, (_, size) in enumerate(chunks) if all(size))
    assert not layout(shape, chunks[:live] + chunks[live + 1 :]).is_grid


# ---------------------------------------------------------------- intervals that do not fit


def spans_of(chunks: list[Chunk], axis: int) -> set[tuple[int, int]]:
    return {(o[axis], o[axis] + s[axis]) for o, s in chunks if all(part > 0 for part in s)}


def crosses(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[0] < a[1] < b[1]


def encloses(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a != b and a[0] <= b[0] and b[1] <= a[1]


def assert_pairs(found: list[Crossing], chunks: list[Chunk], rank: int, fits: object) -> None:
    for axis in range(rank):
        pairs = {(a, b) for a in spans_of(chunks, axis) for b in spans_of(chunks, axis) if fits(a, b)}  # type: ignore[operator]
        named = [pair for pair in found if pair.axis == axis]
        assert len(named) == bool(pairs), f"axis {axis}: {named} of {pairs}"
        assert {(pair.first, pair.second) for pair in named} <= pairs


@settings(max_examples=examples(15, 400))
@given(damaged())
def test_crossings_and_nestings_name_a_pair_wherever_one_exists(case: tuple[tuple[int, ...], list[Chunk]]) -> None:
    shape, chunks = case
    assert_pairs(layout(shape, chunks).crossings, chunks, len(shape), crosses)
    assert_pairs(layout(shape, chunks).nestings, chunks, len(shape), encloses)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12)), min_size=1, max_size=8))
def test_crossings_of_any_set_of_intervals(spans: list[tuple[int, int]]) -> None:
    chunks: list[Chunk] = [((start,), (size,)) for start, size in spans]
    made = layout((24,), chunks)
    assert_pairs(made.crossings, chunks, 1, crosses)
    assert_pairs(made.nestings, chunks, 1, encloses)


@given(damaged())
def test_intervals_are_distinct_and_in_order(case: tuple[tuple[int, ...], list[Chunk]]) -> None:
    shape, chunks = case
    made = layout(shape, chunks)
    for axis in range(len(shape)):
        listed = [tuple(pair) for pair in made.intervals(axis).tolist()]
        assert listed == sorted(spans_of(chunks, axis), key=lambda pair: (pair[0], -pair[1]))


# ---------------------------------------------------------------- flattened runs


@settings(max_examples=examples(15, 300))
@given(tilings(least=1))
def test_row_major_means_that_flat_indices_are_one_run(case: tuple[tuple[int, ...], list[Chunk]]) -> None:
    shape, chunks = case
    flat = {cell: i for i, cell in enumerate(product(*map(range, shape)))}
    runs = [sorted(flat[cell] for cell in cells_of(shape, chunk)) for chunk in chunks]
    expected = all(run[-1] - run[0] + 1 == len(run) for run in runs)
    assert layout(shape, chunks).is_row_major == expected


def test_an_empty_chunk_is_no_obstacle_to_row_major() -> None:
    assert layout((4, 4), [((0, 0), (4, 4)), ((2, 2), (0, 2))]).is_row_major
    assert layout((), [((), ())]).is_row_major


# ---------------------------------------------------------------- large numbers


def test_offsets_and_sizes_near_the_limit_do_not_overflow() -> None:
    top = COORDINATE_LIMIT - 1
    made = layout((top,), [((0,), (top // 2,)), ((top // 2 + 7,), (top - top // 2 - 7,)), ((top,), (top,))])
    assert made.outside.tolist() == [2]
    assert made.coverage.missing == (Box((top // 2,), (7,)),)
    assert made.coverage.missing_volume == 7


def test_a_volume_near_the_limit_is_exact() -> None:
    rows, columns = 2**31 - 1, 2**31
    made = layout((rows, columns), [((0, 0), (rows - 1, columns - 1))])
    assert made.coverage.missing_volume == rows * columns - (rows - 1) * (columns - 1)
    assert sum(box.volume for box in made.coverage.missing) == made.coverage.missing_volume
    whole = layout((rows, columns), [((0, 0), (rows, columns))] * 2).coverage
    assert whole.doubled_volume == rows * columns
    assert whole.doubled == (Box((0, 0), (rows, columns)),)


def test_a_grid_of_more_cells_than_int64_counts_is_no_grid() -> None:
    chunks = [(tuple(i for _ in range(8)), (1,) * 8) for i in range(300)]
    assert not layout((300,) * 7 + (300,), chunks).is_grid


# ---------------------------------------------------------------- boxes


@given(damaged())
def test_touching_lists_the_chunks_that_share_a_cell(case: tuple[tuple[int, ...], list[Chunk]]) -> None:
    shape, chunks = case
    assume(prod(shape) > 0)
    made = layout(shape, chunks)
    region = Box(tuple(n // 2 for n in shape), (1,) * len(shape))
    cell = tuple(n // 2 for n in shape)
    assert made.touching(region) == [row for row, chunk in enumerate(chunks) if cell in cells_of(shape, chunk)]


@given(damaged())
def test_intersections_equal_common_cells(case: tuple[tuple[int, ...], list[Chunk]]) -> None:
    _, chunks = case
    found = [Box(*chunk) for chunk in chunks if all(chunk[1])]
    for a, b in combinations(found[:6], 2):
        common = set(box_cells((a,))) & set(box_cells((b,)))
        both = a.intersect(b)
        assert (set() if both is None else set(box_cells((both,)))) == common


def test_a_box_is_written_as_slices() -> None:
    box = Box((8, 0), (4, 8))
    assert (str(box), box.ends, box.volume) == ("[8:12, 0:8]", (12, 8), 32)
    assert Box((0,), (4,)).intersect(Box((4,), (4,))) is None
