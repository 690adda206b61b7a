"""Run lists against torch: the same sizes and first offsets, and the very rows that torch puts on each rank."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import examples
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ckptlint.vocabulary.placements import bounding_box, runs

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
needs_strided = pytest.mark.skipif(TORCH < (2, 13), reason="before torch 2.13 _StridedShard meant something else")


@st.composite
def layouts(draw: st.DrawFn, *, strided: bool = True) -> tuple[Any, ...]:
    """A global shape, placements and the shape of a mesh, none of them even on purpose."""
    shape = tuple(draw(st.lists(st.integers(0, 17), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    kinds = [st.just(Replicate()), st.just(Partial()), dims.map(Shard)]
    if strided:
        kinds.append(st.builds(lambda dim, split: _StridedShard(dim, split_factor=split), dims, st.integers(1, 4)))
    return shape, [draw(st.one_of(kinds)) for _ in mesh], mesh


def of_torch(shape: tuple[int, ...], placements: list[Placement], mesh: tuple[int, ...], place: tuple[int, ...]) -> Any:
    sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh, list(place), placements)
    return tuple(offsets), tuple(sizes)


@needs_strided
@pytest.mark.sweep
@settings(max_examples=examples(15, 1500))
@given(layouts())
def test_boxes_are_those_of_torch(layout: tuple[Any, ...]) -> None:
    shape, placements, mesh = layout
    for place in product(*map(range, mesh)):
        assert bounding_box(runs(shape, placements, mesh, place), shape) == of_torch(shape, placements, mesh, place)


@needs_strided
@settings(max_examples=examples(15, 300))
@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_runs_are_the_rows_that_torch_hands_out(size: int, outer: int, inner: int, split: int, first: bool) -> None:
    placements = [Shard(0), _StridedShard(0, split_factor=split)][:: 1 if first else -1]
    for place in product(range(outer), range(inner)):
        rows = torch.arange(size)
        for placement, pieces, at in zip(placements, (outer, inner), place, strict=True):
            rows = placement._split_tensor(rows, pieces, with_padding=False, contiguous=False)[0][at]
        found = runs((size,), placements, (outer, inner), place)[0]
        assert [row for start, stop in found for row in range(start, stop)] == rows.tolist()
        assert all(stop != start for (_, stop), (start, _) in pairwise(found)), "neighbours joined"


@settings(max_examples=examples(15, 300))
@given(layouts(strided=False), st.randoms())
def test_in_any_order_the_ranks_tile_the_tensor(layout: tuple[Any, ...], random: Any) -> None:
    shape, placements, mesh = layout
    order = random.sample(range(len(mesh)), len(mesh))
    copies = prod(size for size, placement in zip(mesh, placements, strict=True) if not hasattr(placement, "dim"))
    count = torch.zeros(shape, dtype=torch.int64)
    for place in product(*map(range, mesh)):
        offsets, sizes = bounding_box(runs(shape, placements, mesh, place, order), shape)
        part = count
        for dim, (offset, length) in enumerate(zip(offsets, sizes, strict=True)):
            part = part.narrow(dim, min(offset, shape[dim]), length)
        part += 1
    assert (count == copies).all()


def test_the_order_of_mesh_dims_changes_who_holds_what() -> None:
    shards = [Shard(0), Shard(0)]
    assert [runs((8,), shards, (2, 2), place)[0] for place in product(range(2), range(2))] == [
        ((0, 2),),
        ((2, 4),),
        ((4, 6),),
        ((6, 8),),
    ]
    assert [runs((8,), shards, (2, 2), place, (1, 0))[0] for place in product(range(2), range(2))] == [
        ((0, 2),),
        ((4, 6),),
        ((2, 4),),
        ((6, 8),),
    ]


def test_a_strided_shard_may_be_no_box() -> None:
    assert runs((16,), [Shard(0), _StridedShard(0, split_factor=2)], (2, 2), (0, 1)) == (((2, 4), (6, 8)),)
    assert runs((16,), [_StridedShard(0, split_factor=2), Shard(0)], (2, 2), (0, 1)) == (((8, 12),),)


def test_a_dim_of_a_billion_costs_nothing() -> None:
    held = runs((10**12, 3), [_StridedShard(0, split_factor=8), Shard(0)], (4, 8), (3, 7))
    assert bounding_box(held, (10**12, 3)) == ((968_750_000_000, 0), (31_250_000_000, 3))


def test_a_placement_on_a_dim_that_is_not_there_is_an_error() -> None:
    with pytest.raises(IndexError):
        runs((4,), [Shard(1)], (2,), (0,))
