"""An empty file with the ending of a checkpoint is broken wherever it lies; other empty files say nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import report_on

ENDINGS = ("model.pt", "optimizer.pt", "final.pth", "model.bin", "x.distcp", "__0_0.distcp", "model.safetensors")
STEPS = ("checkpoints/epoch=0-step=10.ckpt", "ep0-ba10-rank0.pt", "latest-rank0.pt", "last.ckpt", "model_10.pt")


def empty(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


@pytest.mark.parametrize("around", ["step_10", "a/b", ".", "run", "logs"])
@pytest.mark.parametrize("name", [*ENDINGS, *STEPS])
def test_an_empty_file_is_named_wherever_it_is_asked_for(tmp_path: Path, around: str, name: str) -> None:
    file = empty(tmp_path / around / name)
    for path in {tmp_path, file.parent, file}:
        report = report_on(path)
        assert report.exit_code == 1, path
        (finding,) = report.diagnostics
        assert f"{file.name} is empty (0 bytes)" in finding.title


@pytest.mark.parametrize("name", [".lock", "model.pt.lock", "__init__.py", ".gitkeep", "train.log"])
@pytest.mark.parametrize("around", ["step_10", "a/b", "."])
def test_other_empty_files_are_no_checkpoint(tmp_path: Path, around: str, name: str) -> None:
    empty(tmp_path / around / name)
    assert report_on(tmp_path).exit_code == 3


def test_several_are_all_named(tmp_path: Path) -> None:
    for name in ("a.pt", "b.pt"):
        empty(tmp_path / "logs" / name)
    titles = [item.title for item in report_on(tmp_path).diagnostics]
    assert titles == ["a.pt is empty (0 bytes)", "b.pt is empty (0 bytes)"]


def test_an_empty_step_is_named_by_itself_as_in_its_run(tmp_path: Path) -> None:
    step = tmp_path / "run/step-30"
    step.mkdir(parents=True)
    for path in (step, step.parent):
        (finding,) = report_on(path).diagnostics
        assert (finding.code, finding.title) == ("COM001", "the step's folder is empty")
    (year := tmp_path / "2024").mkdir()
    assert report_on(year).exit_code == 3
