"""LNT002: every rule ran to its end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Location, Severity, rule


@rule("LNT002", "rule-crashed", Severity.ERROR, always=True, fixed=True, after="rules")
def rule_crashed(ckpt: Checkpoint) -> Iterator[Finding]:
    """A rule ended in an error of its own.

    What it checks:
        Every other rule ran to its end. The engine hands this rule the crashes; the other rules went on.
    Why it matters:
        An unfinished rule must not look like a passed one, so the verdict is incomplete (exit 4).
    Usual causes:
        A mistake in ckptlint, or a dialect it does not know; or so many tangled chunks that a rule stopped before it
        was sure.
    How to fix:
        Report it, with the checkpoint's `.metadata` if you may share it; meanwhile leave the rule out by its own code.
    """
    for problem in ckpt.problems_of("crashed"):
        code = problem.fqn or ""
        yield replace(Finding.of_problem(problem), at=Location(label=code), missing=(code,))
