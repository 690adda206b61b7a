"""The chunk graph of one axis, and what it tells about a missing region."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest

from ckptlint.geometry.chunk_graph import (
    AxisSlots,
    absent_writer,
    absent_writer_hint,
    axis_graph,
    axis_name,
    axis_slots,
    coordinates,
    mesh_note,
    rank_of,
)
from ckptlint.model import AxisSize, Checkpoint, Tensor
from ckptlint.model.layout import Box, Layout
from ckptlint.testing import load_folder, write_checkpoint


def strip(size: int, *spans: tuple[int, int]) -> Layout:
    """A tensor of one axis, cut at these places."""
    offsets = np.array([[a] for a, _ in spans], np.int64).reshape(len(spans), 1)
    sizes = np.array([[b - a] for a, b in spans], np.int64).reshape(len(spans), 1)
    return Layout((size,), offsets, sizes)


def opened(
    folder: Path, shape: list[int], chunks: list[str], ranks: list[int] | None = None, **table: Any
) -> Checkpoint:
    """A checkpoint of one tensor `w`, chunk i in the file of rank `ranks[i]`."""
    tensor: dict[str, Any] = {"shape": shape, "chunks": chunks}
    if ranks is not None:
        tensor["records"] = [f"__{rank}_0.distcp {2000 * i}:{2000 * i + 1900}" for i, rank in enumerate(ranks)]
    write_checkpoint({"tensors": {"w": tensor, **table.pop("more", {})}} | table, folder)
    return load_folder(folder)


def the_tensor(ckpt: Checkpoint) -> Tensor:
    return ckpt.tensors["w"]


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
    layout = Layout((4, 4), np.array([[0, 0], [0, 2], [2, 0]]), np.full((3, 2), 2))
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
    ids=["crossing", "nested", "before the start", "behind the end"],
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
    layout = Layout((8, 6), np.array([[0, 0], [4, 0]]), np.array([[2, 6], [4, 6]]))
    found = coordinates(layout, Box((2, 0), (2, 6)))
    assert {axis: inside for axis, (_, inside) in found.items()} == {0: [1]}


# ---------------------------------------------------------------- which place is missing


@pytest.mark.parametrize(
    ("shape", "chunks", "region", "note"),
    [
        ([16, 8], ["0:4, :", "4:8, :", "12:16, :"], Box((8, 0), (4, 8)), "dim 0 has 4 places of 4; place 2 is missing"),
        ([16, 8], ["0:4, :", "12:16, :"], Box((4, 0), (8, 8)), "dim 0 has 4 places of 4; places 1-2 are missing"),
        ([10, 4], ["0:3, :", "3:6, :", "9:10, :"], Box((6, 0), (3, 4)), "dim 0 has 4 places; place 2 is missing"),
        (
            [8, 6],
            ["0:4, 0:3", "0:4, 3:6", "4:8, 0:3"],
            Box((4, 3), (4, 3)),
            "every axis is whole; the crossing dim 0 place 1 of 2 x dim 1 place 1 of 2 is missing",
        ),
        (
            [12, 6],
            ["0:4, 0:3", "0:4, 3:6", "8:12, 0:3", "8:12, 3:6"],
            Box((4, 0), (4, 6)),
            "dim 0 has 3 places of 4; place 1 is missing",
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
    assert mesh_note(named, the_tensor(named), region) == "dim 0 (tp) has 4 places of 4; place 2 is missing"
    twice = replace(ckpt, topology={"tp": AxisSize(4, "args"), "dp": AxisSize(4, "args")})
    assert mesh_note(twice, the_tensor(twice), region) == "dim 0 has 4 places of 4; place 2 is missing"
    assert axis_name(named, 1, 1) == "dim 1"


# ---------------------------------------------------------------- who should have written it


@pytest.mark.parametrize(
    ("file", "rank"),
    [("__3_0.distcp", 3), ("__12_7.distcp", 12), ("step5__2_1.distcp", 2), ("a/b__0_0.distcp", 0), ("w.bin", None)],
)
def test_rank_of_a_file_name(file: str, rank: int | None) -> None:
    assert rank_of(file) == rank


@pytest.mark.parametrize(("absent", "rank"), [(0, 0), (2, 2), (3, 3)])
def test_the_absent_writer_of_a_row_shard(tmp_path: Path, absent: int, rank: int) -> None:
    rows = [i for i in range(4) if i != absent]
    ckpt = opened(tmp_path, [16, 8], [f"{4 * i}:{4 * i + 4}, :" for i in rows], rows)
    assert absent_writer(ckpt, the_tensor(ckpt), Box((4 * absent, 0), (4, 8))) == rank


def test_the_absent_writer_of_an_uneven_last_shard(tmp_path: Path) -> None:
    ckpt = opened(tmp_path, [10, 4], ["0:3, :", "3:6, :", "6:9, :"], [0, 1, 2])
    assert absent_writer(ckpt, the_tensor(ckpt), Box((9, 0), (1, 4))) == 3


def test_the_absent_writer_counts_in_steps_of_the_inner_mesh_axis(tmp_path: Path) -> None:
    # rows over tp 4 in a mesh where tp is the outer axis of stride 2: ranks 0, 2, 4, 6
    ckpt = opened(tmp_path, [16, 8], ["0:4, :", "4:8, :", "12:16, :"], [0, 2, 6])
    assert absent_writer(ckpt, the_tensor(ckpt), Box((8, 0), (4, 8))) == 4


def blocks(order: str, absent: tuple[int, int]) -> tuple[list[str], list[int]]:
    """Chunks of [16, 8] over fsdp 4 x tp 2 and their ranks, one block left out."""
    kept = [(dp, tp) for dp, tp in product(range(4), range(2)) if (dp, tp) != absent]
    ranks = {"tp inner": lambda dp, tp: 2 * dp + tp, "dp inner": lambda dp, tp: 4 * tp + dp}[order]
    chunks = [f"{4 * dp}:{4 * dp + 4}, {4 * tp}:{4 * tp + 4}" for dp, tp in kept]
    return chunks, [ranks(dp, tp) for dp, tp in kept]


@pytest.mark.parametrize(("order", "rank"), [("tp inner", 5), ("dp inner", 6)])
def test_the_absent_writer_on_a_mesh_of_fsdp_and_tp(tmp_path: Path, order: str, rank: int) -> None:
    ckpt = opened(tmp_path, [16, 8], *blocks(order, (2, 1)))
    assert absent_writer(ckpt, the_tensor(ckpt), Box((8, 4), (4, 4))) == rank


@pytest.mark.parametrize(
    "ranks",
    [
        [3, 0, 2, 1, 4, 6, 7],  # dedup spreads replicas over the least loaded ranks
        [0, 1, 2, 3, 4, 6, 5],  # all but two follow the places
        [0, 0, 0, 0, 0, 0, 0],  # one rank holds all
        [0, 1, 0, 1, 0, 1, 0],  # places along one axis do not change the rank: replicas over the other
    ],
    ids=["spread by load", "two swapped", "one rank", "one axis without effect"],
)
def test_nothing_is_claimed_of_load_balanced_replicas(tmp_path: Path, ranks: list[int]) -> None:
    chunks, _ = blocks("tp inner", (3, 1))
    ckpt = opened(tmp_path, [16, 8], chunks, ranks)
    assert absent_writer(ckpt, the_tensor(ckpt), Box((12, 4), (4, 4))) is None
    assert absent_writer_hint(ckpt, the_tensor(ckpt), Box((12, 4), (4, 4))) == ""


@pytest.mark.parametrize(
    ("shape", "chunks", "ranks", "region"),
    [
        ([8, 4], ["0:2, :", "2:4, :"], [0, 1], Box((4, 0), (2, 4))),
        ([16, 4], ["0:4, :", "12:16, :", "4:8, :"], [3, 1, 2], Box((8, 0), (4, 4))),
        ([16, 4], ["4:8, :", "8:12, :", "12:16, :"], [0, 1, 2], Box((0, 0), (4, 4))),
        ([20, 4], ["0:4, :", "4:8, :", "8:12, :"], [0, 1, 2], Box((12, 0), (8, 4))),
        ([8], ["0:4", "3:6", "6:7"], [0, 1, 2], Box((7,), (1,))),
    ],
    ids=["too few chunks", "no even steps", "before rank 0", "two places", "no path"],
)
def test_nothing_is_claimed_without_evidence(
    tmp_path: Path, shape: list[int], chunks: list[str], ranks: list[int], region: Box
) -> None:
    ckpt = opened(tmp_path, shape, chunks, ranks)
    assert absent_writer(ckpt, the_tensor(ckpt), region) is None


def test_nothing_is_claimed_of_files_without_a_rank(tmp_path: Path) -> None:
    tensor = {"shape": [16], "chunks": ["0:4", "4:8", "12:16"], "records": [f"{n}.bin 0:1600" for n in "abc"]}
    write_checkpoint({"tensors": {"w": tensor}}, tmp_path)
    ckpt = load_folder(tmp_path)
    assert absent_writer(ckpt, the_tensor(ckpt), Box((8,), (4,))) is None


def test_the_hint_tells_a_rank_that_saved_from_one_that_did_not(tmp_path: Path) -> None:
    chunks, region = ["0:4, :", "4:8, :", "12:16, :"], Box((8, 0), (4, 8))
    other = {"v": {"shape": [4], "records": ["__2_0.distcp 0:1600"]}}
    saved = opened(tmp_path / "a", [16, 8], chunks, [0, 1, 3], more=other)
    hint = absent_writer_hint(saved, the_tensor(saved), region)
    assert hint.startswith("rank 2 (__2_0.distcp) should hold it")
    assert "its save did finish" in hint
    lost = opened(tmp_path / "b", [16, 8], chunks, [0, 1, 3])
    assert "no entry names a file of rank 2" in absent_writer_hint(lost, the_tensor(lost), region)
