"""Running the rules: each alone, a crash of one never stops or hides the others."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable
from dataclasses import replace

from ckptlint.lint.report import CheckpointReport, Diagnostic
from ckptlint.model import Checkpoint, Problem
from ckptlint.model.text import printable
from ckptlint.rule import DEPTHS, Depth, NotApplicable, Rule

CRASH_CODE, UNUSED_CODE = "LNT002", "LNT001"


def run_rules(ckpt: Checkpoint, rules: Iterable[Rule], depth: Depth) -> CheckpointReport:
    """What the rules make of one checkpoint, at the depth that was read."""
    report = CheckpointReport(ckpt)
    crashes: list[Problem] = []
    crash_rule = None
    for rule in rules:
        if rule.code == CRASH_CODE:
            crash_rule = rule
        elif rule.code == UNUSED_CODE:
            pass  # what it judges is known after all checkpoints: `report_unused`
        elif rule.live and ckpt.ranks is None:
            report.not_run[rule.code] = "needs a running job"
        elif DEPTHS.index(rule.needs) > DEPTHS.index(depth):
            report.not_run[rule.code] = f"needs --depth {rule.needs}"
        elif rule.expects and ckpt.reference is None:
            report.not_run[rule.code] = "needs --expect"
        elif not ckpt.readable and not rule.always:
            report.not_run[rule.code] = f"needs {ckpt.metadata_file}"
        else:
            crashes += _run(rule, ckpt, report)
    if crash_rule is not None:
        _run(crash_rule, replace(ckpt, problems=crashes), report)
    return report


def report_unused(report: CheckpointReport, rule: Rule, problems: list[Problem]) -> None:
    """Run LNT001 on ignores that matched nothing; its findings join the report."""
    _run(rule, replace(report.checkpoint, problems=problems), report)


def _run(rule: Rule, ckpt: Checkpoint, report: CheckpointReport) -> list[Problem]:
    """Run one rule; returns the crash, if it crashed."""
    started = time.perf_counter()
    try:
        for finding in rule.check(ckpt, **rule.values):
            severity = rule.severity if finding.severity is None else min(rule.severity, finding.severity)
            report.diagnostics.append(Diagnostic(rule, finding, severity))
        report.passed.append(rule.code)
    except NotApplicable as reason:
        report.not_applicable[rule.code] = str(reason)
    except Exception as error:  # the one place where any error of a rule is caught
        text = printable(f"{type(error).__name__}: {error}"[:300])
        report.failed[rule.code] = text
        lines = tuple(printable(line) for line in traceback.format_exception(error)[-2].splitlines())
        return [Problem("crashed", "", f"{rule.code} {rule.name} crashed: {text}", detail=lines, fqn=rule.code)]
    finally:
        report.seconds[rule.code] = time.perf_counter() - started
    return []
