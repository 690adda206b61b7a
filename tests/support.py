"""What several test files share: the real checkpoints, findings as plain values, ckptlint as a user runs it."""

from __future__ import annotations

import csv
import gc
import importlib.util
import io
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
from archives import with_other_values

import ckptlint
from ckptlint.__main__ import main
from ckptlint.depth import Depth
from ckptlint.errors import NothingToCheckError
from ckptlint.lint.registry import load_rules
from ckptlint.lint.report import Report
from ckptlint.lint.settings.request import Request
from ckptlint.payload.reading import default_reading
from ckptlint.rule import Finding, Rule, Severity

REPOSITORY = Path(__file__).parent.parent
REAL = REPOSITORY / "fixtures" / "real"
SHARED = REPOSITORY.parent / "shared" / "checkpoints"
T = TypeVar("T")
SWEEP = bool(os.environ.get("SWEEP"))
"""Whether sweeps try all they can: `SWEEP=1 pytest -m sweep`, as .ci/run does with one file in 20."""


def examples(few: int, many: int) -> int:
    """How many inputs a test that is marked as a sweep tries: few in every run, a third of many in a sweep."""
    return max(min(few, many), many // 3) if SWEEP else few


HOSTILE = {
    "markup": "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "closing": "a</script></code></pre>--><b>",
    "cdata": ']]><failure message="x"/>&amp;&#0;\'',
    "ansi": "\x1b[31mred\x1b]8;;http://evil\x07link",
    "controls": "a\x00b\x01c\x0bd\x7fe\ufffef\uffff",
    "lines": "a\r\n::error::injected\n\u2028b",
    "command": "::error file=x::injected",
    "indented": "a                                                                      ::add-mask::injected",
    "old command": "##[add-path]injected ##vso[task.complete]",
    "build servers": "x ##vso[task.complete] ##[error] ##teamcity[x] ::error a=b::c ::add-mask::b%0A\x1b]8;;",
    "percent": "a%0A::warning::injected%25,line=2:b",
    "markdown": "a|b`c``d``` [x](http://evil) **bold** @user #1 <http://evil>",
    "fence": "```\n# injected\n```",
    "surrogate": "a\ud800b",
    "bidi": "a\u202egnp.exe\u200b",
    "link": "[click](http://evil) {0} {{x}}",
    "csv": "=cmd|'/C calc'!A0",
    "escaped bytes": "a\udcff\udc9b31m",
    "long": "<img src=x onerror=alert(2)>" * examples(400, 8000),
}
"""One list of names that mean something to a terminal, a log, a page or a reader of one of the formats."""


NOT_NOW = (pytest.mark.sweep, pytest.mark.skipif(not SWEEP, reason="takes long: SWEEP=1 runs it"))


def sweep_only(test: T) -> T:
    """Mark a test that is too long for every run."""
    return NOT_NOW[0](NOT_NOW[1](test))


def swept(*values: Any) -> list[Any]:
    """Values of a parameter that only a sweep tries; a tuple is one value of each parameter."""
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=NOT_NOW) for value in values]


# ---------------------------------------------------------------- real checkpoints


def manifest(folder: Path) -> list[dict[str, str]]:
    """The rows of the MANIFEST.tsv of a folder; none where there is no such file."""
    path = folder / "MANIFEST.tsv"
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def found(report: Report, *levels: str) -> list[tuple[str, str, str]]:
    """(code, severity, sentence) of the findings, those of some severities where any are named."""
    listed = [(item.code, item.severity.label, item.title) for item in report.diagnostics]
    return [row for row in listed if not levels or row[1] in levels]


def report_on(*paths: Any, **options: Any) -> Report:
    """What the commands print: `ckptlint.check` raises on a path without a checkpoint, and its error holds this."""
    try:
        return ckptlint.check(*paths, **options)
    except NothingToCheckError as error:
        return error.report


def drawing(request: Request) -> Request:
    """The same request at depth `files`, with numbers drawn from some records."""
    return request._replace(depth=Depth.FILES, reading=replace(default_reading(Depth.HEADERS), draws=True))


def copy_step(step: Path, place: Path, number: int) -> Path:
    """A copy of a DCP step, with other values in its larger tensors for each number, as training leaves them."""
    shutil.copytree(step, place)
    for path in place.rglob("*.distcp"):
        path.write_bytes(with_other_values(path.read_bytes(), number))
    return place


def codes(report: Report, *levels: str) -> set[str]:
    """The codes of the findings, those of some severities where any are named."""
    return {code for code, _, _ in found(report, *levels)}


def check_bytes(data: bytes, folder: Path, name: str = ".metadata") -> Report:
    """The report on a folder whose metadata is these bytes, beside one empty payload file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    (folder / "__0_0.distcp").write_bytes(b"")
    return ckptlint.check(folder)


def broken_rule(code: str) -> tuple[Rule, ...]:
    """The rules, one of them ending in an error of its own after its first finding."""

    def crash(_: Any) -> Iterator[Finding]:
        yield Finding("half a finding", severity=Severity.INFO)
        raise RuntimeError("broken \x1b[31m rule")

    return tuple(replace(rule, check=crash) if rule.code == code else rule for rule in load_rules())


def a_socket(path: Path) -> None:
    """A Unix socket; its name has to be short."""
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def child_processes() -> set[str]:
    """The numbers of the processes that this one has forked, the dead that nobody waited for among them."""
    return {*Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


@contextmanager
def ends(seconds: float = 10) -> Iterator[None]:
    """What is inside ends: no measure of speed, but no test hangs on input that would take hours of processor time."""

    def give_up(*_: Any) -> None:
        raise AssertionError(f"it did not end within {seconds} s of processor time")

    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


# ---------------------------------------------------------------- ckptlint as a user runs it


def run(
    *arguments: str | Path, env: dict[str, str] | None = None, own_process: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """`ckptlint` as a user runs it; `env` is laid over an environment without settings of ckptlint.

    It runs in this process. It gets one of its own where a test says so, sets up the interpreter (`PYTHON...`), or
    gives an option of `subprocess.run` other than `cwd`.
    """
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith("CKPTLINT_") and k not in ("NO_COLOR", "FORCE_COLOR")
    }
    environment |= {"COLUMNS": "80"} | (env or {})
    needs_one = own_process or options.keys() - {"cwd"} or any(name.startswith("PYTHON") for name in env or ())
    if not needs_one:
        return _run_here([*map(str, arguments)], environment, options.get("cwd", REPOSITORY))
    environment = {"PYTHONIOENCODING": "utf-8", "CKPTLINT_DEPTH": "files"} | environment
    command = [sys.executable, "-m", "ckptlint", *map(str, arguments)]
    defaults: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 600, "cwd": REPOSITORY}
    return subprocess.run(command, env=environment, encoding="utf-8", check=False, **(defaults | options))


def _run_here(
    arguments: list[str], environment: dict[str, str], folder: str | Path
) -> subprocess.CompletedProcess[str]:
    """The command line in this process, with streams, environment and working directory of its own."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(3)]
    with ExitStack() as changed:
        for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
            changed.enter_context(patch.object(sys, name, stream))
        changed.enter_context(patch.object(sys, "argv", ["ckptlint", *arguments]))
        changed.enter_context(patch.dict(os.environ, environment, clear=True))
        changed.enter_context(chdir(folder))
        try:
            main()
            code: Any = 0
        except SystemExit as end:
            code = end.code or 0
    _, output, errors = (stream.buffer.getvalue().decode("utf-8") for stream in streams)  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(arguments, code, output, errors)


def takes_ctrl_c() -> None:
    """For a new process: a shell starts what runs in its background with Ctrl-C ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def on_terminal(code: str, *arguments: str) -> bytes:
    """What a program writes to standard error when that is a terminal."""
    import pty  # which Windows lacks

    ours, theirs = pty.openpty()
    subprocess.run(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.DEVNULL, stderr=theirs, check=False, timeout=600
    )
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:
        pass
    os.close(ours)
    return shown


def run_python(code: str, *arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """A Python program in a process of its own; it may crash, hang or run out of memory without harm to the tests."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    defaults: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 600, "cwd": REPOSITORY}
    return subprocess.run(command, encoding="utf-8", check=False, **(defaults | options))


def run_forked(work: Callable[[], object], folder: Path) -> subprocess.CompletedProcess[str]:
    """What `run_python` says of a function in a fork of this process, which need not import torch anew for seconds."""
    files = {1: folder / "stdout", 2: folder / "stderr"}

    def run() -> None:
        gc.freeze()  # nothing is copied to look for garbage in it
        for number, file in files.items():
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in files)  # noqa: SIM115
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
        warnings.resetwarnings()
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)  # the threads of this process are not in the fork
        work()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(600)
    process.kill()
    process.join()
    written = (file.read_text(encoding="utf-8", errors="replace") for file in files.values())
    return subprocess.CompletedProcess("a fork", process.exitcode or 0, *written)


def run_script(script: Path, *arguments: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """`python script arguments` in a fork of this process."""

    def work() -> None:
        sys.argv = [*map(str, (script, *arguments))]
        sys.path.insert(0, str(script.parent))
        runpy.run_path(str(script), run_name="__main__")

    return run_forked(work, folder)


def bench(name: str, folder: str = "bench") -> ModuleType:
    """A module of `bench/` (`speed/generate`), or of another folder that is no package."""
    path = REPOSITORY / folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    with patch.dict(os.environ):  # what it sets for its own run is not for the processes of other tests
        spec.loader.exec_module(module)
    return module
