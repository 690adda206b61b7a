"""Lists of files that are missing, by rank and node, as reports show them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support import REAL, run

import ckptlint
from ckptlint.model.lost_files import by_node


def names(ranks: range | list[int]) -> dict[str, int | None]:
    return {f"__{rank}_0.distcp": rank for rank in ranks}


@pytest.mark.parametrize(
    ("lost", "there", "whose"),
    [
        (range(8, 16), range(8), ["ranks 8-15, probably one node"]),
        (
            [*range(4, 8), *range(12, 16)],
            [*range(4), *range(8, 12)],
            ["ranks 4-7, probably one node", "ranks 12-15, probably one node"],
        ),
        ([3], range(3), ["rank 3"]),
        ([1, 2, 6], [0, 3, 4, 5, 7], ["ranks 1-2", "rank 6"]),
        ([], [], []),
    ],
)
def test_whole_nodes_and_runs_of_ranks(lost: list[int], there: list[int], whose: list[str]) -> None:
    found = by_node(names(lost), there)
    assert [what for what, _ in found] == whose
    assert [name for _, own in found for name in own] == [*names(lost)]


def test_files_of_no_rank_and_of_ranks_that_are_there_come_last() -> None:
    assert by_node({"w.bin": None, "__0_1.distcp": 0, "__1_0.distcp": 1}, [0]) == (
        ("rank 1", ("__1_0.distcp",)),
        ("", ("w.bin", "__0_1.distcp")),
    )


@pytest.mark.parametrize(
    ("source", "lost", "code"),
    [
        ("rank_files/verl_fsdp2_4r", "model_*_rank_[23].pt", "RNK001"),
        ("fsdp2_4r", "__[23]_*.distcp", "PAY003"),
        ("per_rank_metadata", "__[13].metadata", "COM001"),
        ("frameworks/trainer_jit/checkpoint-20", "rng_state_1.pth", None),
    ],
)
def test_the_list_is_whole_in_json_and_one_to_a_line(tmp_path: Path, source: str, lost: str, code: str | None) -> None:
    step = Path(shutil.copytree(REAL / source, tmp_path / "step"))
    gone = sorted(path.name for path in step.glob(lost))
    for name in gone:
        (step / name).unlink()
    told = {
        item.code: [name for _, own in item.finding.lost_files for name in own]
        for item in ckptlint.check(step).diagnostics
        if item.finding.lost_files
    }
    if code is None:  # rank 0 alone may be all that wrote one
        assert told == {}
        return
    assert sorted(told[code]) == gone
    lines = run("--isolated", "-v", step).stdout.splitlines()
    assert [line.strip() for line in lines if line.strip() in gone] == gone


def test_a_number_that_nobody_counts_to_costs_nothing(tmp_path: Path) -> None:
    step = Path(shutil.copytree(REAL / "frameworks/trainer_jit/checkpoint-20", tmp_path / "step"))
    (step / "rng_state_1.pth").rename(step / "rng_state_999999999.pth")
    told = [item for item in ckptlint.check(step).diagnostics if item.code == "COM012"]
    assert [sum(len(own) for _, own in item.finding.lost_files) for item in told] == [2**16]
