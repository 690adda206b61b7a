"""Steps whose save is not over, as their own names say: a framework renames them at the end and resumes from none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support import REAL, codes, report_on, run

import ckptlint

NAMES = [("step_20", "step_30.tmp"), ("ckpt-step-20", "ckpt-step-30.incomplete")]


def fsdp_step(folder: Path, save: str = "0000009", lost: str = "") -> Path:
    """A step of two ranks, as FSDP writes it; and one whose second rank has not written yet."""
    folder.mkdir(parents=True)
    for file in (REAL / "rank_files/flat_2r").glob(f"model_{save}.rank_*.pth"):
        if not (lost and file.stem.endswith(lost)):
            shutil.copy(file, folder)
    return folder


@pytest.mark.parametrize(("whole", "name"), NAMES)
def test_a_run_is_judged_by_its_newest_whole_step(tmp_path: Path, whole: str, name: str) -> None:
    fsdp_step(tmp_path / whole)
    fsdp_step(tmp_path / name, lost="rank_1")
    for every in (False, True):
        report = ckptlint.check(tmp_path, all_steps=every)
        assert (report.exit_code, codes(report, "error", "warning")) == (0, set())
        assert f"what {name} holds: its save never finished" in report.checkpoints[0].checkpoint.not_looked_at
    assert run("latest", "--isolated", tmp_path).stdout.strip().endswith(whole)


@pytest.mark.parametrize(("whole", "name"), NAMES)
def test_the_unfinished_step_itself_has_one_finding(tmp_path: Path, whole: str, name: str) -> None:
    for place in (fsdp_step(tmp_path / name, lost="rank_1"), tmp_path):  # also where it is all that there is
        report = report_on(place)
        (finding,) = report.diagnostics
        assert (report.exit_code, finding.code) == (1, "COM001")
        assert finding.title == f"{name} says that this save never finished"


def test_another_folder_that_ends_so_is_judged(tmp_path: Path) -> None:
    assert report_on(fsdp_step(tmp_path / "backup.tmp")).exit_code == 0
    assert codes(report_on(fsdp_step(tmp_path / "old.tmp", lost="rank_1")), "error") == {"RNK001"}
