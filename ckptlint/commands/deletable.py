"""`ckptlint deletable`: the steps of a run that a retention may delete."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from ckptlint.commands.check import judge, requested
from ckptlint.commands.latest import OF_REPORTS
from ckptlint.commands.shared import ENVIRONMENT, WithSettings, check_options, progress, say, show_text
from ckptlint.lint.settings.options import LOOSENING

if TYPE_CHECKING:
    from ckptlint.lint.steps.retention import Retention

SCHEMA = "ckptlint.deletable/1"


@click.command(cls=WithSettings, context_settings=ENVIRONMENT)
@click.argument("run_dir")
@click.option("--keep", type=click.IntRange(min=1), required=True, metavar="N", help="How many whole steps must stay.")
@click.option("--format", "answer", type=click.Choice(["text", "json"]), default="text", show_default=True)
@check_options(but=(*OF_REPORTS, *LOOSENING, "before"))
def deletable(run_dir: str, keep: int, answer: str, **options: Any) -> None:
    """Print the paths of the steps of a run that may be deleted, and nothing else.

    It deletes nothing: `| xargs -d '\\n' -r rm -r --` does. These steps stay: the N newest whole ones, every newer
    one, those that a tracker or a link names, the trainer's best one, and those that could not be judged. stderr says
    why each step stays; with -q only where the exit code is not 0. All rules judge each step at their own severities,
    at depth files or deeper; options and settings can only make this stricter. ckptlint compares each step with older
    ones, as `latest` does.

    Exit codes: 0 N whole steps stay, 1 there are fewer (nothing is printed), 2 wrong use, 3 no step there, 4 the run
    could not be judged or changed meanwhile, or the folder holds several runs.
    """
    request = requested(options, "delete")
    from ckptlint.lint.steps.retention import deletable as judged_run
    from ckptlint.lint.steps.trust import looks_at
    from ckptlint.model.text import JSON_ESCAPE, inert
    from ckptlint.reporters.run import decision_table, not_judged_by, retention_lines

    judged, compare = looks_at(request, judge)
    with progress(options["no_progress"]):
        retention = judged_run(run_dir, keep, judged, compare)
    if answer == "json":
        show_text(inert(_as_json(retention), JSON_ESCAPE))
    else:
        is_told = options["quiet"] < (2 if retention.exit_code else 1)
        if retention.decisions and is_told:
            click.echo(inert(decision_table(retention)) + "\n", err=True)
        say(*(*retention_lines(retention), *(not_judged_by(request) if retention.paths else [])) if is_told else ())
        show_text("".join(f"{path}\n" for path in retention.paths))
    sys.exit(retention.exit_code)


def _as_json(retention: Retention) -> str:
    from ckptlint.reporters.json_report import step_object

    document = {
        "schema": SCHEMA,
        "exit_code": retention.exit_code,
        "run": retention.run,
        "keep": retention.keep,
        "delete": retention.paths,
        "refused": retention.refused or None,
        "steps": [
            step_object(decision.step) | {"stays": decision.kept_because or None} for decision in retention.decisions
        ],
    }
    return json.dumps(document, indent=2) + "\n"
