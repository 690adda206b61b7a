"""One fact, one source: what each view of a run says of its steps."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import simulated_runs
from click.testing import CliRunner
from simulated_runs import REQUEST, Run
from support import drawing, examples

from ckptlint.commands.main import cli
from ckptlint.errors import NothingToCheckError
from ckptlint.lint.report import Report
from ckptlint.lint.run import run
from ckptlint.lint.steps.retention import deletable
from ckptlint.lint.steps.trust import looks_at, newest_good, runs_at
from ckptlint.reporters import REPORTERS
from ckptlint.reporters.style import Style

Facts = dict[str, tuple[str, int]]
"""Name of a step -> its verdict, and the bytes of its payload."""


def of(rows: list[dict[str, Any]]) -> Facts:
    return {Path(row["path"]).name: (row["verdict"], row["bytes"]) for row in rows}


def views(made: Run) -> dict[str, Facts]:
    """What `--all-steps`, `deletable`, `latest` and `watch --once` say of a run."""
    path = str(made.folder)

    @cache
    def judge(step: str) -> Report:
        return run(REQUEST.only(step))

    request = drawing(REQUEST)
    compare = looks_at(request, run)[1]
    whole = json.loads(REPORTERS["json"](run(request.only(path)._replace(all_steps=True)), Style()))
    ((_, folder),) = runs_at(path)
    options = ["--once", "--interval", "0", "--jsonl", "--isolated", "--depth", str(REQUEST.depth)]
    lines = [*map(json.loads, CliRunner().invoke(cli, ["watch", path, *options]).stdout.splitlines())]
    return {
        "--all-steps": of(whole["steps"]),
        "deletable": of(deletable(path, 1, judge, compare).rows()),
        "latest": of(newest_good(folder, path, judge, compare=compare).rows()),
        "watch": of(lines),
    }


def disagreements(made: Run) -> list[str]:
    """What two views say differently of one step, a sentence each.

    `deletable` compares each step with all older ones and `latest` with the one before: one that passes by itself may
    be refused there, by either. A step that the tracker does not name yet was not judged by `watch`, and what lies in
    a step without a checkpoint may be of a layout that nobody knows: for `deletable` a doubt.
    """
    try:
        found = views(made)
    except NothingToCheckError:
        return []
    every, wrong = found["--all-steps"] or found["deletable"], []
    for view, facts in found.items():
        missing = every.keys() - facts.keys() if view != "latest" and (facts or view != "--all-steps") else set[str]()
        wrong += [f"{view} lacks {name}" for name in {*missing, *(facts.keys() - every.keys())}]
        for name in facts.keys() & every.keys():
            (verdict, size), (own, own_size) = every[name], facts[name]
            is_stricter = view in ("deletable", "latest") and verdict == "passes"
            if own not in (verdict, "not judged") and not is_stricter:
                wrong.append(f"{name}: {view} says {own}, --all-steps {verdict}")
            if own_size != size:
                wrong.append(f"{name}: {view} says {own_size} bytes, --all-steps {size}")
    return wrong


@pytest.mark.sweep
def test_views_agree(tmp_path: Path) -> None:
    layouts, unfinished = [*simulated_runs.LAYOUTS.values()], 0
    for seed in range(examples(4, 60)):
        layout = layouts[seed % len(layouts)]
        folder = tmp_path / str(seed)
        folder.mkdir()
        made = simulated_runs.simulated(folder, Random(f"{layout.name} {seed}"), layout)
        assert disagreements(made) == [], seed
        unfinished += len(made.saved) - len(made.whole())
    assert unfinished
