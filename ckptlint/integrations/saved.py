"""The check of one finished save, and the link to the last one that passed."""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from ckptlint.errors import CheckpointError, ConfigError
from ckptlint.model.text import inert, plural, printable
from ckptlint.storage.paths import is_url
from ckptlint.storage.writing import fresh_name, write_whole
from ckptlint.vocabulary.frameworks import step_number

if TYPE_CHECKING:
    from ckptlint.lint.report import Verdict

OnFault = Literal["warn", "raise"]
Undo = Callable[[], None]

GOOD = "latest.good"
"""The link, or the file, in a run folder that names the last step that passed."""

log = logging.getLogger("ckptlint")

_OF_THE_JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NICENESS = 10
_SHOWN = 3  # findings in a warning
_SETTLE = 5.0  # seconds in which the other ranks finish files of their own, such as rng_state_1.pth


@dataclass(frozen=True, slots=True)
class SaveCheck:
    """What became of the check of one save.

    Attributes:
        verdict: as `Report.verdict`; `incomplete` also where the check could not run.
        text: what is wrong and what to do, or why the check could not run; "" for a pass.
        report: the report of `--format json`; empty where the check could not run.
        seconds: how long the job waited for it.
    """

    path: str
    verdict: Verdict
    text: str = ""
    report: Mapping[str, Any] = field(default_factory=dict, repr=False)
    seconds: float = 0.0


class _CannotRunError(Exception):
    """The check of a save could not run."""


def check_saved(
    path: str | os.PathLike[str],
    *,
    depth: str = "files",
    on_fault: OnFault = "warn",
    keep_good: bool | str | os.PathLike[str] = True,
    timeout: float = 120,
) -> SaveCheck:
    """Check a finished save in a process of its own, and log one warning unless it passes; what it took is in the line.

    Call it on one rank. That rank waits, so the others wait for it at their next collective: keep `timeout` well below
    the time limit of the process group. In a job of several ranks a save that does not pass is checked once more after
    some seconds, because the other ranks may still write.

    Args:
        depth: as in `ckptlint.check`.
        on_fault: `warn`, or `raise` for whatever is no pass.
        keep_good: point `latest.good` in the folder that holds the step, or in the folder named here, to a step that
            passes and holds what the steps before it hold. Nothing is deleted.
        timeout: seconds for all of it.

    Raises:
        CheckpointError: with `on_fault="raise"`: the save does not pass, or the check could not run.
        ConfigError: `on_fault` is none of these.
    """
    require(on_fault)
    step, started = os.fspath(path), time.monotonic()
    end = started + timeout
    saved = _judged(step, depth, bool(keep_good), end)
    if saved.verdict != "pass" and os.environ.get("WORLD_SIZE", "1") != "1" and time.monotonic() + _SETTLE < end:
        time.sleep(_SETTLE)
        saved = _judged(step, depth, bool(keep_good), end)
    seconds = time.monotonic() - started
    if saved.verdict == "pass":
        log.info("ckptlint: %s passes (%.1f s)", printable(Path(step).name), seconds)
        if keep_good and not is_url(step):
            _point_to(Path(step).absolute(), None if keep_good is True else Path(keep_good).absolute())
        return replace(saved, seconds=seconds)
    head, line_end, rest = inert(saved.text).partition("\n")
    saved = replace(saved, text=f"{head} ({seconds:.1f} s){line_end}{rest}", seconds=seconds)
    log.warning(saved.text)
    if on_fault == "raise":
        raise CheckpointError(saved.text)
    return saved


def require(on_fault: str, allowed: Sequence[str] = get_args(OnFault)) -> None:
    """Raise ConfigError for what `on_fault` cannot be, before a job has run for hours."""
    if on_fault not in allowed:
        raise ConfigError(f"on_fault is {on_fault!r}: use one of {', '.join(allowed)}")


def stops_alone(world: int) -> None:
    """Raise ConfigError rather than end the training of one rank while the others go on."""
    if world > 1:
        raise ConfigError(
            "on_fault='stop' needs a job of one rank: only rank 0 checks, and the others would wait for it for ever;"
            " use on_fault='raise'"
        )


def after(owner: Any, name: str, then: Callable[..., object]) -> Undo:
    """Call `then` with what a method of one object returned and its arguments, each time. Returns what undoes it."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **named: Any) -> Any:
        result = original(*args, **named)
        then(result, *args, **named)
        return result

    setattr(owner, name, call)
    return lambda: delattr(owner, name)


def _judged(step: str, depth: str, as_resumed: bool, end: float) -> SaveCheck:
    """The verdict on a step; `as_resumed` also asks whether it holds what the steps before it hold."""
    name = printable(Path(step).name)
    try:
        report = _ask(["check", "--depth", depth, "--format", "json", "--", step], end)
        if report["verdict"] != "pass":
            return SaveCheck(step, report["verdict"], f"ckptlint: {name} {_wrong(report)}", report)
        lacks = _lacks(step, end) if as_resumed else ""
    except (_CannotRunError, OSError, ValueError) as error:
        return SaveCheck(step, "incomplete", f"ckptlint could not check {name}: {error}")
    text = f"ckptlint: {name} is no step to resume from: {printable(lacks)}" if lacks else ""
    return SaveCheck(step, "fail" if lacks else "pass", text, report)


def _lacks(step: str, end: float) -> str:
    """What a step lacks that the steps before it hold, in the words of `ckptlint latest`; "" for nothing."""
    place = Path(step).absolute()
    number = step_number(place.name)
    if number is None or is_url(step):
        return ""
    answer = _ask(["latest", "--before", str(number + 1), "--format", "json", "--", str(place.parent)], end)
    skipped = (row for run in answer["runs"] for row in run["skipped"] if row["name"] == printable(place.name))
    return next((row["why"] for row in skipped if row["verdict"] in ("unfinished", "lacks parts")), "")


def _ask(arguments: Sequence[str], end: float) -> dict[str, Any]:
    """What a command answers in JSON, in a process of its own that imports nothing of the job.

    It is started, not forked: a fork would share the CUDA context of this process. Raises _CannotRunError where it did
    not end in time, or gave no answer.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _OF_THE_JOB}
    with subprocess.Popen(  # noqa: S603  this very package
        [sys.executable, "-P", "-m", "ckptlint", *arguments],
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    ) as child:
        try:
            with suppress(OSError, AttributeError):  # AttributeError: not on Windows
                os.setpriority(os.PRIO_PROCESS, child.pid, _NICENESS)
            output, errors = child.communicate(timeout=max(end - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            raise _CannotRunError("the check did not end in time: set a larger timeout=") from None
        finally:
            if child.returncode is None:
                child.kill()
                with suppress(ProcessLookupError, AttributeError):
                    os.killpg(child.pid, signal.SIGKILL)  # the readers that it started
    if child.returncode < 0:
        raise _CannotRunError(f"signal {-child.returncode} ended the check")
    if not output.startswith("{"):
        said = printable((errors.strip().splitlines() or ["the check gave no answer"])[-1])
        raise _CannotRunError(said.removeprefix("ckptlint: "))
    return dict(json.loads(output))


def _wrong(report: Mapping[str, Any]) -> str:
    """The first findings of a report: code, what, where, what to do; or why there is no verdict."""
    findings = [item for part in report["checkpoints"] for item in part["findings"] if not item["ignored"]]
    leads: dict[str, Any] = {}
    for item in findings:
        if item["severity"] != "info":
            leads.setdefault(item["group"], item)  # only the first of a group has a hint
    worst = sorted(leads.values(), key=lambda item: item["severity"] != "error")
    crashed = [f"{rule['code']} {rule['error']}" for part in report["checkpoints"] for rule in part["failed"]]
    why = [*report["not_found"], *report["unreadable"], *crashed]
    if not worst:
        return f"could not be judged: {printable('; '.join(why))}"
    lines = [f"did not pass: {plural(len(worst), 'problem')}", *map(_sentence, worst[:_SHOWN]), *why]
    return "\n  ".join(map(printable, lines))


def _sentence(finding: Mapping[str, Any]) -> str:
    where = [place for place in (finding["fqn"], finding["file"]) if place and place not in finding["message"]]
    what = f"{finding['severity']} {finding['code']}: {finding['message']}"
    what += f" ({', '.join(where)})" if where else ""
    return f"{what}. What to do: {finding['hint']}" if finding["hint"] else what


def _point_to(step: Path, folder: Path | None) -> None:
    """Let `latest.good` name a step, at once or not at all."""
    mark = (folder or step.parent) / GOOD
    target, new = os.path.relpath(step, mark.parent), fresh_name(mark)
    try:
        try:
            new.symlink_to(target)
        except (OSError, NotImplementedError):  # a file system without links
            write_whole(mark, f"{target}\n")
        else:
            new.replace(mark)
    except OSError as error:
        log.warning("ckptlint: %s passes, but %s could not be written: %s", step.name, mark, error)
        with suppress(OSError):
            new.unlink(missing_ok=True)
