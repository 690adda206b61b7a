"""The chunk graph of one axis, and what it says about a missing region."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from one_tensor import opened, the_tensor

from ckptlint.geometry.chunk_graph import AxisSlots, axis_graph, axis_name, axis_slots, coordinates, mesh_note
from ckptlint.model import AxisSize
from ckptlint.model.tiling import Box, Tiling
from ckptlint.vocabulary.metadata_files import rank_of


def strip(size: int, *spans: tuple[int, int]) -> Tiling:
    """A tensor of one axis, cut at these places."""
    offsets = np.array([[a] for a, _ in spans], np.int64).reshape(len(spans), 1)
    sizes = np.array([[b - a] for a, b in spans], np.int64).reshape(len(spans), 1)
    return Tiling((size,), offsets, sizes)


# ---------------------------------------------------------------- the graph


@pytest.mark.parametrize(
    ("size", "spans"),
    [
        (8, [(0, 8)]),
        (8, [(0, 4), (4, 8)]),
        (10, [(0, 3), (3, 6), (6, 9), (9, 10)]),
        (5, [(0, 2), (2, 4), (4, 5), (5, 5)]),
        (4, [(0, 2), (2, 4), (0, 2), (2, 4)]),
    ],
    ids=["whole", "halves", "uneven", "empty last shard", "each twice"],
)
def test_a_healthy_axis_is_one_path_from_0_to_its_size(size: int, spans: list[tuple[int, int]]) -> None:
    graph = axis_graph(strip(size, *spans), 0)
    assert nx.is_directed_acyclic_graph(graph)
    path = nx.dag_longest_path(graph)
    assert len(path) == graph.number_of_nodes()
    assert graph.number_of_edges() == len(path) - 1
    assert (path[0][0], path[-1][1]) == (0, size)


def test_nodes_list_the_chunks_on_each_interval_and_empty_ones_are_left_out() -> None:
    graph = axis_graph(strip(4, (0, 2), (2, 4), (0, 2), (4, 4)), 0)
    assert dict(graph.nodes(data="rows")) == {(0, 2): [0, 2], (2, 4): [1]}
    assert (graph.graph["axis"], graph.graph["size"]) == (0, 4)


def test_a_gap_is_a_missing_link() -> None:
    graph = axis_graph(strip(12, (0, 4), (8, 12)), 0)
    assert graph.number_of_edges() == 0
    assert nx.number_weakly_connected_components(graph) == 2


def test_a_hole_at_a_crossing_leaves_both_paths_whole() -> None:
    layout = Tiling((4, 4), np.array([[0, 0], [0, 2], [2, 0]]), np.full((3, 2), 2))
    for axis in (0, 1):
        assert list(axis_graph(layout, axis).edges) == [((0, 2), (2, 4))]


# ---------------------------------------------------------------- places


@pytest.mark.parametrize(
    ("size", "spans", "intervals", "absent"),
    [
        (8, [(0, 4), (4, 8)], [(0, 4), (4, 8)], []),
        (16, [(0, 4), (12, 16)], [(0, 4), (4, 8), (8, 12), (12, 16)], [1, 2]),
        (16, [(0, 4), (4, 8)], [(0, 4), (4, 8), (8, 12), (12, 16)], [2, 3]),
        (16, [(4, 8), (8, 12), (12, 16)], [(0, 4), (4, 8), (8, 12), (12, 16)], [0]),
        (10, [(0, 3), (3, 6), (9, 10)], [(0, 3), (3, 6), (6, 9), (9, 10)], [2]),
        (9, [(0, 4), (4, 8)], [(0, 4), (4, 8), (8, 9)], [2]),
        (8, [], [(0, 8)], [0]),
    ],
    ids=["whole", "two in the middle", "tail", "head", "uneven", "odd rest", "no chunk"],
)
def test_places_fill_a_gap_with_the_usual_length(
    size: int, spans: list[tuple[int, int]], intervals: list[tuple[int, int]], absent: list[int]
) -> None:
    found = axis_slots(strip(size, *spans), 0)
    assert found is not None
    assert list(zip(found.starts.tolist(), found.stops.tolist(), strict=True)) == intervals
    assert np.flatnonzero(found.is_absent).tolist() == absent


@pytest.mark.parametrize(
    "spans",
    [[(0, 5), (4, 8)], [(0, 8), (2, 4)], [(-1, 4), (4, 8)], [(0, 4), (4, 9)]],
    ids=["crossing", "nested", "before the start", "after the end"],
)
def test_an_axis_without_a_plain_path_has_no_places(spans: list[tuple[int, int]]) -> None:
    assert axis_slots(strip(8, *spans), 0) is None


def test_places_inside_a_span_lie_wholly_within_it() -> None:
    made = AxisSlots(0, np.array([0, 3, 6, 9]), np.array([3, 6, 9, 10]), np.zeros(4, bool))
    assert [made.inside(0, 10), made.inside(3, 9), made.inside(4, 9), made.inside(9, 9)] == [
        [0, 1, 2, 3],
        [1, 2],
        [2],
        [],
    ]


def test_a_huge_gap_does_not_make_a_place_per_element() -> None:
    assert axis_slots(strip(2**40, (0, 1), (1, 2)), 0) is None


def test_coordinates_leave_out_an_axis_that_is_not_cut() -> None:
    layout = Tiling((8, 6), np.array([[0, 0], [4, 0]]), np.array([[2, 6], [4, 6]]))
    found = coordinates(layout, Box((2, 0), (2, 6)))
    assert {axis: inside for axis, (_, inside) in found.items()} == {0: [1]}


# ---------------------------------------------------------------- which place is missing


@pytest.mark.parametrize(
    ("shape", "chunks", "region", "note"),
    [
        (
            [16, 8],
            ["0:4, :", "4:8, :", "12:16, :"],
            Box((8, 0), (4, 8)),
            "dim 0 is split into 4 shards of size 4; shard 2 is missing",
        ),
        (
            [16, 8],
            ["0:4, :", "12:16, :"],
            Box((4, 0), (8, 8)),
            "dim 0 is split into 4 shards of size 4; shards 1-2 are missing",
        ),
        (
            [10, 4],
            ["0:3, :", "3:6, :", "9:10, :"],
            Box((6, 0), (3, 4)),
            "dim 0 is split into 4 shards; shard 2 is missing",
        ),
        (
            [8, 6],
            ["0:4, 0:3", "0:4, 3:6", "4:8, 0:3"],
            Box((4, 3), (4, 3)),
            "no dim lacks a shard; what is missing is shard 1 of 2 on dim 0 x shard 1 of 2 on dim 1",
        ),
        (
            [12, 6],
            ["0:4, 0:3", "0:4, 3:6", "8:12, 0:3", "8:12, 3:6"],
            Box((4, 0), (4, 6)),
            "dim 0 is split into 3 shards of size 4; shard 1 is missing",
        ),
        ([8], ["0:5", "4:6"], Box((6,), (2,)), ""),
        ([8], [], Box((0,), (8,)), ""),
    ],
    ids=["middle", "two", "uneven", "crossing", "row of blocks", "no path", "nothing stored"],
)
def test_mesh_note(tmp_path: Path, shape: list[int], chunks: list[str], region: Box, note: str) -> None:
    ckpt = opened(tmp_path, shape, chunks)
    assert mesh_note(ckpt, the_tensor(ckpt), region) == note


def test_mesh_note_names_the_mesh_axis_that_alone_has_the_size(tmp_path: Path) -> None:
    ckpt = opened(tmp_path, [16, 8], ["0:4, :", "4:8, :", "12:16, :"])
    region = Box((8, 0), (4, 8))
    named = replace(ckpt, topology={"tp": AxisSize(4, "args"), "pp": AxisSize(2, "args"), "world": AxisSize(4, "args")})
    assert (
        mesh_note(named, the_tensor(named), region) == "dim 0 (tp) is split into 4 shards of size 4; shard 2 is missing"
    )
    twice = replace(ckpt, topology={"tp": AxisSize(4, "args"), "dp": AxisSize(4, "args")})
    assert mesh_note(twice, the_tensor(twice), region) == "dim 0 is split into 4 shards of size 4; shard 2 is missing"
    assert axis_name(named, 1, 1) == "dim 1"


# ---------------------------------------------------------------- ranks of files


@pytest.mark.parametrize(
    ("file", "rank"),
    [("__3_0.distcp", 3), ("__12_7.distcp", 12), ("step5__2_1.distcp", 2), ("a/b__0_0.distcp", 0), ("w.bin", None)],
)
def test_rank_of_a_file_name(file: str, rank: int | None) -> None:
    assert rank_of(file) == rank
