"""`ckptlint latest`: the newest step of a run that passes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ckptlint.commands.check import judge, requested
from ckptlint.commands.shared import ENVIRONMENT, WithSettings, check_options, progress, say, show_text
from ckptlint.errors import AccessError
from ckptlint.lint.settings.options import tokens
from ckptlint.storage.paths import shown
from ckptlint.vocabulary.parts import PARTS

if TYPE_CHECKING:
    from ckptlint.lint.steps.trust import Search

SCHEMA = "ckptlint.latest/1"
OF_REPORTS = ("all-steps", "ascii", "color", "format", "max-per-rule", "output", "statistics", "verbose")
"""The options of `check` that are about its report alone."""


@click.command(cls=WithSettings, context_settings=ENVIRONMENT)
@click.argument("run_dir")
@click.option(
    "--require",
    multiple=True,
    metavar="PARTS",
    help=f"Which parts the step must hold: {', '.join(PARTS)}.  [default: those of the step before it]",
)
@click.option("--before", type=click.IntRange(min=0), metavar="STEP", help="Look only at steps below this number.")
@click.option("--format", "answer", type=click.Choice(["text", "json"]), default="text", show_default=True)
@check_options(but=(*OF_REPORTS, "exit-zero", "before"))
def latest(run_dir: str, require: tuple[str, ...], before: int | None, answer: str, **options: Any) -> None:
    """Print the path of the newest step that has no errors, and nothing else.

    ckptlint judges the steps from the newest down, with the options of `check`. --ignore leaves a rule out; no option
    makes an error less severe. stderr says which steps were skipped, and why; with -q only that,
    with -qq nothing.
    Without --require a step must hold the same parts as the finished step before it. ckptlint also skips a step that is
    a copy of the step before it.

    Exit codes: 0 found, 1 no step passes, 2 wrong use, 3 no step there, 4 a newer step could not be judged, or the
    folder holds several runs.
    """
    request = requested(options, "resume")
    from ckptlint.lint.steps.trust import looks_at, newest_good, runs_at
    from ckptlint.model.text import JSON_ESCAPE, inert, printable
    from ckptlint.reporters.run import not_judged_by, search_lines

    judged, compare = looks_at(request, judge)
    runs = runs_at(run_dir)
    with progress(options["no_progress"]):
        asked = tokens(require), before, compare
        searches = [newest_good(run, path, judged, *asked) for path, run in runs]
    if answer == "json":
        show_text(inert(_as_json(searches), JSON_ESCAPE))
    elif len(searches) > 1:
        click.echo(inert(_table(searches, run_dir)) + "\n", err=True)
        say(f"{shown(run_dir)} holds {len(searches)} runs: name one of them")
    elif (newest := searches[0].path) and not (newest.isprintable() and inert(newest) == newest):
        raise AccessError(f"{printable(newest)} passes, but its path is not plain text: use --format json")
    else:
        about = [] if options["quiet"] or not searches[0].path else not_judged_by(request)
        say(*(*search_lines(searches[0], options["quiet"]), *about))
        show_text(f"{searches[0].path}\n" if searches[0].path else "")
    sys.exit(_exit_code(searches))


def _exit_code(searches: Sequence[Search]) -> int:
    """The worst; of several runs no one is the answer, whatever they hold."""
    return searches[0].exit_code if len(searches) == 1 else 4 if searches else 3


def _table(searches: Sequence[Search], top: str) -> str:
    """What was skipped and what was found in each of several runs, which are named from the folder above them."""
    from ckptlint.model.text import table

    rows = []
    for search in searches:
        skipped = [f"{step.name} {step.verdict}{f' ({step.code})' if step.code else ''}" for step in search.skipped]
        newest = search.newest.name if search.newest else "none"
        rows.append((search.run.removeprefix(f"{top.rstrip('/')}/"), newest, "; ".join(skipped)))
    return table(rows, ("run", "newest good step", "newer steps, skipped"))


def _as_json(searches: Sequence[Search]) -> str:
    from ckptlint.reporters.json_report import step_object

    runs = [
        {
            "run": search.run,
            "step": step_object(search.newest) if search.newest and search.exit_code == 0 else None,
            "passes": step_object(search.newest) if search.newest else None,
            "skipped": [step_object(step) for step in search.skipped],
            "tracker": search.tracker or None,
        }
        for search in searches
    ]
    return json.dumps({"schema": SCHEMA, "exit_code": _exit_code(searches), "runs": runs}, indent=2) + "\n"
