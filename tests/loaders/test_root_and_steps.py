"""A model in a run's root beside steps: both are judged, and a link to a step is that step."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import support
import torch
from safetensors.torch import save_file
from support import codes

import ckptlint
from ckptlint.lint.steps.trust import steps_in


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What a Trainer leaves: a model in the root, and three steps."""
    for folder in (tmp_path, *(tmp_path / f"checkpoint-{number}" for number in (4, 8, 12))):
        folder.mkdir(exist_ok=True)
        # random, so that no step is a copy of another
        save_file({"w.weight": torch.randn(16, 8)}, folder / "model.safetensors")
    return tmp_path


def places(report: ckptlint.Report) -> list[str]:
    return sorted(Path(part.checkpoint.path).name for part in report.checkpoints)


def test_the_root_and_the_newest_step_are_judged(run: Path) -> None:
    report = ckptlint.check(run)
    assert places(report) == sorted([run.name, "checkpoint-12"]) and not codes(report, "error", "warning")
    notes = " ".join(note for part in report.checkpoints for note in part.checkpoint.not_looked_at)
    assert "whether 2 other steps pass: checkpoint-8" in notes
    os.truncate(run / "checkpoint-12" / "model.safetensors", 300)
    assert codes(ckptlint.check(run), "error")


def test_older_steps_are_judged_where_all_are_asked_for(run: Path) -> None:
    os.truncate(run / "checkpoint-4" / "model.safetensors", 300)
    assert not codes(ckptlint.check(run), "error")
    assert codes(ckptlint.check(run, all_steps=True), "error")


def test_a_cut_file_beside_the_steps_is_a_fault_of_the_run(tmp_path: Path) -> None:
    """It is told, and the steps pass: the table, `latest` and `deletable` say the same."""
    for number in (190, 200):
        shutil.copytree(support.REAL / "numbers" / f"step-{number}", tmp_path / f"step-{number}")
    torch.save({"model": {"w": torch.randn(64, 64)}}, tmp_path / "final.pt")
    assert not codes(ckptlint.check(tmp_path), "error", "warning")
    os.truncate(tmp_path / "final.pt", 9000)
    report = ckptlint.check(tmp_path, all_steps=True)
    assert [title for _, _, title in support.found(report, "error", "warning")] == [
        "../final.pt is cut short: 8.8 KiB are there, the end of its archive is not"
    ]
    assert report.exit_code == 1 and {step.verdict for step in steps_in(report)} == {"passes"}
    assert (ckptlint.latest(tmp_path).path or "").endswith("step-200")
    shutil.move(tmp_path / "final.pt", tmp_path / "step-200")
    assert [step.verdict for step in steps_in(ckptlint.check(tmp_path, all_steps=True))] == ["fails", "passes"]


def test_a_link_to_a_step_is_that_step(run: Path) -> None:
    """It is not judged twice, and naming it is naming the step."""
    (run / "latest.good").symlink_to("checkpoint-12")
    assert places(ckptlint.check(run)) == sorted([run.name, "checkpoint-12"])
    assert len(ckptlint.check(run, all_steps=True).checkpoints) == 4
    assert places(ckptlint.check(run / "latest.good")) == ["checkpoint-12"]
    os.truncate(run / "checkpoint-12" / "model.safetensors", 300)
    assert codes(ckptlint.check(run / "latest.good")) == codes(ckptlint.check(run / "checkpoint-12"))


def test_the_folder_of_a_step_of_colossalai_is_one_step(tmp_path: Path) -> None:
    """Its parts are no runs of their own, and `latest` answers the step."""
    for number in (30, 60):
        step = tmp_path / f"epoch-0_step-{number}"
        for name in ("modeling", "optimizer"):
            (step / name).mkdir(parents=True)
        save_file({"w.weight": torch.randn(16, 8)}, step / "modeling" / "model.safetensors")
        torch.save({"state": {0: {"exp_avg": torch.randn(16, 8)}}}, step / "optimizer" / "pytorch_optim.bin")
        torch.save({"last_epoch": number}, step / "lr_scheduler")
    assert {part.checkpoint.step[1] for part in ckptlint.check(tmp_path).checkpoints if part.checkpoint.step} == {60}
    answer = support.run("latest", "--isolated", tmp_path)
    assert answer.stdout == f"{tmp_path}/epoch-0_step-60\n", answer.stderr
