"""Processor time is one budget for a checkpoint, and no child outlives its parent."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from pickles import stream, write_zip
from support import REAL, child_processes, codes, found, sweep_only

import ckptlint
from ckptlint import sandbox
from ckptlint.errors import LimitError
from ckptlint.payload.archives.record_pickle import decode
from ckptlint.sandbox import isolated, one_budget, prefetch

pytestmark = pytest.mark.forks

SLOW = stream(
    pickle.EMPTY_DICT, pickle.EMPTY_TUPLE, (pickle.DUP + pickle.TUPLE2) * 60, pickle.NONE, pickle.SETITEM
)  # 130 bytes, hashed for 2**60 steps
HEALTHY = stream(pickle.EMPTY_DICT)
linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends such children on Linux")


def spin() -> None:
    while True:
        pass


def seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_children_share_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_BASE_SECONDS", 1.0)
    before, sentences = seconds_of_children(), []
    with one_budget():
        for _ in range(6):
            with pytest.raises(LimitError) as told, one_budget():
                isolated(spin, 0)
            sentences.append(str(told.value))
    assert seconds_of_children() - before < 4
    assert "far longer than its size explains" in sentences[0]
    assert sentences[-1] == "was not read: reading the files before it took far longer than their sizes explain"
    assert isolated(int, 0) == 0  # the next checkpoint has a budget of its own


def test_the_share_of_the_bytes_is_not_taken_from_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_BASE_SECONDS", 0.2)

    def work() -> str:
        end = time.process_time() + 0.1
        while time.process_time() < end:
            pass
        return "read"

    with one_budget():
        assert [isolated(work, 2**20) for _ in range(5)] == ["read"] * 5


@sweep_only
def test_slow_files_of_a_step_cost_one_budget_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # limits are whole seconds: 5 for all files together, 2 for the first alone, and more than 1 is left for the others
    monkeypatch.setattr(sandbox, "_BASE_SECONDS", 8.2)
    step = Path(shutil.copytree(REAL / "edit_base", tmp_path / "step"))
    healthy = codes(ckptlint.check(step))
    for name in ("optimizer.pt", "scheduler.pt"):
        assert write_zip(step / name, SLOW).stat().st_size < 500
    write_zip(step / "rng_state_0.pth", HEALTHY)
    before = seconds_of_children()
    report = ckptlint.check(step)
    assert seconds_of_children() - before < 12
    sentences = [sentence for code, _, sentence in found(report, "error") if code not in healthy]
    assert sorted(sentence.split()[0] for sentence in sentences) == ["optimizer.pt", "scheduler.pt"]
    assert report.exit_code == 1


def test_files_that_no_time_is_left_for_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_BASE_SECONDS", 1.0)
    step = Path(shutil.copytree(REAL / "edit_base", tmp_path / "step"))
    names = [f"rng_state_{rank}.pth" for rank in range(8)]
    for name in names:
        write_zip(step / name, SLOW)
    before = seconds_of_children()
    report = ckptlint.check(step)
    assert seconds_of_children() - before < 4
    told = " ".join(sentence for _, _, sentence in found(report, "error"))
    assert all(name in told for name in names)
    assert "was not read" in told


@sweep_only
def test_slow_records_cost_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_BASE_SECONDS", 4.2)  # 3 for all of them together, and more than 1 is left
    before = seconds_of_children()
    with one_budget():
        decoded = decode([HEALTHY, SLOW, SLOW])
    assert seconds_of_children() - before < 8
    assert decoded[0].content is not None
    assert [part.error is not None for part in decoded] == [False, True, True]


@linux
def _ended_by(number: int) -> tuple[int, str]:
    """What reading a file gives where one kills its reader, and another takes for ever."""

    def work() -> int:
        if number == 3:
            os.kill(os.getpid(), signal.SIGSEGV)
        while number == 6:
            pass
        return os.getpid()

    try:
        return isolated(work, 0), ""
    except LimitError as error:
        return 0, str(error)


def test_a_reader_that_dies_is_replaced_and_its_work_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_BASE_SECONDS", 0.9)
    before = child_processes()
    found = list(prefetch([partial(_ended_by, number) for number in range(12)], 2))
    assert [number for number, (child, _) in enumerate(found) if not child] == [3, 6]
    assert "SIGSEGV" in found[3][1]
    assert "far longer than its size explains" in found[6][1]
    children = [child for child, _ in found if child]
    assert os.getpid() not in children
    assert len(set(children)) == 4  # two to begin with, and one for each that died
    assert child_processes() == before


def test_readers_that_nobody_asks_any_more_are_ended() -> None:
    before = child_processes()
    answers = prefetch([partial(_ended_by, 0)] * 50, 2)
    next(answers)
    assert len(child_processes() - before) == 2
    answers.close()  # type: ignore[attr-defined]
    assert child_processes() == before


def test_a_child_dies_with_its_killed_parent(tmp_path: Path) -> None:
    program = (
        "import os, sys, time\n"
        "from ckptlint.sandbox import isolated\n"
        "def work():\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(60)\n"
        "isolated(work, 0)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    for _ in range(100):
        if not is_running(child):
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the child outlived its parent")


def is_running(process: int) -> bool:
    """Whether a process is there and no zombie, which only its new parent can end."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
