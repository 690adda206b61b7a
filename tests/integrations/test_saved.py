"""The check of one save, without a trainer: verdicts, `latest.good`, and checks that cannot run."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
from support import REPOSITORY, run, swept

from ckptlint.errors import CheckpointError, ConfigError
from ckptlint.integrations import check_saved
from ckptlint.integrations.saved import _SETTLE, GOOD, stops_alone

REAL = REPOSITORY / "fixtures" / "real"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A run with a healthy step and a newer one with a hole."""
    shutil.copytree(REAL / "fsdp2_4r", tmp_path / "step-10")
    shutil.copytree(REAL / "fsdp2_4r_hole", tmp_path / "step-20")
    return tmp_path


def test_only_a_step_that_passes_becomes_the_good_one(job: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert check_saved(job / "step-10").verdict == "pass"
    assert caplog.messages == [] and str((job / GOOD).readlink()) == "step-10"
    assert run("check", job / GOOD).returncode == 0
    saved = check_saved(job / "step-20")
    assert saved.verdict == "fail" and str((job / GOOD).readlink()) == "step-10"
    assert caplog.messages == [saved.text] and caplog.records[0].levelno == logging.WARNING
    assert "step-20 did not pass" in saved.text and "GEO004: rows 6-8 are missing" in saved.text
    assert "model.layers.0.feed_forward.w1.weight" in saved.text and "What to do: " in saved.text


def test_the_line_says_what_the_check_cost(job: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ckptlint"):
        saved = [check_saved(job / name) for name in ("step-10", "step-20", "step-30")]
    lines = [message.splitlines()[0] for message in caplog.messages]
    heads = ("step-10 passes", "step-20 did not pass: 2 problems", "step-30 could not be judged: .+ does not exist")
    for line, check, head in zip(lines, saved, heads, strict=True):
        assert re.fullmatch(rf"ckptlint: {head} \({check.seconds:.1f} s\)", line) and check.seconds > 0.05


def test_raise_is_for_whatever_is_no_pass(job: Path) -> None:
    with pytest.raises(CheckpointError, match="GEO004"):
        check_saved(job / "step-20", on_fault="raise")
    with pytest.raises(CheckpointError, match="step-30 does not exist"):
        check_saved(job / "step-30", on_fault="raise")
    with pytest.raises(ConfigError, match="use one of warn, raise"):
        check_saved(job / "step-10", on_fault="rise")  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["killed", "slow", "no python", "wrong depth"])
def test_a_check_that_cannot_run_fails_no_job(
    what: str, job: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The interpreter of the job is replaced by one that dies or hangs before it reads anything."""
    broken = job.parent / f"{job.name}-python"
    broken.write_text("#!/bin/sh\n" + {"killed": "kill -9 $$", "slow": "sleep 60"}.get(what, ""))
    broken.chmod(0o755)
    if what != "wrong depth":
        monkeypatch.setattr(sys, "executable", str(job / "none") if what == "no python" else str(broken))
    said = {"killed": "signal 9", "slow": "did not end in time", "no python": "No such file", "wrong depth": "'deep'"}
    saved = check_saved(job / "step-10", depth="deep" if what == "wrong depth" else "files", timeout=2)
    assert saved.verdict == "incomplete" and not (job / GOOD).is_symlink()
    assert caplog.messages == [saved.text] and "could not check step-10" in saved.text and said[what] in saved.text
    with pytest.raises(CheckpointError, match="could not check step-10"):
        check_saved(job / "step-10", depth="deep", timeout=2, on_fault="raise")


def test_the_child_knows_nothing_of_the_job(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    seen = job.parent / f"{job.name}-environment"
    python = job.parent / f"{job.name}-python"
    python.write_text(f'#!/bin/sh\nenv > "{seen}"; nice >> "{seen}"; exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert check_saved(job / "step-10").verdict == "pass"
    lines = seen.read_text().splitlines()
    assert not [line for line in lines if line.startswith(("RANK=", "WORLD_SIZE=", "MASTER_"))]
    assert "CUDA_VISIBLE_DEVICES=" in lines


def test_a_text_file_stands_in_for_a_link(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("this file system has no links")

    (job / "kept").write_text("kept")
    (job / f".{GOOD}.{os.getpid()}").symlink_to("kept")
    monkeypatch.setattr(Path, "symlink_to", refuse)
    check_saved(job / "step-10")
    assert (job / "kept").read_text() == "kept"
    assert (job / GOOD).read_text() == "step-10\n"


def test_a_good_mark_that_cannot_be_written_fails_no_job(job: Path, caplog: pytest.LogCaptureFixture) -> None:
    (job / GOOD).mkdir()
    assert check_saved(job / "step-10", on_fault="raise").verdict == "pass"
    assert "latest.good could not be written" in caplog.text
    assert sorted(path.name for path in job.iterdir()) == [GOOD, "step-10", "step-20"]


@pytest.mark.parametrize("kind", ["link", *swept("text", "link that leads nowhere")])
def test_the_good_mark_changes_no_answer_about_the_run(kind: str, job: Path) -> None:
    shutil.copytree(REAL / "fsdp2_4r", job / "step-5")
    asked = [
        ("check", job),
        ("check", job, "--all-steps"),
        ("latest", job),
        ("watch", job, "--once", "--interval", "0.2"),
    ]
    before = [run(*command) for command in asked]
    if kind == "text":
        (job / GOOD).write_text("step-10\n")
    else:
        (job / GOOD).symlink_to("step-10" if kind == "link" else "step-1")
    for command, old in zip(asked, before, strict=True):
        new = run(*command)
        assert (new.returncode, _timeless(new.stdout)) == (old.returncode, _timeless(old.stdout)), command


def _timeless(text: str) -> str:
    return re.sub(r"\d+(\.\d+)? s\b|\d\d:\d\d:\d\d", "", text)


def test_a_file_that_another_rank_writes_late_is_no_fault(
    job: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    late = job / "step-10" / "__1_0.distcp"
    kept = late.rename(job / "late")
    assert check_saved(job / "step-10").verdict == "fail", "alone, nobody else writes"
    caplog.clear()
    monkeypatch.setenv("WORLD_SIZE", "2")
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: kept.rename(late) if seconds == _SETTLE else sleep(seconds))
    assert check_saved(job / "step-10").verdict == "pass" and caplog.messages == []


def test_one_rank_of_several_does_not_stop_alone() -> None:
    stops_alone(1)
    with pytest.raises(ConfigError, match="needs a job of one rank"):
        stops_alone(2)
