"""Running the rules: each alone, a crash of one never stops or hides the others."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from ckptlint.analysis.needs import NEEDS
from ckptlint.depth import Depth
from ckptlint.errors import BudgetError, OwnFileError
from ckptlint.formats.pickles.safe_pickle import paused_gc
from ckptlint.lint.report import UNREADABLE, CheckpointReport, Diagnostic
from ckptlint.model import Checkpoint, Problem
from ckptlint.model.text import printable
from ckptlint.rule import CEILING, NotApplicable, Rule


@paused_gc()
def run_rules(ckpt: Checkpoint, rules: Iterable[Rule], depth: Depth) -> CheckpointReport:
    """What the rules make of one checkpoint, at the depth that was read."""
    report = CheckpointReport(ckpt)
    crashes: list[Problem] = []
    rules = tuple(rules)
    for rule in rules:
        if rule.after:
            continue  # what it judges is not known yet
        if rule.live and ckpt.ranks is None:
            report.not_run[rule.code] = "needs a running job"
        elif not depth.reaches(rule.depth):
            report.not_run[rule.code] = f"needs --depth {rule.depth}"
        elif rule.expects and ckpt.reference is None:
            report.not_run[rule.code] = "needs --expect"
        elif not ckpt.readable and not rule.always:
            report.not_run[rule.code] = UNREADABLE.format(ckpt.metadata_file)
        else:
            crashes += run_rule(rule, ckpt, report)
    report.diagnostics[:] = _without_duplicates(report.diagnostics)
    for rule in rules:
        if rule.after == "rules":
            run_rule(rule, replace(ckpt, problems=crashes), report)
    return report


def _without_duplicates(diagnostics: list[Diagnostic]) -> list[Diagnostic]:
    """One finding for each fault: of rules of which one yields to the other, the worse; of equal ones the other's.

    A finding is left out where the others report all of its keys, or one of its partners.
    """
    margins: dict[str, dict[str, int]] = defaultdict(dict)  # how much worse the findings of another rule must be
    for item in diagnostics:
        for code in item.rule.yields_to:
            margins[item.code][code] = 0
            margins[code][item.code] = 1
    worst: dict[tuple[str, str], int] = {}
    for item in diagnostics:
        if item.code in margins and not item.finding.is_apart:
            for key in item.keys:
                worst[item.code, key] = max(item.severity, worst.get((item.code, key), 0))

    def is_duplicate(item: Diagnostic) -> bool:
        others = margins[item.code].items()
        reported = [
            any(worst.get((code, key), 0) >= item.severity + margin for code, margin in others)
            for key in (*item.keys, *item.finding.partners)
        ]
        return any(reported[len(item.keys) :]) or (bool(item.keys) and all(reported[: len(item.keys)]))

    return [item for item in diagnostics if item.code not in margins or item.finding.is_apart or not is_duplicate(item)]


def run_rule(rule: Rule, ckpt: Checkpoint, report: CheckpointReport) -> list[Problem]:
    """Run one rule, whose findings join the report; returns the crash, if it crashed."""
    started = time.perf_counter()
    hint = f"to go on without it, run again with --ignore {rule.code}"
    # what ranks found themselves under the code of the rule
    findings = () if ckpt.ranks is None else ckpt.ranks.findings
    by_ranks = tuple(finding for finding in findings if finding.code == rule.code)
    try:
        if rule.whole and ckpt.partial_because:
            raise NotApplicable(ckpt.partial_because)
        for is_met, otherwise in (NEEDS[word] for word in rule.needs):
            if not is_met(ckpt):
                raise NotApplicable(otherwise)
        for finding in rule.check(replace(ckpt, rank_findings=by_ranks) if by_ranks else ckpt, **rule.values):
            severity = min(rule.severity, finding.severity or rule.severity, CEILING[finding.confidence])
            report.diagnostics.append(Diagnostic(rule, finding, severity))
        report.passed.append(rule.code)
    except NotApplicable as reason:
        report.not_applicable[rule.code] = str(reason)
    except BudgetError as error:
        report.failed[rule.code] = text = printable(str(error))
        return [Problem("crashed", "", f"{rule.code} {rule.name} cannot tell: {text}", hint=hint, fqn=rule.code)]
    except OwnFileError:
        raise
    except Exception as error:  # the one place where any error of a rule is caught
        import traceback

        report.failed[rule.code] = text = printable(f"{type(error).__name__}: {error}"[:300])
        lines = tuple(map(printable, traceback.format_exception(error)[-2].splitlines()))
        message = f"{rule.code} {rule.name} crashed: {text}"
        return [Problem("crashed", "", message, detail=lines, hint=hint, fqn=rule.code)]
    finally:
        report.seconds[rule.code] = time.perf_counter() - started
    return []
