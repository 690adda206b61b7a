"""`ckptlint watch`: the steps of a running job, each checked once it is finished."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import dropwhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from ckptlint.commands.check import emitter, judge, requested
from ckptlint.commands.shared import ENVIRONMENT, WithSettings, check_options, progress, say, show_text, write_file
from ckptlint.errors import CkptlintError, ConfigError, NothingToCheckError
from ckptlint.lint.steps.trust import JudgedStep, judge_step, with_parts
from ckptlint.loaders.events import Event, events, is_vanishing, steps_in_run
from ckptlint.loaders.run.steps import Step, run_at, steps_of
from ckptlint.model.text import JSON_ESCAPE, human_duration, inert, plural, printable
from ckptlint.progress import telling_ctrl_c
from ckptlint.reporters import REPORTERS
from ckptlint.reporters.json_report import step_object
from ckptlint.reporters.style import Style
from ckptlint.storage.paths import is_url, shown

if TYPE_CHECKING:
    from ckptlint.depth import Depth
    from ckptlint.lint.report import Report
    from ckptlint.storage.folder import Folder


def _seconds(_context: click.Context, _param: click.Parameter, value: str) -> float:
    """The seconds of a time such as `90s`, `30m` or `2h`."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)([smhd])", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not a time such as 90s, 30m or 2h")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


@click.command(cls=WithSettings, context_settings=ENVIRONMENT)
@click.argument("run_dir")
@click.option(
    "--interval", type=click.FloatRange(min=0), metavar="SECONDS", default=30, show_default=True,
    help="How long to wait between two looks.",
)  # fmt: skip
@click.option(
    "--stale", callback=_seconds, metavar="TIME", default="30m", show_default=True,
    help="Report an unfinished step after this time without a change in it.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="Check the finished steps, and exit with the worst code.")
@click.option("--exec", "command", metavar="CMD", help="Run CMD on each step that does not exit with 0.")
@click.option("--jsonl", is_flag=True, help="Print one line of JSON for each step, in place of the reports.")
@check_options(but=["all-steps", "before"])
def watch(
    run_dir: str, interval: float, stale: float, once: bool, command: str | None, jsonl: bool, **options: Any
) -> None:
    """Check each step of a running job once, as soon as it is finished.

    If the run folder does not exist yet, ckptlint waits for it. The CMD of --exec finds CKPTLINT_STEP_PATH,
    CKPTLINT_EXIT_CODE and CKPTLINT_REPORT (a JSON file) in its environment. A file that --output names holds the report
    on the last step. Ctrl-C ends the watch (130). --once names a step that may still be written, and does not count
    it.

    Exit codes of --once, the first that applies: 1 a step has findings, or its save did not finish, 4 a step could not
    be read, 3 no step is finished, 0 all pass.
    """
    emit = emitter(options, prints=not jsonl)
    emit_pass = emit if options["verbose"] else emitter(options | {"quiet": options["quiet"] or 1}, prints=not jsonl)
    request = requested(options, "job")
    open_run = partial(run_at, run_dir)
    if not once and not is_url(run_dir) and not os.path.lexists(run_dir):  # the job makes it when it starts
        say(f"{shown(run_dir)} does not exist yet: waiting for it, looks every {interval:g} s")
        while not os.path.lexists(run_dir):
            time.sleep(interval)
    if not options["quiet"]:
        say(_banner(open_run(), shown(run_dir), interval, stale, once))
    codes: list[int] = []
    with TemporaryDirectory(prefix="ckptlint-") as folder, telling_ctrl_c(lambda: _sum(codes)):
        for event in events(open_run, interval, once, stale):
            now = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
            if event.text:
                say(f"{now} {event.text}")
            step = f"{run_dir.rstrip('/') or '/'}/{event.step}"
            code, report, file = 4, None, Path(folder, f"{len(codes)}.json")
            if event.kind == "writing":
                if jsonl:
                    show_text(_line(event, step, None, _judged(open_run, event, step, request.depth)) + "\n")
                continue
            if event.kind != "unread":
                try:
                    with progress(options["no_progress"]):
                        report = judge(request.only(step))
                    code = report.exit_code
                    if not event.text and options["quiet"] < (2 if code else 1):
                        say(f"{now} {event.step} is finished{'' if code else ' and passes'}")
                    (emit if code else emit_pass)(report)
                    if command:
                        write_file(file, REPORTERS["json"](report, Style()))
                except ConfigError:
                    raise
                except CkptlintError as error:  # what cannot be read or written is no reason to stop watching
                    say(error)
                    code = 4
                if code and is_vanishing(open_run, event):
                    say(f"somebody is removing {event.step}: its findings do not count")
                    continue
                if event.kind == "unfinished" and not options["exit_zero"]:
                    code = 1  # whatever can be read of it
            codes.append(code)
            if jsonl:
                show_text(_line(event, step, code, _judged(open_run, event, step, request.depth, report)) + "\n")
            if code and command and event.kind != "unread":
                _execute(command, step, code, file)
    if not options["quiet"] and len(codes) > 1:
        say(_sum(codes))
    if not codes:
        raise NothingToCheckError(f"nothing to check: no step of {run_dir} is finished")
    sys.exit(next((code for code in (1, 4, 3) if code in codes), 0))


def _sum(codes: Sequence[int]) -> str:
    """How many steps ended how, in words."""
    counts = {"passed": codes.count(0), "failed": codes.count(1), "not judged": codes.count(3) + codes.count(4)}
    sums = ", ".join(f"{count:,} {word}" for word, count in counts.items() if count)
    return f"{plural(len(codes), 'step')}: {sums}" if codes else "no step is finished"


def _banner(run: Folder, name: str, interval: float, stale: float, once: bool) -> str:
    """What is watched, how often, and what is there."""
    steps = steps_in_run(run)
    there = f"{plural(len(steps), 'step')} there" + (f", the newest {printable(steps[0].name)}" if steps else "")
    often = f"looks again after {interval:g} s if a file is newer" if once else f"looks every {interval:g} s"
    patience = f"reports an unfinished step after {human_duration(stale)} without a change"
    return f"watching {name}: {there}; {often}; {patience}"


def _judged(
    open_run: Callable[[], Folder], event: Event, path: str, depth: Depth, report: Report | None = None
) -> JudgedStep:
    """What became of a step, as `latest` says it; without a report it was not judged."""

    def made(_path: str) -> Report:
        if report is None:
            raise CkptlintError(event.text)
        return report

    try:
        run = open_run()
        step = Step(event.number or 0, run, event.step)
        older = [*dropwhile(lambda candidate: candidate.name != step.name, steps_of(run))][1:]
        judged = with_parts(judge_step(step, path, made), step, (), older, depth)
    except CkptlintError as error:
        return JudgedStep(0, "", "", "not judged", why=str(error))
    return replace(judged, why=event.text) if event.text else judged


def _line(event: Event, path: str, code: int | None, step: JudgedStep) -> str:
    """One line of JSON: the fields of a step in a report, and when and how it ended."""
    fields = step_object(replace(step, name=printable(event.step), path=shown(path.rstrip("/"))))
    about = {"event": event.kind, "time": datetime.now(UTC).isoformat(timespec="seconds"), "exit_code": code}
    return inert(json.dumps(about | fields | {"step": event.number}), JSON_ESCAPE)


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
        say(f"the command of --exec exited with {ended.returncode}")
