"""Which step of a run to trust, where the run changes meanwhile or is full of what is no step."""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path

import pytest
from support import REAL, copy_step

import ckptlint
from ckptlint.lint.report import Report
from ckptlint.lint.steps.trust import JudgedStep, newest_good, newest_passing, runs_at, steps_in
from ckptlint.reporters.full import step_table

GOOD, HOLE = REAL / "edit_base", REAL / "fsdp2_4r_hole"


def judge(path: str) -> Report:
    """All rules, as the command runs them."""
    return ckptlint.check(path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three good steps."""
    for number in (1, 2, 3):
        copy_step(GOOD, tmp_path / f"step-{number}", number)
    return tmp_path


def test_a_step_that_vanishes_while_it_is_judged_is_no_answer(run: Path) -> None:
    def judged(path: str) -> Report:
        report = judge(path)
        if path.endswith("step-3"):
            shutil.rmtree(path)
        return report

    ((place, folder),) = runs_at(str(run))
    search = newest_good(folder, place, judged)
    assert [(step.name, step.verdict) for step in search.skipped] == [("step-3", "gone")]
    assert search.newest is not None and search.newest.name == "step-2"
    assert search.exit_code == 0


@pytest.mark.parametrize("lost", [True, False])
def test_a_run_that_lost_the_tracker_its_trainer_needs_is_told_so(lost: bool, tmp_path: Path) -> None:
    """verl starts over without it (rllm#897), and so does Megatron; a run of other names is resumed by its names."""
    verl, megatron, other = tmp_path / "verl", tmp_path / "megatron", tmp_path / "other"
    shutil.copytree(REAL / "frameworks" / "verl_megatron", verl)
    for number in (1, 2):
        copy_step(GOOD, other / f"global_step_{number}", number)
        shutil.copytree(REAL / "megatron_0.19_tp2", megatron / f"iter_{number:07}")
    if lost:
        (verl / "latest_checkpointed_iteration.txt").unlink()
    else:
        (megatron / "latest_checkpointed_iteration.txt").write_text("2")
    advice = {}
    for run in (verl, megatron, other):
        ((place, folder),) = runs_at(str(run))
        advice[run.name] = newest_good(folder, place, lambda path: ckptlint.check(path, select=["GEO"])).tracker
    text = "no latest_checkpointed_iteration.txt: training starts over; write {} into it to resume from {}"
    said = {"verl": text.format(20, "global_step_20"), "megatron": text.format(2, "iter_0000002")}
    assert advice == {"other": ""} | (said if lost else dict.fromkeys(said, ""))


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("layout", ["verl", "megatron"])
@pytest.mark.parametrize("numbers", [(1, 2), (5, 10, 15), (999, 1000), (10, 400), (0, 7, 1234567)])
def test_what_a_tracker_says_is_compared_with_the_newest_step_that_passes(
    layout: str, numbers: tuple[int, ...], tmp_path: Path
) -> None:
    whole, name = REAL / "frameworks" / "verl_megatron" / "global_step_20", "global_step_{}"
    if layout == "megatron":
        whole, name = REAL / "megatron_0.19_tp2", "iter_{:07}"
    for number in numbers:
        shutil.copytree(whole, tmp_path / name.format(number))
    tracker, newest = tmp_path / "latest_checkpointed_iteration.txt", numbers[-1]
    judge_once = cache(lambda path: ckptlint.check(path, select=["GEO"]))  # no step changes, only what names one

    def advice() -> str:
        ((place, folder),) = runs_at(str(tmp_path))
        return newest_good(folder, place, judge_once).tracker

    resume = f"to resume from {name.format(newest)}"
    assert advice() == f"no {tracker.name}: training starts over; write {newest} into it {resume}"
    for said, named in (
        (str(numbers[0]), f"step {numbers[0]}"),
        (str(newest + 1), f"step {newest + 1}"),
        ("x", "no step"),
    ):
        tracker.write_text(said)
        assert advice() == f"{tracker.name} names {named}: write {newest} into it {resume}"
    for said in (str(newest), f"{newest}\n"):
        tracker.write_text(said)
        assert advice() == ""
    tracker.unlink()
    for number in numbers[:-1]:
        shutil.rmtree(tmp_path / name.format(number))
    assert advice() == ""  # a step that was copied alone


def test_a_tracker_that_names_the_release_needs_no_advice(run: Path) -> None:
    (run / "latest_checkpointed_iteration.txt").write_text("release")
    ((place, folder),) = runs_at(str(run))
    assert newest_good(folder, place, judge).tracker == ""


def test_a_step_that_vanishes_before_it_is_judged_is_no_answer(run: Path) -> None:
    ((place, folder),) = runs_at(str(run))
    folder.folders()  # listed once
    shutil.rmtree(run / "step-3")
    search = newest_good(folder, place, judge)
    assert search.newest is not None and search.newest.name == "step-2"
    assert search.is_certain


def test_a_thousand_steps_and_names_that_are_none(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptlint.lint.steps.trust._FEW", 1 << 20)  # what is asked is seen in this process alone
    for number in range(10, 1010):
        (run / f"step-{number}").mkdir()
    for name in ("step-", "step-x", "checkpoint", "latest", "step-1e9", "99"):
        (run / name).mkdir()
    asked: list[str] = []

    def judged(path: str) -> Report:
        asked.append(path)
        return judge(path)

    ((place, folder),) = runs_at(str(run))
    search = newest_good(folder, place, judged)
    assert search.newest is not None and search.newest.name == "step-3"
    assert asked == [f"{run}/step-3"]  # an empty folder is no finished save, and is not judged
    assert len(search.skipped) == 1000


def test_steps_that_are_judged_in_other_processes_are_found_and_kept(tmp_path: Path) -> None:
    for number in range(1, 21):
        copy_step(GOOD, tmp_path / f"step-{number}", number)
        if number > 3:
            os.truncate(tmp_path / f"step-{number}" / "__1_0.distcp", 500)
    search = ckptlint.latest(tmp_path)
    assert search.path == f"{tmp_path}/step-3" and len(search.skipped) == 17
    assert {step.code for step in search.skipped} == {"PAY004"}
    assert [Path(path).name for path in ckptlint.deletable(tmp_path, 1).paths] == ["step-2", "step-1"]


def test_a_step_that_changes_while_it_is_judged_is_no_answer(run: Path) -> None:
    def judged(path: str) -> Report:
        report = judge(path)
        if path.endswith("step-3"):
            (Path(path) / "late.bin").write_bytes(b"late")
        return report

    ((place, folder),) = runs_at(str(run))
    search = newest_good(folder, place, judged)
    assert search.newest is not None and search.newest.name == "step-2"
    assert search.path is None, "the newer one is not judged"
    assert [step.why for step in search.skipped] == ["it changed while ckptlint judged it: run ckptlint again"]
    assert newest_good(folder, place, judge).path == f"{run}/step-3"


def test_numbers_beyond_64_bits_are_numbers(run: Path) -> None:
    shutil.copytree(GOOD, run / f"step-{10**30}")
    ((place, folder),) = runs_at(str(run))
    found = newest_good(folder, place, judge).newest
    assert found is not None and found.number == 10**30


def test_a_report_of_one_step_has_no_table(run: Path) -> None:
    assert steps_in(ckptlint.check(run)) == []
    shutil.copytree(HOLE, run / "step-4")
    told = steps_in(ckptlint.check(run, all_steps=True))
    assert [(step.name, step.verdict, step.code) for step in told] == [
        ("step-4", "fails", "GEO004"),
        ("step-3", "passes", ""),
        ("step-2", "passes", ""),
        ("step-1", "passes", ""),
    ]


def test_steps_of_several_runs_are_named_with_their_run(run: Path) -> None:
    for name in ("a", "b/checkpoints-of-a-run-with-a-very-long-name"):
        copy_step(GOOD, run / "runs" / name / "step-1", 4)
    lines = step_table(steps_in(ckptlint.check(run / "runs")), 80).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["a/step-1", "b/checkpoints...-long-name/step-1"]
    assert max(map(len, lines)) <= 80


def test_a_run_that_is_named_by_a_dot_has_one_name(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "step-4").mkdir()
    monkeypatch.chdir(run)
    every = steps_in(ckptlint.check(".", all_steps=True))
    assert [step.path for step in every] == ["step-4", "step-3", "step-2", "step-1"]


def test_an_unfinished_step_has_its_size_in_each_view(run: Path) -> None:
    (run / "step-3" / ".metadata").unlink()
    size = sum(path.stat().st_size for path in (run / "step-3").glob("*.distcp"))
    every = steps_in(ckptlint.check(run, all_steps=True))
    assert (every[0].verdict, every[0].code, every[0].size) == ("unfinished", "COM001", size)
    for rows in (ckptlint.latest(run).rows(), ckptlint.deletable(run, keep=1).rows()):
        assert (rows[0]["step"], rows[0]["verdict"], rows[0]["bytes"]) == ("step-3", "unfinished", size)


def test_the_newest_step_that_passes_is_told_for_each_run() -> None:
    verdicts = {
        "a/9": "fails", "a/8": "passes", "a/7": "passes", "a/6": "lacks parts", "b/2": "passes", "c/1": "unfinished",
    }  # fmt: skip
    steps = [JudgedStep(int(path[2:]), path[2:], path, verdict) for path, verdict in verdicts.items()]
    newest = newest_passing(steps)
    assert {run: step and step.path for run, step in newest.items()} == {"a": "a/8", "b": "b/2", "c": None}


def test_one_step_that_cannot_be_read_spoils_no_other(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptlint.errors import AccessError
    from ckptlint.lint import run as pipeline

    opened = pipeline.open_checkpoint

    def refused(folder: object, *how: bool) -> object:
        if str(getattr(folder, "display", "")).endswith("step-2"):
            raise AccessError("step-2 cannot be listed: Permission denied")
        return opened(folder, *how)  # type: ignore[arg-type]

    monkeypatch.setattr(pipeline, "open_checkpoint", refused)
    report = ckptlint.check(run, all_steps=True)
    assert report.unreadable == ("step-2 cannot be listed: Permission denied",)
    assert len(report.checkpoints) == 2
    assert report.exit_code == 4


def test_what_all_older_steps_have_is_missed(run: Path) -> None:
    for number in (1, 2, 3):
        (run / f"step-{number}" / "STABLE").touch()
        (run / f"step-{number}" / f"train_state_{number}.json").write_text("{}")
    ((place, folder),) = runs_at(str(run))
    assert newest_good(folder, place, judge).newest.name == "step-3"  # type: ignore[union-attr]
    (run / "step-3" / "STABLE").unlink()
    ((place, folder),) = runs_at(str(run))
    search = newest_good(folder, place, judge)
    assert [(step.name, step.why) for step in search.skipped] == [
        ("step-3", "the step has no STABLE, which all older steps have")
    ]
