"""Files of two saves in one folder are told as that, with the one that is complete by itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import ckptlint
from ckptlint.analysis.chunks.two_saves import two_saves
from ckptlint.model import Checkpoint
from ckptlint.testing import load_folder, write_safetensors

OLD, NEW = 1_700_000_000.0, 1_700_009_000.0


def shard(folder: Path, rank: int, rows: tuple[int, int], written: float, of: int = 1) -> None:
    """A rank's file of rows of `w` [12, 4], as torch's writer names it."""
    name = f"shard-{rank + 1:05d}-model-00001-of-{of:05d}.safetensors"
    start, stop = rows
    table = {"tensors": {"w": {"dtype": "float32", "shape": [stop - start, 4], "offsets": [start, 0]}}}
    os.utime(write_safetensors(folder / name, table), (written, written))


def two_ranks_over_four(folder: Path, late: float) -> Checkpoint:
    """Two ranks saved where four had saved before, over the files of the first two."""
    shard(folder, 0, (0, 6), late)
    shard(folder, 1, (6, 12), late)
    shard(folder, 2, (6, 9), OLD)
    shard(folder, 3, (9, 12), OLD)
    return load_folder(folder)


def test_the_newer_save_is_complete(tmp_path: Path) -> None:
    saves = two_saves(two_ranks_over_four(tmp_path, NEW))
    assert saves is not None
    newer, older = saves
    assert [newer.is_complete, older.is_complete] == [True, False]
    assert [len(newer.files), len(older.files), newer.written, older.written] == [2, 2, NEW, OLD]
    (item, *_) = [item for item in ckptlint.check(tmp_path).diagnostics if item.code == "GEO003"]
    notes = dict(item.all_notes())
    assert notes["hint"].startswith("move shard-00003-model-00001-of-00001.safetensors and shard-00004-")
    assert notes["two saves"].startswith("2 files written 2023-11-1") and "not complete" in notes["two saves"]


def test_files_of_one_moment_are_one_save(tmp_path: Path) -> None:
    assert two_saves(two_ranks_over_four(tmp_path, OLD)) is None


def test_totals_in_the_names_tell_two_saves_of_one_moment(tmp_path: Path) -> None:
    for rank in range(2):
        shard(tmp_path, rank, (6 * rank, 6 * rank + 6), OLD)
        shard(tmp_path, rank, (6 * rank, 6 * rank + 6), OLD, of=2)
    saves = two_saves(load_folder(tmp_path))
    assert saves is not None and saves[0].is_complete and saves[1].is_complete
    (item, *_) = [item for item in ckptlint.check(tmp_path).diagnostics if item.code == "GEO007"]
    assert "keep one and move the other away" in dict(item.all_notes())["hint"]


@pytest.mark.parametrize("rows", [(5, 9), (0, 3)], ids=["crossing", "twice"])
def test_an_overlap_within_one_save_is_no_second_save(tmp_path: Path, rows: tuple[int, int]) -> None:
    for rank, own in enumerate([(0, 6), rows, (6, 12)]):
        shard(tmp_path, rank, own, OLD + 60 * rank)
    shard(tmp_path, 3, (11, 12), NEW)
    assert two_saves(load_folder(tmp_path)) is None


def test_a_sound_folder_is_one_save(tmp_path: Path) -> None:
    shard(tmp_path, 0, (0, 6), OLD)
    shard(tmp_path, 1, (6, 12), NEW)
    assert two_saves(load_folder(tmp_path)) is None
