"""Which steps of a run may be deleted: whatever a run went through, enough whole steps and all that is named stay."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import simulated_runs
import support
import torch
from safetensors.torch import save_file
from support import REAL, copy_step, examples

import ckptlint
from ckptlint.lint.report import Report
from ckptlint.lint.settings import request
from ckptlint.lint.steps.retention import deletable

GOOD = REAL / "edit_base"


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("layout", simulated_runs.LAYOUTS)
def test_enough_whole_steps_stay_whatever_a_run_went_through(tmp_path: Path, layout: str) -> None:
    deleted = 0
    for seed in range(examples(4, 40)):
        dice = Random(f"{layout} {seed}")
        folder = tmp_path / str(seed)
        folder.mkdir()
        made = simulated_runs.simulated(folder, dice, simulated_runs.LAYOUTS[layout])
        found, wrong = simulated_runs.retained(made, dice.randint(1, 3))
        assert wrong == [], (seed, found.rows())
        deleted += len(found.paths)
    assert deleted


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("layout", simulated_runs.LAYOUTS)
def test_nothing_whole_is_lost_where_somebody_changes_the_run(tmp_path: Path, layout: str) -> None:
    for seed in range(examples(3, 20)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        made = simulated_runs.simulated(folder, Random(f"{layout} {seed}"), simulated_runs.LAYOUTS[layout])
        found, wrong = simulated_runs.retained(made, made.dice.randint(1, 3), is_hostile=True)
        assert wrong == [], (seed, found.refused, found.rows())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Five whole steps, written one after the other."""
    for number in range(1, 6):
        saved(tmp_path / f"step-{number}", number)
    return tmp_path


def saved(place: Path, number: int, time: int | None = None) -> None:
    """A whole step of a time that its number gives, or another."""
    copy_step(GOOD, place, number)
    for path in place.iterdir():
        os.utime(path, (time or 1.7e9 + number,) * 2)


def test_the_table_of_steps_fits_in_80_columns(run: Path) -> None:
    """A step that does not pass has a reason of any length."""
    (run / "step-5" / "__0_0.distcp").unlink()
    (run / "step-5" / "__1_0.distcp").write_bytes(b"short")
    table = support.run("deletable", str(run), "--keep", "1").stderr.splitlines()
    assert "no: error PAY003" in table[2]
    assert max(map(len, table)) <= 80


def names(run: Path, keep: int = 1) -> list[str]:
    """The steps that may go."""
    return [Path(path).name for path in ckptlint.deletable(run, keep).paths]


def why(run: Path, keep: int = 1) -> dict[str, str]:
    """Name of a step -> why it stays."""
    return {row["step"]: row["stays"] for row in ckptlint.deletable(run, keep).rows()}


def test_the_newest_whole_steps_stay_and_every_newer_one(run: Path) -> None:
    (run / "step-5" / ".metadata").unlink()
    assert names(run) == ["step-3", "step-2", "step-1"]
    assert names(run, 3) == ["step-1"]
    assert why(run, 3) == {
        "step-5": "newer than step-2",
        "step-4": "one of the 3 newest whole steps",
        "step-3": "one of the 3 newest whole steps",
        "step-2": "one of the 3 newest whole steps",
        "step-1": "",
    }
    too_few = ckptlint.deletable(run, 5)
    assert (too_few.paths, too_few.exit_code) == ((), 1)
    assert repr(too_few) == f"<Retention {run}: 5 whole steps must stay; this run has 4>"


LENIENT = {
    "exit-zero": "exit-zero = true",
    "never": 'fail-on = "never"',
    "severity": 'severity = { PAY = "info", RUN = "info" }',
    "ignore": 'ignore = ["PAY", "RUN"]',
    "select": 'select = ["GEO"]',
    "keys": '[per-key-ignores."*"]\nrules = ["PAY", "RUN"]\nreason = "known"',
    "baseline": 'baseline = "known.json"',
}


@pytest.fixture(scope="module")
def torn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two whole steps, a newest one with a file that is cut, and a report of what is wrong."""
    run = tmp_path_factory.mktemp("torn") / "run"
    for number in (1, 2, 3):
        saved(run / f"step-{number}", number)
    os.truncate(run / "step-3" / "__1_0.distcp", 500)
    report = support.run("check", "--isolated", run, "--format", "json").stdout
    (run.parent / "known.json").write_text(report)
    return run


@pytest.mark.parametrize("way", LENIENT)
def test_settings_never_make_a_torn_step_whole(way: str, torn: Path) -> None:
    """`latest`, whose user may leave a rule out, is not moved by a severity or by what fails a run either."""
    settings = torn.parent / "ckptlint.toml"
    settings.write_text(LENIENT[way])
    assert support.run("check", torn, cwd=torn.parent).returncode == 0, "the settings work"
    assert ckptlint.deletable(torn, 1, config=settings).paths == (f"{torn}/step-1",)
    if way in ("exit-zero", "severity"):
        assert support.run("deletable", torn, "--keep", "1", cwd=torn.parent).stdout == f"{torn}/step-1\n"
        assert ckptlint.latest(torn, config=settings).path == f"{torn}/step-2"


def test_options_and_environment_make_it_stricter_only(run: Path) -> None:
    os.truncate(run / "step-5" / "__1_0.distcp", 500)
    left = "".join(f"{run}/step-{number}\n" for number in (3, 2, 1))
    for options in (["--depth", "metadata"], ["--fail-on", "never"], ["--severity", "PAY004=info"], []):
        assert support.run("deletable", run, "--keep", "1", *options, env={"CKPTLINT_EXIT_ZERO": "1"}).stdout == left
    assert [*ckptlint.deletable(run, 1, "metadata", "never").paths] == left.split()
    for option in ("--exit-zero", "--ignore=PAY", "--select=GEO", "--baseline=known.json", "--no-ignores"):
        answer = support.run("deletable", run, "--keep", "1", option)
        assert (answer.returncode, answer.stdout) == (2, "") and "No such option" in answer.stderr
    odd = run / "odd"
    for number in (1, 2):
        copy_step(REAL / "boundary_mismatch", odd / f"step-{number}", number)
    assert [len(ckptlint.deletable(odd, 1, fail_on=level).paths) for level in (None, "error", "warning")] == [0, 0, 0]


POINTERS: dict[str, Callable[[Path], object]] = {
    "a tracker": lambda run: (run / "latest").write_text("step-2"),
    "a second tracker": lambda run: [
        (run / "latest_checkpointed_iteration.txt").write_text("5"),
        (run / "dlrover_latest.txt").write_text("2"),
    ],
    "a link": lambda run: (run / "best").symlink_to("step-2"),
    "a link that was true elsewhere": lambda run: (run / "best").symlink_to("/old/place/step-2"),
    "a link over links": lambda run: [
        (run / "inner").mkdir(),
        (run / "inner" / "a").symlink_to("../step-2"),
        (run / "best").symlink_to("inner/a"),
    ],
    "a link in a step that stays": lambda run: (run / "step-5" / "x").symlink_to("../step-2/__0_0.distcp"),
    "a link in another folder": lambda run: [(run / "e").mkdir(), (run / "e" / "x").symlink_to("../step-2/.metadata")],
    "the best": lambda run: (run / "step-5" / "trainer_state.json").write_text(
        json.dumps({"best_model_checkpoint": "/gone/step-2"})
    ),
    "the best of the run": lambda run: (run / "trainer_state.json").write_text(
        json.dumps({"best_model_checkpoint": "out/step-2/"})
    ),
    "the best of a step that a link names": lambda run: [
        (run / "step-3" / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": "step-2"})),
        (run / "step-4" / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": "step-3"})),
        (run / "step-5" / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": "step-4"})),
    ],
}


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("point", POINTERS.values(), ids=POINTERS)
def test_what_something_names_stays(run: Path, point: Callable[[Path], object]) -> None:
    assert "step-2" in names(run)
    point(run)
    assert "step-2" not in names(run)
    assert "step-1" in names(run)


@pytest.mark.parametrize(("tracker", "text"), [("latest_checkpointed_iteration.txt", ""), ("latest", "global_st")])
def test_a_tracker_that_names_no_step_keeps_all(run: Path, tracker: str, text: str) -> None:
    (run / tracker).write_text(text)
    found = ckptlint.deletable(run, 1)
    assert (found.paths, found.exit_code) == ((), 4)
    assert tracker in found.refused


def test_an_older_run_in_the_same_folder_takes_no_new_step(run: Path) -> None:
    saved(run / "step-1000", 1000, 1_600_000_000)
    saved(run / "step-900", 900, 1_600_000_000 - 100)
    assert names(run) == ["step-900"]
    assert why(run)["step-5"] == "it was written after step-1000: perhaps two runs lie here"


def test_only_steps_that_are_named_alike_are_counted_and_deleted(run: Path) -> None:
    for number in (1, 2, 3):
        saved(run / f"checkpoint-{number}", number)
    assert names(run) == ["step-4", "step-3", "step-2", "step-1"]
    assert why(run)["checkpoint-3"] == "not named like step-5"


def test_what_could_not_be_judged_or_printed_stays_and_so_does_a_link(run: Path) -> None:
    shutil.rmtree(run / "step-1")
    (run / "step-1").mkdir()
    (run / "step-1" / "metadata.pkl").write_bytes(b"x")  # a format that is not read
    shutil.move(run / "step-2", run / "disk")
    (run / "step-2").symlink_to("disk")
    saved(run / "line\nstep-3", 3)
    told = why(run)
    assert (told["step-1"], told["step-2"]) == ("it could not be judged", "it is a link")
    assert names(run) == ["step-4", "step-3"]


def test_a_folder_of_runs_that_is_named_like_a_step_stays(run: Path) -> None:
    for number in (10, 20):
        saved(run / "step-2" / "other" / f"checkpoint-{number}", number)
    assert why(run)["step-2"] == "it holds steps of its own"


def test_two_torn_saves_in_a_row_are_not_taken_for_whole(tmp_path: Path) -> None:
    for number in (10, 20, 30, 40):
        (tmp_path / f"checkpoint-{number}").mkdir()
        for name, data in simulated_runs.LAYOUTS["trainer"].files(number).items():
            if number < 30 or name in ("model.safetensors", "optimizer.pt"):
                (tmp_path / f"checkpoint-{number}" / name).write_bytes(data)
    assert names(tmp_path) == ["checkpoint-10"]
    assert why(tmp_path)["checkpoint-40"] == "newer than checkpoint-20"


def test_a_copy_of_the_step_before_is_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "CHEAP_BYTES", 1)  # numbers are drawn from the steps that stay
    for number, values in ((30, 30), (60, 60), (90, 90), (120, 90)):
        copy_step(REAL / "fsdp2_4r", tmp_path / f"step-{number}", values)
    assert names(tmp_path) == ["step-60", "step-30"]
    (copy, *_) = ckptlint.deletable(tmp_path, 1).rows()
    assert copy["why"] == "warning RUN005 all weights and all moments are bit-identical to step-90"


def test_files_are_steps_too_and_the_last_one_stays(tmp_path: Path) -> None:
    for number in (2, 4, 6):
        state = {"state_dict": {"w": torch.ones(80) * number}, "global_step": number}
        torch.save(state, tmp_path / f"epoch=0-step={number}.ckpt")
    shutil.copy(tmp_path / "epoch=0-step=6.ckpt", tmp_path / "last.ckpt")
    assert names(tmp_path) == ["epoch=0-step=4.ckpt", "epoch=0-step=2.ckpt"]


@pytest.mark.parametrize("change", ["gone", "gone before it is judged", "damaged", "tracker"])
def test_a_run_that_changes_meanwhile_loses_nothing(run: Path, change: str) -> None:
    def judge(path: str) -> Report:
        if path.endswith("step-5") and change == "gone before it is judged":  # it may have named the best step
            shutil.rmtree(path)
        report = ckptlint.check(path)
        if path.endswith("step-1") and change == "gone":
            shutil.rmtree(run / "step-5")
        elif path.endswith("step-1") and change == "damaged":
            os.truncate(run / "step-5" / "__0_0.distcp", 10)
        elif path.endswith("step-1") and change == "tracker":
            (run / "latest").write_text("step-3")
        return report

    found = deletable(str(run), 1, judge)
    assert (found.paths, found.exit_code) == ((), 4)
    assert "run ckptlint again" in found.refused


def test_the_command_prints_paths_and_a_shell_deletes_them(run: Path) -> None:
    (run / "best").symlink_to("step-2")
    answer = support.run("deletable", "--isolated", run, "--keep", "2")
    assert (answer.returncode, answer.stdout) == (0, f"{run}/step-3\n{run}/step-1\n")
    assert "the link best leads there" in answer.stderr
    document = json.loads(support.run("deletable", "--isolated", run, "--keep", "2", "--format", "json").stdout)
    assert (document["schema"], document["delete"]) == (
        "ckptlint.deletable/1",
        [f"{run}/step-3", f"{run}/step-1"],
    )
    command = f"{sys.executable} -m ckptlint deletable . --keep 2 | xargs -d '\\n' -r rm -r --"
    for _ in range(2):  # the second time there is nothing to delete
        done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=run, check=False, capture_output=True)
        assert done.returncode == 0, done.stderr
        assert sorted(path.name for path in run.iterdir()) == ["best", "step-2", "step-4", "step-5"]


def test_exit_codes(tmp_path: Path, run: Path) -> None:
    def ended(path: Path, keep: str) -> tuple[int, str]:
        answer = support.run("deletable", "--isolated", path, "--keep", keep)
        return answer.returncode, answer.stdout

    assert ended(run, "9") == (1, "")
    assert ended(run, "0") == (2, "")
    assert ended(run / "absent", "1") == (3, "")
    for name in "ab":
        shutil.copytree(run / "step-1", tmp_path / "both" / name / "step-1")
    assert ended(tmp_path / "both", "1") == (4, "")
    with pytest.raises(ckptlint.ConfigError):
        ckptlint.deletable(run, 0)


SMALLER: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "one tensor": lambda state: dict([*state.items()][:1]),
    "half of the keys": lambda state: dict([*state.items()][::2]),
    "another model": lambda state: {f"other.{key}": value for key, value in state.items()},
    "without elements": lambda state: {key: value[:0] for key, value in state.items()},
}


@pytest.mark.parametrize("change", SMALLER.values(), ids=SMALLER)
def test_a_newer_step_that_holds_less_is_not_whole(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    for number in range(1, 5):
        step = tmp_path / f"checkpoint-{number}"
        step.mkdir()
        state = {f"layers.{layer}.weight": torch.randn(8, 8) for layer in range(4)}
        save_file(state if number < 3 else change(state), step / "model.safetensors")
    assert names(tmp_path) == ["checkpoint-1"]


def test_a_step_inside_an_old_one_stays_and_that_of_its_engine_goes(run: Path) -> None:
    saved(run / "step-1" / "step-99", 99)
    saved(run / "step-2" / "some" / "where" / "checkpoint-7", 7)
    (run / "step-3" / "global_step3").mkdir()
    os.utime(run / "step-3" / "global_step3", (1.7e9, 1.7e9))
    assert names(run) == ["step-4", "step-3"]
    assert why(run)["step-2"] == "it holds steps of its own"


ODD_TRACKERS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a link that leads nowhere": lambda path: path.symlink_to("/nowhere/else"),
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("make", ODD_TRACKERS.values(), ids=ODD_TRACKERS)
@pytest.mark.parametrize("tracker", ["latest", "latest_checkpointed_iteration.txt"])
def test_a_tracker_that_cannot_be_read_keeps_all(run: Path, tracker: str, make: Callable[[Path], object]) -> None:
    make(run / tracker)
    found = ckptlint.deletable(run, 1)
    assert (found.paths, found.exit_code) == ((), 4)
    assert tracker in found.refused


@pytest.mark.parametrize("newest", [True, False])
def test_a_link_is_a_tracker_too(run: Path, newest: bool) -> None:
    (run / "latest").symlink_to("step-5" if newest else "step-2")
    assert names(run) == ["step-4", "step-3", *(["step-2"] if newest else []), "step-1"]


def test_links_are_found_at_any_depth_and_what_is_too_deep_is_a_doubt(run: Path) -> None:
    deep = run.joinpath("step-5", *"abcdefghij")
    deep.mkdir(parents=True)
    (deep / "x").symlink_to(run / "step-2")
    assert names(run) == ["step-4", "step-3", "step-1"]
    run.joinpath("step-5", *"abcdefghij" * 4).mkdir(parents=True)
    found = ckptlint.deletable(run, 1)
    assert (found.paths, found.exit_code) == ((), 4) and "levels of folders" in found.refused


def test_a_link_to_itself_is_a_broken_one(run: Path) -> None:
    (run / "step-5" / "__0_0.distcp").unlink()
    (run / "step-5" / "__0_0.distcp").symlink_to("__0_0.distcp")
    assert names(run) == ["step-3", "step-2", "step-1"]
    assert "no: error PAY003 __0_0.distcp" in support.run("deletable", run, "--keep", "1").stderr


@pytest.mark.parametrize("change", ["same size", "same size and time", "link", "link in a whole step"])
def test_what_changes_and_looks_the_same_is_seen(run: Path, change: str) -> None:
    def judge(path: str) -> Report:
        report = ckptlint.check(path)
        newest = run / "step-5" / "__0_0.distcp"
        if path.endswith("step-1") and change.startswith("same size"):
            before = newest.stat()
            newest.write_bytes(bytes(before.st_size))
            if change.endswith("time"):
                os.utime(newest, ns=(before.st_atime_ns, before.st_mtime_ns))
        elif path.endswith("step-1"):
            (run / ("best" if change == "link" else "step-5/best")).symlink_to(run / "step-2")
        return report

    found = deletable(str(run), 1, judge)
    assert (found.paths, found.exit_code) == ((), 4)
    assert "run ckptlint again" in found.refused
