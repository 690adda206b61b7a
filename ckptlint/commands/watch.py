"""`ckptlint watch`: the steps of a running job, each checked once it is finished."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import click

from ckptlint.commands.check import TAKES_REPORT, NoPath, check
from ckptlint.commands.shared import ENVIRONMENT, WithSettings, check_options, show_text, tell
from ckptlint.errors import AccessError, CkptlintError, ConfigError, NothingToCheckError
from ckptlint.loaders.discover import find_checkpoints
from ckptlint.loaders.run.finished import step_state
from ckptlint.loaders.run.folder import read_tracker
from ckptlint.loaders.run.steps import components, not_followed, steps_of, sub_folder
from ckptlint.model.text import human_duration, plural, printable
from ckptlint.sandbox import isolated
from ckptlint.storage.folder import Folder
from ckptlint.storage.locate import folder_at
from ckptlint.storage.paths import shown

if TYPE_CHECKING:
    from ckptlint.lint.report import Report

_LEVELS = 3  # a step, its components, theirs (verl)

Sizes = dict[str, tuple[int, float]]


def _seconds(_context: click.Context, _param: click.Parameter, value: str) -> float:
    """The seconds of a time such as `90s`, `30m` or `2h`."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)([smhd])", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not a time such as 90s, 30m or 2h")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


@click.command(cls=WithSettings, context_settings=ENVIRONMENT)
@click.argument("run_dir")
@click.option(
    "--interval", type=click.FloatRange(min=0), default=30, show_default=True, help="Look every so many seconds."
)
@click.option(
    "--stale", callback=_seconds, metavar="TIME", default="30m", show_default=True,
    help="Report an unfinished step when nothing in it has changed for this long.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="Check the finished steps, and exit with the worst code.")
@click.option("--exec", "command", metavar="CMD", help="Run CMD on each step that does not exit with 0.")
@click.option("--jsonl", is_flag=True, help="Print one line of JSON for each step, in place of the reports.")
@check_options(but=["all-steps"])
@click.pass_context
def watch(
    context: click.Context,
    /,
    run_dir: str,
    interval: float,
    stale: float,
    once: bool,
    command: str | None,
    jsonl: bool,
    **options: Any,
) -> None:
    """Check each step of a running job once, as soon as it is finished.

    CMD finds CKPTLINT_STEP_PATH, CKPTLINT_EXIT_CODE and CKPTLINT_REPORT (a JSON file) in its environment. A file that
    --output names holds the report on the last step. Ctrl-C ends the watch (130).

    Exit codes of --once, the first that applies: 1 a step has findings, or its save did not finish, 4 a step could not
    be read, 3 no step is finished, 0 all pass.
    """
    with suppress(NoPath):  # a wrong option ends the watch now, not in an hour
        context.invoke(check, paths=(), **options)
    reports: list[Report] = []
    if jsonl:
        context.meta[TAKES_REPORT] = reports.append
    if options["quiet"] < 2:
        tell(_banner(run_dir, interval, stale, once))
    codes: list[int] = []
    with TemporaryDirectory(prefix="ckptlint-") as folder:
        for event in events(run_dir, interval, once, stale):
            text = event.text or f"{event.step} is finished"
            if event.text or options["quiet"] < 2:
                tell(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}")
            step = f"{run_dir.rstrip('/') or '/'}/{event.step}"
            code = 4
            reports.clear()
            if event.kind != "unread":
                report = Path(folder, f"{len(codes)}.json")
                code = _lint_step(context, step, report if command else None, options)
                if code and is_vanishing(step, event):
                    text = f"somebody is removing {event.step}: its findings do not count"
                    tell(text)
                    continue
                if event.kind == "unfinished" and not options["exit_zero"]:
                    code = 1  # whatever can be read of it
            codes.append(code)
            if jsonl:
                show_text(_line(event, step, code, reports) + "\n")
            if code and command and event.kind != "unread":
                _execute(command, step, code, report)
    if not codes:
        raise NothingToCheckError(f"nothing to check: no step of {run_dir} is finished")
    sys.exit(next((code for code in (1, 4, 3) if code in codes), 0))


def _banner(path: str, interval: float, stale: float, once: bool) -> str:
    """What is watched, how often, and what lies there."""
    steps = steps_of(_run_folder(path))
    there = f"{plural(len(steps), 'step')} there" + (f", the newest {printable(steps[0].name)}" if steps else "")
    often = f"looks twice, {interval:g} s apart" if once else f"looks every {interval:g} s"
    patience = f"reports an unfinished step after {human_duration(stale)} without a change"
    return f"watching {shown(path)}: {there}; {often}; {patience}"


def _line(event: Event, path: str, code: int, reports: Sequence[Report]) -> str:
    """What became of a step, as one line of JSON: the fields of a step in a report, and when and how it was told."""
    from ckptlint.lint.steps import JudgedStep, verdict_of
    from ckptlint.reporters.json_report import step_object
    from ckptlint.reporters.style import JSON_ESCAPE, inert

    judged = verdict_of(reports[0]) if reports else JudgedStep(0, "", "", "not judged", why=event.text)
    if event.kind == "unfinished":
        judged = replace(judged, verdict="unfinished", why=event.text)
    told = step_object(replace(judged, name=printable(event.step), path=shown(path.rstrip("/"))))
    about = {"event": event.kind, "time": datetime.now(UTC).isoformat(timespec="seconds"), "exit_code": code}
    return inert(json.dumps(about | told | {"step": event.number}), JSON_ESCAPE)


def _lint_step(context: click.Context, step: str, report: Path | None, options: dict[str, Any]) -> int:
    """The exit code of `check`; what it could not write or read is no reason to stop watching."""
    if report is not None:
        options = options | {"output": (*options["output"], f"json={report}")}
    context.obj = replace(context.obj[0], unread=()), [step]  # said once, at the start
    try:
        context.invoke(check, paths=(step,), **options)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 4
    except ConfigError:
        raise
    except CkptlintError as error:
        tell(error)
        return 4
    raise AssertionError("check ends in an exit code")


def _execute(command: str, step: str, code: int, report: Path) -> None:
    """Run the user's command; what it is about is in its environment, where no name can be taken for a command."""
    about = {
        "CKPTLINT_STEP_PATH": step,
        "CKPTLINT_EXIT_CODE": str(code),
        "CKPTLINT_REPORT": str(report) if report.exists() else "",
    }
    # the shell is the user's own: CMD comes from the command line, like a recipe of make
    ended = subprocess.run(command, shell=True, stdin=subprocess.DEVNULL, env=os.environ | about, check=False)  # noqa: S602
    if ended.returncode:
        tell(f"the command of --exec exited with {ended.returncode}")


# ---------------------------------------------------------------- which step is finished


@dataclass(frozen=True, slots=True)
class Event:
    """Something to act on.

    Attributes:
        step: the name of the step's folder, "" for the run itself.
        number: of the step, None for the run itself.
        text: what happened, as a sentence; "" for a finished step.
        files: the files of the step at the last look.
    """

    kind: Literal["finished", "unfinished", "unread"]
    step: str = ""
    number: int | None = None
    text: str = ""
    files: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Memory:
    """What a watch remembers: the sizes of the last look and since when they are so, and the steps handed out."""

    since: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, Sizes] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    left_behind: set[str] = field(default_factory=set)
    trouble: dict[str, str] = field(default_factory=dict)

    def told(self, step: str, number: int | None, error: CkptlintError) -> list[Event]:
        """The error as an event, unless it was the last one there: a store that is away for an hour is one message."""
        if self.trouble.get(step) == str(error):
            return []
        self.trouble[step] = str(error)
        return [Event("unread", step, number, str(error))]


def events(
    path: str,
    interval: float,
    once: bool = False,
    stale: float = inf,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Event]:
    """Each finished step once, oldest first, and each that stays unfinished once; without end unless `once`.

    A step is finished when what is written last is there and its files did not change between two looks, one interval
    apart: `.metadata`; for Megatron `metadata.json` and the tracker too, where the run has one. A step that vanishes is
    forgotten: one of the same name is a new one.

    Args:
        interval: seconds between two looks.
        once: look twice, tell what is there, and end.
        stale: seconds without a change after which an unfinished step is told, whether or not a later one finished.

    Raises:
        NothingToCheckError: the path is no folder, or is a checkpoint itself.
        AccessError: the first look was refused.
    """
    memory = _Memory()
    yield from _look(path, memory, stale)
    while True:
        sleep(interval)
        try:
            yield from _look(path, memory, stale)
            memory.trouble.pop("", None)
        except CkptlintError as error:
            yield from memory.told("", None, error)
        if once:
            return


def _look(path: str, memory: _Memory, stale: float) -> list[Event]:
    run = _run_folder(path)
    numbers = {step.name: step.number for step in reversed(steps_of(run)) if step.is_folder}
    names = [*numbers]
    for gone in {*memory.sizes, *memory.trouble} - {"", *names}:
        memory.sizes.pop(gone, None)
        memory.since.pop(gone, None)
        memory.trouble.pop(gone, None)
        memory.finished.discard(gone)
        memory.left_behind.discard(gone)
    _, tracker = isolated(partial(read_tracker, run), 0)  # one of them is a pickle
    still: set[str] = set()
    found: list[Event] = []
    for name, number in numbers.items():
        if name in memory.finished:
            continue
        try:
            step = sub_folder(run, name)
            if step is None:
                raise AccessError(not_followed(run, name))
            sizes = dict(_sizes(step))
            if memory.sizes.get(name) == sizes:
                still.add(name)
                if _is_finished(step, number, tracker):
                    found.append(Event("finished", name, number, files=frozenset(sizes)))
            else:
                memory.since[name] = time.time()
            memory.sizes[name] = sizes
            memory.trouble.pop(name, None)
        except NothingToCheckError:  # it vanished meanwhile
            continue
        except CkptlintError as error:
            found += memory.told(name, number, error)
    memory.finished |= {event.step for event in found if event.kind == "finished"}
    newest = max((i for i, name in enumerate(names) if name in memory.finished), default=0)
    for place, name in enumerate(names):
        if name not in still - memory.finished - memory.left_behind:
            continue
        quiet = _quiet(memory.since[name], memory.sizes[name], run.entries[name].mtime)
        if place < newest:
            text = f"{name} is still unfinished, and {names[newest]} is finished"
        elif quiet >= stale:
            text = f"{name} is still unfinished: nothing in it has changed for {human_duration(quiet)}"
        else:
            continue
        memory.left_behind.add(name)
        found.append(Event("unfinished", name, numbers[name], text, frozenset(memory.sizes[name])))
    return sorted(found, key=lambda event: names.index(event.step))


def _quiet(since: float, sizes: Sizes, mtime: float) -> float:
    """Seconds since anything in a step changed: as the watch saw it, or as the times of its files say."""
    newest = max([mtime, *(written for _, written in sizes.values())])
    now = time.time()
    return max(now - since, now - newest if newest else 0.0)


def is_vanishing(path: str, event: Event) -> bool:
    """Whether a file of a step that was there at the last look is gone: what was read of it does not count."""
    try:
        return not event.files <= dict(_sizes(folder_at(path)[0])).keys()
    except CkptlintError:
        return True


def _run_folder(path: str) -> Folder:
    """The run folder, listed anew."""
    run, file = folder_at(path)
    if file:
        raise NothingToCheckError(f"{shown(path)} is a file: name the run folder")
    if not any(step.is_folder for step in steps_of(run)) and components(run):
        raise NothingToCheckError(f"{shown(path)} is a checkpoint: name the run folder that holds the steps")
    return run


def _sizes(folder: Folder, levels: int = _LEVELS, prefix: str = "") -> Iterator[tuple[str, tuple[int, float]]]:
    """Size and time of every file in a step."""
    for name, entry in folder.entries.items():
        if not entry.is_folder:
            yield prefix + name, (entry.size, entry.mtime)
        elif levels > 1 and (sub := sub_folder(folder, name)) is not None:
            yield from _sizes(sub, levels - 1, f"{prefix}{name}/")


def _is_finished(step: Folder, number: int, tracker: int | Literal["release"] | None) -> bool:
    """Whether everything that is written last is there; formats without such a mark only need a checkpoint."""
    state = step_state(step)
    if state == "unknown":
        try:
            find_checkpoints(step, all_steps=False)
        except NothingToCheckError:
            return False
        return True
    return state == "complete" and (not isinstance(tracker, int) or number <= tracker)
