"""One answer on each step of a run, whatever its layout and whatever lies beside: each view, and what is known."""

from __future__ import annotations

import json
import os
import shutil
from functools import cache
from pathlib import Path
from random import Random

import drawn_runs
import pytest
from drawn_runs import DrawnRun
from simulated_runs import REQUEST
from support import SWEEP, drawing, examples
from support import run as command

from ckptlint.errors import NothingToCheckError, UnknownLayoutError
from ckptlint.lint.report import Report
from ckptlint.lint.run import run
from ckptlint.lint.settings import request
from ckptlint.lint.steps.retention import deletable
from ckptlint.lint.steps.trust import looks_at, newest_good, newest_passing, runs_at, steps_in, verdict_of
from ckptlint.reporters import REPORTERS
from ckptlint.reporters.style import Style
from ckptlint.vocabulary.frameworks import step_number

RUNS = int(os.environ.get("RUNS", examples(6, 40)))
"""How many runs are drawn: `RUNS=1000 pytest tests/lint/test_drawn_runs.py`."""
CODES = {"passes": {0}, "lacks parts": {0}, "fails": {1}, "unfinished": {1, 3}, "not judged": {4}, "gone": {3}}
"""Verdict on a step -> the exit codes of a check of it; warnings and broken exports make a pass 1."""


def disagreements(made: DrawnRun, with_commands: bool) -> list[str]:
    """What two views say differently of one step, and what is not so by what is known, a sentence each."""
    path, wrong = str(made.folder), list[str]()

    @cache
    def judge(step: str) -> Report:
        return run(drawing(REQUEST).only(step))

    first_look, compare = looks_at(drawing(REQUEST), run)
    every = run(drawing(REQUEST).only(path)._replace(all_steps=True))
    alone = {name: judge(f"{path}/{name}") for name in made.labels}
    table = {step.name: step for step in steps_in(every)}
    try:
        ((_, folder),) = runs_at(path)
        search = newest_good(folder, path, first_look, compare=compare)
        kept = deletable(path, 1, first_look, compare)
    except UnknownLayoutError:  # of files with such names one alone that can be read is no step
        return [] if step_number(made.newest) is None else ["the steps are not known"]
    except NothingToCheckError as error:
        return [f"no step is there: {error}"]
    latest = {step.name: step for step in [*search.skipped, *([search.newest] if search.newest else [])]}
    whole = {decision.step.name: decision.step for decision in kept.decisions}

    for name, report in alone.items():
        is_refused = made.refused and name == made.newest  # by its own path a user names what the link leads to
        told = latest[name] if is_refused else verdict_of(report)
        if len(made.labels) > 1 and name not in table and table:
            wrong.append(f"--all-steps lacks {name}")
        if name not in whole:
            wrong.append(f"deletable lacks {name}")
        verdicts = {"--all-steps": table.get(name), "latest": latest.get(name)}
        for view, step in verdicts.items():
            if step is not None and step.verdict not in (told.verdict, *(["lacks parts"] * (told.verdict == "passes"))):
                wrong.append(f"{name}: alone it {told.verdict} ({told.why}), {view}: {step.verdict} ({step.why})")
        if len({step.verdict for step in verdicts.values() if step is not None}) > 1:
            wrong.append(f"{name}: {verdicts}")
        if (step := whole.get(name)) and step.verdict != told.verdict and told.verdict != "passes":
            wrong.append(f"{name}: alone it {told.verdict} ({told.why}), deletable: {step.verdict} ({step.why})")
        if (
            not is_refused
            and report.exit_code not in CODES[told.verdict]
            and not (told.verdict == "passes" and told.warnings)
        ):
            wrong.append(f"{name}: it {told.verdict}, exit code {report.exit_code}")
        if made.labels[name] == "broken" and told.verdict == "passes":
            wrong.append(f"{name} is broken, and passes")
        if made.labels[name] == "whole" and (told.verdict != "passes" or report.exit_code):
            wrong.append(f"{name} is whole: {told.verdict}, {told.why or report.diagnostics}")

    names = [*made.labels]
    recommended = search.newest.name if search.path and search.newest else ""
    printed = newest_passing(table.values()).get(path) if table else None
    if table and search.is_certain and (printed.name if printed else "") != recommended:
        wrong.append(f"latest says {recommended}, --all-steps {printed}")
    if recommended and made.labels[recommended] == "broken":
        wrong.append(f"{recommended} is recommended, and broken")
    if recommended and made.labels[recommended] == "lesser":
        at = names.index(recommended)
        if at and made.labels[names[at - 1]] == "whole":
            wrong.append(f"{recommended} is recommended, and the step before it holds more")
    if made.labels[made.newest] == "whole" and recommended != made.newest:
        wrong.append(f"{made.newest} is whole, {recommended or 'nothing'} is recommended")

    newest = run(drawing(REQUEST).only(path))
    code = 4 if made.refused else alone[made.newest].exit_code
    expected = {1 if code == 3 else code} | ({1 if made.root == "broken" else 0} if made.root else set())
    if any(item.finding.of_run and newest.is_failing(item) for item in newest.diagnostics):
        expected.add(1)  # of the run's tracker, which a step that is a link does not have beside it
    worst = next(code for code in (1, 4, 3, 0) if code in expected)
    if newest.exit_code != worst:
        wrong.append(f"a check of the run has exit code {newest.exit_code}, its newest step {expected}: {newest}")

    for report in (every, newest):
        for format_ in REPORTERS if SWEEP or with_commands else ():
            REPORTERS[format_](report, Style())
    rows = json.loads(REPORTERS["json"](every, Style()))["steps"]
    if {(row["name"], row["verdict"]) for row in rows} != {(s.name, s.verdict) for s in table.values()}:
        wrong.append(f"json: {rows}")
    text = "".join(REPORTERS["full"](every, Style()).split())
    if table and (f"Theneweststepthatpasses:{search.path}" in text) != bool(search.path):
        wrong.append(f"latest says {search.path}, the text does not")
    if with_commands:
        codes = {
            command(path, "--isolated").returncode: newest.exit_code,
            command(path, "--all-steps", "--isolated").returncode: every.exit_code,
        }
        wrong += [f"exit code {code}, in Python {other}" for code, other in codes.items() if code != other]
        done = command("latest", path, "--isolated")
        if (done.returncode, done.stdout.strip()) != (search.exit_code, search.path or ""):
            wrong.append(f"latest: {done.returncode} {done.stdout}, in Python {search.exit_code} {search.path}")
        done = command("deletable", path, "--keep", "1", "--isolated")
        if (done.returncode, done.stdout.split("\n")[:-1]) != (kept.exit_code, [*kept.paths]):
            wrong.append(f"deletable: {done.returncode} {done.stdout}, in Python {kept.exit_code} {kept.paths}")
    return wrong


@pytest.mark.sweep
def test_each_view_has_one_answer_and_a_true_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "CHEAP_BYTES", 1)  # numbers are drawn from large steps alone
    layouts, labels = [*drawn_runs.LAYOUTS], set[str]()
    wrong = []
    for seed in range(RUNS):
        folder = tmp_path / str(seed) / "run"
        folder.mkdir(parents=True)
        layout = layouts[seed % len(layouts)]
        made = drawn_runs.drawn(folder, Random(f"{layout} {seed}"), drawn_runs.LAYOUTS[layout])
        labels |= {*made.labels.values()}
        if sentences := disagreements(made, with_commands=seed % 5 == 0):
            wrong.append("\n  ".join([f"{seed} {layout} {made.labels} {made.notes}", *sentences]))
        shutil.rmtree(folder.parent)
    assert labels >= {"whole", "broken"}
    assert not wrong, "\n".join([*wrong, f"{len(wrong)} of {RUNS}"])
