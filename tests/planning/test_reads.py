"""Target boxes against stored chunks: what brute force and torch's own function say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import examples

from ckptlint.model.tiling import Tiling
from ckptlint.planning.job import Target
from ckptlint.planning.reads import Reads, reads

Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]


def arrays(boxes: Boxes, axes: int) -> tuple[np.ndarray, np.ndarray]:
    offsets, sizes = ([box[side] for box in boxes] for side in (0, 1))
    return np.array(offsets, np.int64).reshape(len(boxes), axes), np.array(sizes, np.int64).reshape(len(boxes), axes)


def between(shape: tuple[int, ...], stored: Boxes, wanted: Boxes) -> tuple[Target, Reads]:
    target = Target.of_ranks(shape, np.arange(len(wanted)), *arrays(wanted, len(shape)))
    return target, reads(Tiling(shape, *arrays(stored, len(shape))), target)


def as_items(target: Target, found: Reads) -> set[tuple[object, ...]]:
    """(rank, chunk, storage offsets, destination offsets, lengths) of each item of each rank."""
    items = set()
    for rank, box in zip(target.rank.tolist(), target.box.tolist(), strict=True):
        for row in np.flatnonzero(found.box == box).tolist():
            parts = (tuple(array[row].tolist()) for array in (found.in_chunk, found.in_box, found.lengths))
            items.add((rank, int(found.chunk[row]), *parts))
    return items


def brute(stored: Boxes, wanted: Boxes) -> set[tuple[object, ...]]:
    items = set()
    for rank, (start, size) in enumerate(wanted):
        for chunk, (other, extent) in enumerate(stored):
            axes = range(len(start))
            if all(start[a] < other[a] + extent[a] and other[a] < start[a] + size[a] for a in axes):
                low = [max(start[a], other[a]) for a in axes]
                high = [min(start[a] + size[a], other[a] + extent[a]) for a in axes]
                inside = tuple(low[a] - other[a] for a in axes), tuple(low[a] - start[a] for a in axes)
                items.add((rank, chunk, *inside, tuple(high[a] - low[a] for a in axes)))
    return items


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Boxes, Boxes]:
    """A shape, any chunks, any boxes: overlapping, empty, leaving the tensor."""
    axes = draw(st.integers(0, 3))
    box = st.tuples(*(st.tuples(st.integers(0, 12), st.integers(0, 8)) for _ in range(axes))).map(
        lambda pairs: (tuple(p[0] for p in pairs), tuple(p[1] for p in pairs))
    )
    shape = tuple(draw(st.integers(0, 12)) for _ in range(axes))
    return shape, draw(st.lists(box, max_size=12)), draw(st.lists(box, max_size=12))


@settings(max_examples=examples(25, 300))
@given(cases())
def test_items_are_those_of_brute_force(case: tuple[tuple[int, ...], Boxes, Boxes]) -> None:
    shape, stored, wanted = case
    target, found = between(shape, stored, wanted)
    assert as_items(target, found) == brute(stored, wanted)


@settings(max_examples=examples(25, 100))
@given(cases())
def test_items_are_those_of_torch(case: tuple[tuple[int, ...], Boxes, Boxes]) -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    shape, stored, wanted = case
    chunks, boxes = ([ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in side] for side in (stored, wanted))
    described = TensorStorageMetadata(TensorProperties(), torch.Size(shape), chunks)
    theirs = {
        (
            item.dest_index.index,
            item.storage_index.index,
            *map(tuple, (item.storage_offsets, item.dest_offsets, item.lengths)),
        )
        for item in create_read_items_for_chunk_list("w", described, boxes)
    }
    target, found = between(shape, stored, wanted)
    assert as_items(target, found) == theirs


def test_blocks_do_not_change_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = [((8 * d, 4 * t), (8, 4)) for d in range(16) for t in range(4)]
    wanted = [((5 * r, 0), (5, 16)) for r in range(26)]
    whole = as_items(*between((128, 16), stored, wanted))
    monkeypatch.setattr("ckptlint.planning.reads._BLOCK", 7)
    assert as_items(*between((128, 16), stored, wanted)) == whole == brute(stored, wanted)


def test_ranks_that_hold_the_same_part_share_a_box() -> None:
    target = Target.of_ranks((4,), np.array([3, 1, 2, 0]), np.array([[0], [2], [0], [2]]), np.full((4, 1), 2))
    assert len(target.offsets) == 2
    assert target.rank.tolist() == [0, 1, 2, 3]
    assert target.offsets[target.box].reshape(-1).tolist() == [2, 2, 0, 0]
