"""Who should have saved a missing part, and whether its record is still there."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from one_tensor import opened, the_tensor

from ckptlint.analysis.chunks.missing import absent_hint, absent_ranks, absent_writer, lost_records, unnamed_bytes
from ckptlint.model import Checkpoint
from ckptlint.model.tiling import Box
from ckptlint.testing import load_folder, write_checkpoint

ANYONE = "list which ranks pass this key to save, and compare their offsets"
ROWS, HOLE = ["0:4, :", "4:8, :", "12:16, :"], Box((8, 0), (4, 8))


# ---------------------------------------------------------------- by the numbers of files


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
    assert absent_hint(ckpt, the_tensor(ckpt), Box((12, 4), (4, 4))) == ANYONE


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


# ---------------------------------------------------------------- by tensors that are cut alike


def layers(folder: Path, own: dict[str, int], other: dict[str, int]) -> Checkpoint:
    """Tensors `w` and `v` of one shape: which rows the file of which rank holds."""
    tensors = {}
    for number, (name, held) in enumerate((("w", own), ("v", other))):
        places = [
            f"__{rank}_0.distcp {4000 * number + 2000 * i}:{4000 * number + 2000 * i + 1900}"
            for i, rank in enumerate(held.values())
        ]
        tensors[name] = {"shape": [8, 4], "chunks": [f"{rows}, :" for rows in held], "records": places}
    write_checkpoint({"tensors": tensors}, folder)
    return load_folder(folder)


@pytest.mark.parametrize(
    ("own", "other", "ranks", "instead"),
    [
        ({"0:4": 0}, {"0:4": 0, "4:8": 1}, (1,), None),
        ({"0:4": 1}, {"0:4": 0, "4:8": 1}, (1,), (Box((0, 0), (4, 4)), 0)),
        ({"0:4": 2}, {"0:4": 0, "4:8": 1}, None, None),
        ({"0:2": 0}, {"0:4": 0, "4:8": 1}, None, None),
    ],
    ids=["saved no part", "saved the part of another", "spread otherwise", "cut otherwise"],
)
def test_a_tensor_that_is_cut_alike_tells_the_rank(
    tmp_path: Path, own: dict[str, int], other: dict[str, int], ranks: tuple[int, ...] | None, instead: object
) -> None:
    ckpt = layers(tmp_path, own, other)
    found = absent_ranks(ckpt, the_tensor(ckpt), Box((4, 0), (4, 4)))
    if ranks is None:
        assert found is None
    else:
        assert found is not None
        assert (found.ranks, found.instead) == (ranks, instead)


# ---------------------------------------------------------------- the hint


def test_the_hint_tells_a_rank_that_saved_from_one_that_did_not(tmp_path: Path) -> None:
    other = {"v": {"shape": [4], "records": ["__2_0.distcp 0:1600"]}}
    saved = opened(tmp_path / "a", [16, 8], ROWS, [0, 1, 3], more=other)
    assert "__2_0.distcp holds only other tensors" in absent_hint(saved, the_tensor(saved), HOLE)
    lost = opened(tmp_path / "b", [16, 8], ROWS, [0, 1, 3])
    assert "it probably never saved (__2_0.distcp)" in absent_hint(lost, the_tensor(lost), HOLE)


@pytest.mark.parametrize(
    ("size", "says"),
    [
        (1600, "holds only other tensors"),
        (1600 + 1899, "holds only other tensors"),
        (1600 + 1900, "still in __2_0.distcp at byte 1,600; only its entry is missing"),
        (1600 + 5000, ".metadata does not use 5,000 of its bytes"),
    ],
    ids=["no room", "too little", "just the record", "more than the record"],
)
def test_the_hint_never_denies_bytes_that_no_entry_names(tmp_path: Path, size: int, says: str) -> None:
    other = {"v": {"shape": [4], "records": ["__2_0.distcp 0:1600"]}}
    ckpt = opened(tmp_path, [16, 8], ROWS, [0, 1, 3], more=other, files={"__2_0.distcp": size})
    assert says in absent_hint(ckpt, the_tensor(ckpt), HOLE)


def test_a_file_that_no_entry_names_belongs_to_a_rank_that_saved(tmp_path: Path) -> None:
    ckpt = opened(tmp_path, [16, 8], ROWS, [0, 1, 3], files={"__2_0.distcp": 7000})
    assert "__2_0.distcp of rank 2 is here, but .metadata does not use it" in absent_hint(ckpt, the_tensor(ckpt), HOLE)


def test_lost_records_and_the_bytes_that_no_entry_names(tmp_path: Path) -> None:
    other = {"v": {"shape": [4], "records": ["__2_0.distcp 1900:3500"]}}
    ckpt = opened(tmp_path, [16, 8], ROWS, [0, 1, 3], more=other, files={"__2_0.distcp": 3550})
    gaps = unnamed_bytes(ckpt)
    assert gaps["__2_0.distcp"] == ((0, 1900), (3500, 3550))
    assert unnamed_bytes(ckpt, 64)["__2_0.distcp"] == ((0, 1900),)
    assert lost_records(ckpt) == {("w", HOLE): ("__2_0.distcp", [0])}
