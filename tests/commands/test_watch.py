"""`ckptlint watch` on a run folder that grows meanwhile: torch writes the steps, some of them are never finished."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import REAL, REPOSITORY, run, takes_ctrl_c

from ckptlint.errors import NothingToCheckError
from ckptlint.loaders.events import events, is_vanishing
from ckptlint.loaders.run.steps import run_at
from ckptlint.testing import write_checkpoint

GOOD = {"tensors": {"w": {"shape": [4, 4]}}}
HOLE = {"tensors": {"w": {"shape": [4, 4], "chunks": ["0:2, :"]}}}


def no_sleep(_: float) -> None:
    """Time that passes at once."""


def look(path: Path, *changes: Callable[[], Any]) -> list[tuple[str, str]]:
    """What a watch tells while the changes happen, one between two looks."""
    pending = iter(changes)

    class EndedError(Exception):
        """Nothing is left to change."""

    def sleep(_: float) -> None:
        change = next(pending, None)
        if change is None:
            raise EndedError
        change()

    found = []
    try:
        for event in events(partial(run_at, str(path)), 1, sleep=sleep):
            found.append((event.kind, event.step))
    except EndedError:
        pass
    return found


def nothing() -> None:
    """No change."""


def save(folder: Path, case: dict[str, Any] = GOOD) -> Callable[[], None]:
    return lambda: write_checkpoint(case, folder)


# ---------------------------------------------------------------- which step is finished


@pytest.mark.parametrize("name", ["checkpoint_{}.pt", "epoch=0-step={}.ckpt"])
def test_a_step_may_be_one_file(tmp_path: Path, name: str) -> None:
    torch = pytest.importorskip("torch")
    for step in (10, 20):
        state = {"state_dict": {"w": torch.arange(99.0) + step}, "global_step": step}
        torch.save(state, tmp_path / name.format(step))
    done = run("watch", tmp_path, "--once", "--interval", "0")
    assert done.returncode == 0
    assert [f"{name.format(step)} is finished and passes" in done.stderr for step in (10, 20)] == [True, True]
    newest = tmp_path / name.format(20)
    os.truncate(newest, newest.stat().st_size // 2)
    assert run("watch", tmp_path, "--once", "--interval", "0").returncode == 1


def test_a_step_is_told_once_when_its_files_hold_still(tmp_path: Path) -> None:
    step = tmp_path / "step-1"
    assert look(tmp_path, save(step)) == []
    assert look(tmp_path, save(step), nothing) == [("finished", "step-1")]
    assert look(tmp_path, nothing, nothing, nothing) == [("finished", "step-1")]


def test_a_step_that_still_grows_or_has_no_metadata_is_not_finished(tmp_path: Path) -> None:
    step = tmp_path / "step-1"
    save(step)()
    payload = step / "__0_0.distcp"

    def grow() -> None:
        with payload.open("ab") as file:
            file.write(b"more")

    assert look(tmp_path, grow, grow, grow) == []
    (step / ".metadata").unlink()
    assert look(tmp_path, nothing, nothing) == []
    (step / ".metadata").write_bytes(b"")
    assert look(tmp_path, nothing, nothing) == []


def test_steps_come_oldest_first_and_one_left_behind_is_told(tmp_path: Path) -> None:
    save(tmp_path / "step-9")()
    save(tmp_path / "step-10")()
    save(tmp_path / "step-100")()
    (tmp_path / "step-10" / ".metadata").unlink()
    told = [("finished", "step-9"), ("unfinished", "step-10"), ("finished", "step-100")]
    assert look(tmp_path, nothing, nothing) == told
    shutil.copy(tmp_path / "step-9" / ".metadata", tmp_path / "step-10")
    assert look(tmp_path, nothing, nothing)[1] == ("finished", "step-10")


def test_the_newest_unfinished_step_is_not_told(tmp_path: Path) -> None:
    save(tmp_path / "step-1")()
    save(tmp_path / "step-2")()
    (tmp_path / "step-2" / ".metadata").unlink()
    (tmp_path / "step-3").mkdir()
    assert look(tmp_path, nothing, nothing) == [("finished", "step-1")]


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_a_step_that_is_a_link_out_of_the_run_is_told_once_and_not_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "run" / "step-1")()
    (tmp_path / "run" / "step-1" / "model").symlink_to("/")
    (tmp_path / "run" / "step-2").symlink_to("/")
    save(tmp_path / "disk" / "weights")()
    (tmp_path / "run" / "step-3").symlink_to(tmp_path / "disk" / "weights")
    listed: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path=".": listed.append(str(path)) or scandir(path))
    told = look(tmp_path / "run", nothing, nothing)
    assert told == [("unread", "step-2"), ("finished", "step-1"), ("finished", "step-3")]
    assert not [path for path in listed if path == "/" or path.endswith(("step-2", "model"))]


def test_megatron_needs_metadata_json_and_the_tracker(tmp_path: Path) -> None:
    step = Path(shutil.copytree(REAL / "megatron_0.10" / "iter_0000010", tmp_path / "iter_0000010"))
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    assert look(tmp_path, nothing) == [("finished", "iter_0000010")]  # a copy without tracker
    tracker.write_text("5")
    assert look(tmp_path, nothing, nothing) == []
    assert look(tmp_path, nothing, lambda: tracker.write_text("10"), nothing) == [("finished", "iter_0000010")]
    (step / "metadata.json").unlink()
    assert look(tmp_path, nothing, nothing) == []


def test_a_tracker_that_was_set_back_hides_no_newer_step(tmp_path: Path) -> None:
    """Neither one that `.metadata` ends, nor Megatron's that is not the newest or has been silent for long."""
    (tmp_path / "plain").mkdir()
    for number in (10, 20, 30):
        save(tmp_path / "plain" / f"step-{number}")()
        shutil.copytree(REAL / "megatron_0.10" / "iter_0000010", tmp_path / "megatron" / f"iter_{number:07d}")
    (tmp_path / "plain" / "latest").write_text("step-10")
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("10")
    assert look(tmp_path / "plain", nothing) == [("finished", f"step-{number}") for number in (10, 20, 30)]
    for stale, newest in ((1e12, "writing"), (0.0, "finished")):
        told = events(partial(run_at, str(tmp_path / "megatron")), 0, once=True, stale=stale, sleep=no_sleep)
        assert [event.kind for event in told] == ["finished", "finished", newest]


def test_a_step_that_vanishes_is_forgotten(tmp_path: Path) -> None:
    step = tmp_path / "step-1"
    save(step)()
    told = look(tmp_path, nothing, lambda: shutil.rmtree(step), nothing, save(step), nothing)
    assert told == [("finished", "step-1")] * 2


def test_components_of_a_step_are_finished_together(tmp_path: Path) -> None:
    save(tmp_path / "step-1" / "model")()
    save(tmp_path / "step-1" / "optim")()
    (tmp_path / "step-1" / "optim" / ".metadata").rename(tmp_path / "kept")
    assert look(tmp_path, nothing, nothing) == []
    done = look(tmp_path, lambda: (tmp_path / "kept").rename(tmp_path / "step-1" / "optim" / ".metadata"), nothing)
    assert done == [("finished", "step-1")]


def test_a_step_in_which_nothing_is_known_is_never_finished(tmp_path: Path) -> None:
    (tmp_path / "step-1" / "logs").mkdir(parents=True)
    (tmp_path / "step-1" / "logs" / "a.txt").write_text("a")
    assert look(tmp_path, nothing, nothing) == []


def test_a_step_that_cannot_be_listed_is_told_once_and_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "step-1")()
    save(tmp_path / "step-2")()
    real = os.scandir

    def scandir(path: Any = ".") -> Any:
        if str(path).endswith("step-1"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert look(tmp_path, nothing, nothing, nothing) == [("unread", "step-1"), ("finished", "step-2")]


def test_a_run_folder_that_is_away_for_a_while_is_told_once(tmp_path: Path) -> None:
    path, away = tmp_path / "run", tmp_path / "away"
    save(path / "step-1")()
    told = look(path, lambda: path.rename(away), nothing, lambda: away.rename(path), nothing)
    assert told == [("unread", ""), ("finished", "step-1")]


@pytest.mark.parametrize("name", ["fsdp2_4r", "fsdp2_4r/.metadata", "nowhere"])
def test_what_is_no_run_folder_is_refused(name: str) -> None:
    with pytest.raises(NothingToCheckError):
        next(events(partial(run_at, str(REAL / name)), 1, sleep=no_sleep))


def test_what_was_read_of_a_step_that_is_being_removed_does_not_count(tmp_path: Path) -> None:
    save(tmp_path / "step-1")()
    (event,) = events(partial(run_at, str(tmp_path)), 1, once=True, sleep=no_sleep)
    open_run = partial(run_at, str(tmp_path))
    assert not is_vanishing(open_run, event)
    (tmp_path / "step-1" / "new").write_bytes(b"")
    assert not is_vanishing(open_run, event)
    (tmp_path / "step-1" / "__0_0.distcp").unlink()
    assert is_vanishing(open_run, event)
    shutil.rmtree(tmp_path / "step-1")
    assert is_vanishing(open_run, event)


def test_a_run_in_a_store(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    save(tmp_path / "step-1", HOLE)()
    store = fsspec.filesystem("memory")
    store.put(str(tmp_path / "step-1"), "/watched-run/step-1", recursive=True)
    store.pipe("/watched-run/step-2/__0_0.distcp", b"half")
    told = list(events(partial(run_at, "memory://watched-run"), 0, once=True, sleep=no_sleep))
    assert [(event.kind, event.step) for event in told] == [("finished", "step-1"), ("writing", "step-2")]
    assert not is_vanishing(partial(run_at, "memory://watched-run"), told[0])


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("cases", "options", "code"),
    [
        ([GOOD, GOOD], [], 0),
        ([GOOD, HOLE, GOOD], [], 1),
        ([HOLE], ["--exit-zero"], 0),
        ([HOLE], ["--select", "PAY"], 0),
        ([HOLE], ["--severity", "GEO=warning"], 1),
        ([HOLE], ["--severity", "GEO=warning", "--fail-on", "error"], 0),
        ([], [], 3),
    ],
)
def test_once_ends_with_the_worst_exit_code(
    tmp_path: Path, cases: list[dict[str, Any]], options: list[str], code: int
) -> None:
    for number, case in enumerate(cases):
        save(tmp_path / f"step-{number}", case)()
    done = run("watch", tmp_path, "--once", "--interval", "0", *options)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_option_ends_the_watch_before_the_first_step(tmp_path: Path) -> None:
    for options in (["--select", "NOPE"], ["--sample", "5%"], ["--output", "report.doc"]):
        assert run("watch", tmp_path, *options).returncode == 2


def test_the_command_gets_what_it_needs_in_its_environment_and_may_fail(tmp_path: Path) -> None:
    hostile = "step-2-$(touch hacked)"  # no step: names are checked before anything is done with them
    path = tmp_path / "a run; touch hacked"
    save(path / "step-1", HOLE)()
    save(path / "step-3")()
    save(path / hostile, HOLE)()
    told = tmp_path / "told"
    command = (
        f'echo "$CKPTLINT_EXIT_CODE $CKPTLINT_STEP_PATH" >> {told}; cp "$CKPTLINT_REPORT" {tmp_path}/copy.json; exit 7'
    )
    done = run("watch", path, "--once", "--interval", "0", "-qq", "--exec", command, cwd=tmp_path)
    assert done.returncode == 1
    assert told.read_text() == f"1 {path}/step-1\n"
    assert "the command of --exec exited with 7" in done.stderr
    report = json.loads((tmp_path / "copy.json").read_text())
    assert [finding["code"] for finding in report["checkpoints"][0]["findings"]][:1] == ["GEO004"]
    assert not list(tmp_path.rglob("hacked"))


def test_an_output_that_cannot_be_written_does_not_end_the_watch(tmp_path: Path) -> None:
    save(tmp_path / "run" / "step-1")()
    save(tmp_path / "run" / "step-2")()
    (tmp_path / "report.json").mkdir()
    done = run("watch", tmp_path / "run", "--once", "--interval", "0", "--output", tmp_path / "report.json")
    assert done.returncode == 4
    assert done.stderr.count("cannot be written") == 2


def age(step: Path, seconds: float) -> None:
    """All that lies in a step was written so long ago, the step itself too."""
    then = time.time() - seconds
    for path in (*step.rglob("*"), step):
        os.utime(path, (then, then))


def unfinished(step: Path, seconds: float) -> None:
    """A step whose save never wrote its metadata."""
    save(step)()
    (step / ".metadata").unlink()
    age(step, seconds)


def test_a_step_that_stays_unfinished_is_told_once_however_long_it_stays(tmp_path: Path) -> None:
    save(tmp_path / "step-1")()
    unfinished(tmp_path / "step-2", 3600)
    text = "step-2 is still unfinished: nothing in it has changed for 1 h"
    for stale, told in ((1800, [("finished", ""), ("unfinished", text)]), (7200, [("finished", "")])):
        left = [0.0, 0.0, 0.0]
        seen = []
        open_run = partial(run_at, str(tmp_path))
        with suppress(IndexError):  # the end of the looks
            for event in events(open_run, 1, stale=stale, sleep=lambda _: left.clear() if left.pop() else None):  # noqa: B023
                seen.append((event.kind, event.text))
        assert seen == told


def test_a_stale_step_counts_as_one_that_fails(tmp_path: Path) -> None:
    save(tmp_path / "step-1")()
    unfinished(tmp_path / "step-2", 3600)
    told = tmp_path / "told"
    command = f'echo "$CKPTLINT_EXIT_CODE $CKPTLINT_STEP_PATH" >> {told}'
    once = ("watch", tmp_path, "--once", "--interval", "0")
    assert run(*once, "--stale", "2h").returncode == 0
    done = run(*once, "--exec", command, "--select", "PAY")  # whichever rules look
    assert (done.returncode, told.read_text()) == (1, f"1 {tmp_path}/step-2\n")
    assert run(*once, "--exit-zero").returncode == 4  # as of `check`: it cannot be judged
    assert run(*once, "--stale", "soon").returncode == 2


def test_banner_and_times(tmp_path: Path) -> None:
    save(tmp_path / "step-1")()
    lines = run("watch", tmp_path, "--once", "--interval", "0", "--stale", "2h").stderr.splitlines()
    there = (
        f"ckptlint: watching {tmp_path}: 1 step there, the newest step-1; looks again after 0 s if a file is newer; "
    )
    assert lines[0] == there + "reports an unfinished step after 2 h without a change"
    assert re.fullmatch(r"ckptlint: \d{4}-\d\d-\d\d \d\d:\d\d:\d\d step-1 is finished and passes", lines[1])
    assert run("watch", tmp_path, "--once", "--interval", "0", "-qq").stderr == ""


def test_a_pass_is_one_line_and_the_last_line_counts_them(tmp_path: Path) -> None:
    once = ("watch", tmp_path, "--once", "--interval", "0", "--depth", "files")
    save(tmp_path / "step-1")()
    save(tmp_path / "step-2")()
    passing = run(*once)
    assert (passing.stdout, len(passing.stderr.splitlines())) == ("", 4)
    assert passing.stderr.endswith("ckptlint: 2 steps: 2 passed\n")
    assert [run(*once, quiet).stderr + run(*once, quiet).stdout for quiet in ("-q", "-qq")] == ["", ""]
    assert "rules ran" in run(*once, "-v").stdout
    save(tmp_path / "step-3", HOLE)()
    failing, quiet = run(*once), run(*once, "-q")
    assert failing.stderr.endswith("ckptlint: 3 steps: 2 passed, 1 failed\n") and "2 warnings" not in failing.stdout
    assert failing.stdout.count("GEO004") > 1 and quiet.stdout.startswith("error[GEO004]")
    assert re.fullmatch(r"ckptlint: [-\d]+ [:\d]+ step-3 is finished\n", quiet.stderr)
    assert (run(*once, "-qq").stdout, run(*once, "-qq").stderr, run(*once, "-qq").returncode) == ("", "", 1)


def test_once_waits_only_where_something_is_young(tmp_path: Path) -> None:
    """A copy that keeps the times of files, but for the folders that it is still filling, is young."""
    slept: list[float] = []

    def look_once(interval: float = 30) -> list[tuple[str, str]]:
        slept.clear()
        told = events(partial(run_at, str(tmp_path)), interval, once=True, sleep=slept.append)
        return [(event.kind, event.step) for event in told]

    save(tmp_path / "step-1")()
    save(tmp_path / "step-2" / "model")()
    told = [("finished", "step-1"), ("finished", "step-2")]
    assert (look_once(), slept) == (told, [30])
    for step in tmp_path.iterdir():
        age(step, 60)
    assert (look_once(), slept) == (told, [])
    assert (look_once(90), slept) == (told, [90])
    os.utime(tmp_path / "step-2" / "model")
    assert (look_once(), slept) == (told, [30])
    age(tmp_path / "step-2", 60)
    os.utime(tmp_path / "step-1")
    assert (look_once(), slept) == (told, [30])
    unfinished(tmp_path / "step-3", 60)
    age(tmp_path / "step-1", 60)
    assert (look_once(), slept) == ([*told, ("writing", "step-3")], [])


def test_a_line_of_json_for_each_step(tmp_path: Path) -> None:
    save(tmp_path / "step-1")()
    save(tmp_path / "step-2", HOLE)()
    unfinished(tmp_path / "step-3", 3600)
    (tmp_path / "step-4").symlink_to("/")
    done = run("watch", tmp_path, "--once", "--interval", "0", "--jsonl")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    keys = ("event", "step", "verdict", "code", "exit_code")
    assert [tuple(line[key] for key in keys) for line in lines] == [
        ("unread", 4, "not judged", None, 4),
        ("finished", 1, "passes", None, 0),
        ("finished", 2, "fails", "GEO004", 1),
        ("unfinished", 3, "unfinished", "COM001", 1),
    ]
    assert [line["path"] for line in lines[1:]] == [f"{tmp_path}/step-{n}" for n in (1, 2, 3)]
    assert all(datetime.fromisoformat(line["time"]).tzinfo for line in lines)
    assert done.returncode == 1


def test_once_names_the_newest_step_that_may_still_be_written(tmp_path: Path) -> None:
    save(tmp_path / "step-1")()
    unfinished(tmp_path / "step-2", 60)
    (tmp_path / "step-3").mkdir()
    once = ("watch", tmp_path, "--once", "--interval", "0")
    done = run(*once)
    assert done.returncode == 0
    assert [line.split(maxsplit=3)[-1] for line in done.stderr.splitlines()[-2:]] == [
        f"step-{n} is not finished yet: it was not checked" for n in (2, 3)
    ]
    lines = [json.loads(line) for line in run(*once, "--jsonl").stdout.splitlines()]
    keys = ("event", "step", "verdict", "code", "exit_code")
    assert [tuple(line[key] for key in keys) for line in lines] == [
        ("finished", 1, "passes", None, 0),
        ("writing", 2, "unfinished", "COM001", None),
        ("writing", 3, "unfinished", "COM001", None),
    ]
    assert lines[1]["bytes"] == sum(path.stat().st_size for path in (tmp_path / "step-2").iterdir())


def test_once_ends_in_4_for_a_step_that_was_not_read(tmp_path: Path) -> None:
    save(tmp_path / "step-1")()
    (tmp_path / "step-2").symlink_to("/")
    assert run("watch", tmp_path, "--once", "--interval", "0").returncode == 4


def test_each_step_is_compared_with_the_one_before(tmp_path: Path) -> None:
    both = {"tensors": {"layers.0.w": {"shape": [4]}, "layers.1.w": {"shape": [4]}}}
    save(tmp_path / "step-1", both)()
    save(tmp_path / "step-2", {"tensors": {"layers.0.w": {"shape": [4]}}})()
    done = run("watch", "run", "--once", "--interval", "0", "--strict", cwd=link(tmp_path))
    assert done.returncode == 1
    assert "no part of layers.1.w is stored here; step-1 has float32 [4]" in " ".join(done.stdout.split())


def link(path: Path) -> Path:
    """A folder in which the path is called `run`."""
    folder = path.with_name(f"{path.name}-around")
    folder.mkdir()
    (folder / "run").symlink_to(path)
    return folder


@contextmanager
def watching(*arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """A watch that goes on until the block ends."""
    command = [sys.executable, "-m", "ckptlint", "watch", *map(str, arguments)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CKPTLINT_")}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY, env=environment,
        preexec_fn=takes_ctrl_c,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(condition: Callable[[], bool], seconds: float = 15) -> None:
    """Until it is true; fails when it takes too long."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def test_a_run_folder_that_does_not_exist_yet_is_waited_for(tmp_path: Path) -> None:
    """The job makes it when it starts; `--once` does not wait."""
    path = tmp_path / "later" / "run"
    assert run("watch", path, "--once", "--interval", "0").returncode == 3
    with watching(path, "--interval", "0.1") as process:
        assert process.stderr is not None
        assert process.stderr.readline() == f"ckptlint: {path} does not exist yet: waiting for it, looks every 0.1 s\n"
        save(path / "step-1", HOLE)()
        assert "watching" in process.stderr.readline()
        assert process.stderr.readline().endswith("step-1 is finished\n")


def test_a_run_that_torch_writes_while_it_is_watched(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    path, told = tmp_path / "run", tmp_path / "told"
    path.mkdir()
    command = f'basename "$CKPTLINT_STEP_PATH" >> {told}'

    def write(step: str) -> None:
        weight = torch.full((64, 8), float(step[-1]))  # which each step changes
        dcp.save({"w": weight, "step": int(step[-1])}, checkpoint_id=path / step, no_dist=True)

    def heard() -> list[str]:
        return told.read_text().split() if told.exists() else []

    # --depth data, so that a payload file that is short is seen whatever its size in the metadata
    with watching(path, "--interval", "0.2", "--exec", command, "--format", "concise", "--depth", "data") as process:
        write("step-1")
        write("step-2")
        kept = (path / "step-2" / "__0_0.distcp").read_bytes()
        (path / "step-2" / "__0_0.distcp").write_bytes(kept[: len(kept) // 2])  # damaged after the save
        wait_for(lambda: heard() == ["step-2"])

        write("step-3")  # half-written: the metadata appears only later
        metadata = (path / "step-3" / ".metadata").read_bytes()
        (path / "step-3" / ".metadata").unlink()
        time.sleep(0.8)
        assert heard() == ["step-2"]
        write("step-4")
        wait_for(lambda: heard() == ["step-2", "step-3"])  # left behind
        (path / "step-3" / ".metadata").write_bytes(metadata)

        shutil.rmtree(path / "step-1")
        write("step-5")
        shutil.rmtree(path / "step-5")
        time.sleep(0.8)
        assert process.poll() is None
        assert heard() == ["step-2", "step-3"]

        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "step-3 is still unfinished, and step-4 is finished" in errors
    assert "step-2" in output and "step-4" not in output
