"""Fixtures that several test files use."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pickles
import pytest
from hypothesis import is_hypothesis_test, settings
from support import REAL, REPOSITORY, SWEEP, examples

from ckptlint import sandbox
from ckptlint.formats.pickles import safe_pickle as unpickle
from ckptlint.lint.settings import request

if sys.dont_write_bytecode:  # each process of a test would compile the package anew, in a quarter of a second
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(REPOSITORY / ".pytest_cache" / "bytecode")

settings.register_profile("quick", deadline=None, max_examples=examples(15, 100))
settings.load_profile("quick")

BEFORE = pytest.StashKey[str]()
UNLIMITED = resource.getrlimit(resource.RLIMIT_AS)
READER_BYTES = 2 * 1024**3

run_reader = sandbox._outcome


def run_reader_here(work: Callable[[], Any]) -> tuple[str, Any]:
    """A reader in this process: what would take gigabytes is a `MemoryError`, not the end of the machine."""
    with contextlib.suppress(OSError):  # only Linux tells how much address space is taken already
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + READER_BYTES, UNLIMITED[1]))
    try:
        return run_reader(work)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, UNLIMITED)


sandbox.in_children = False
request.CHEAP_BYTES = 0  # tests say their depth: otherwise files


@pytest.fixture(autouse=True)
def readers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Readers run in the process of the test, which is five times as fast; in children where it is marked `forks`."""
    with pytest.MonkeyPatch.context() as patch:  # one of its own: those of the tests end before other fixtures do
        if request.node.get_closest_marker("forks"):
            patch.setattr(sandbox, "in_children", True)
        else:
            patch.setattr(sandbox, "_outcome", run_reader_here)
        yield


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are processors: many tests wait for a process, a server or a time limit."""
    return 1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def tree() -> str:
    """What git says of the working tree; nothing where it is none."""
    command = ["git", "status", "--porcelain", "--untracked-files=all"]
    try:
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        session.config.stash[BEFORE] = tree()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """No test writes outside of its own folder: one that does fails the run."""
    if "UPDATE_SNAPSHOTS" in os.environ:
        return
    if not hasattr(session.config, "workerinput") and (after := tree()) != session.config.stash[BEFORE]:
        changed = sorted({*after.splitlines()} ^ {*session.config.stash[BEFORE].splitlines()})
        pytest.exit(f"the tests changed the working tree: {', '.join(changed)}", returncode=1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A property is a sweep: it tries more where SWEEP=1 is set."""
    for item in items:
        if is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker("sweep")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Of the values that are asked for, a sweep that names its share tries one in so many where SWEEP=1 is not set."""
    values = Counter[str]()
    for item in session.items:
        share = max((mark.kwargs.get("share", 1) for mark in item.iter_markers("sweep")), default=1)
        test = item.nodeid.partition("[")[0]
        if not SWEEP and values[test] % share:
            item.add_marker(pytest.mark.skip(reason=f"one value in {share} is tried: SWEEP=1 tries all"))
        values[test] += 1


class Ranks(multiprocessing.get_context("fork").Process):  # type: ignore[name-defined,misc]
    """The ranks of `plan --to job.py:function`, forks of a fork of this process, which imported torch once."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.start()

    def run(self) -> None:
        """What `python -m ckptlint.planning.ranks` does in a process of its own."""
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        errors = os.open(self.folder / "stderr", os.O_WRONLY | os.O_CREAT)
        for number, file in enumerate((null, null, errors)):
            os.dup2(file, number)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        from ckptlint.planning import ranks

        ranks.torch.set_num_threads(1)
        ranks._run(self.folder)

    def wait(self, seconds: float | None = None) -> None:
        """As that of a `Popen`."""
        self.join(seconds)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired("ranks", seconds or 0)

    @property
    def returncode(self) -> int | None:
        return self.exitcode


@pytest.fixture
def warm_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan` with a function starts no Python that imports torch anew for three seconds."""
    pytest.importorskip("ckptlint.planning.ranks", exc_type=ImportError)
    monkeypatch.setattr("ckptlint.planning.exact._started", Ranks)


@pytest.fixture
def real_copy(tmp_path: Path) -> Callable[[str], Path]:
    """A writable copy of a checkpoint of `fixtures/real`."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(REAL / name, tmp_path / name.replace("/", "-")))

    return copy


@pytest.fixture(params=["opcode by opcode", "in columns"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test twice: metadata is read by the unpickler alone, and with its regular rows as columns."""
    monkeypatch.setattr(unpickle, "WORTHWHILE", 0 if request.param == "in columns" else 1 << 60)


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that a payload would create, from a child process too; the test fails when it is there at the end."""
    path = tmp_path / "was_here"
    monkeypatch.setattr(pickles, "TRACE", path)
    yield path
    assert not path.exists(), "a payload was run"
