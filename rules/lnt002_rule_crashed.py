from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Location, Severity, rule


@rule("LNT002", "rule-crashed", Severity.ERROR, always=True, fixed=True, after="rules")
def rule_crashed(ckpt: Checkpoint) -> Iterator[Finding]:
    """A rule crashed or gave up.

    What it checks:
        Every other rule finished. If one crashes, the others still run.
    Why it matters:
        A rule that did not finish must not look like one that passed, so the verdict is incomplete (exit 4).
    Usual causes:
        A bug in ckptlint, a writer it does not know, or so many tangled chunks that the rule stopped before it was
        sure.
    How to fix:
        Report it, with the checkpoint's `.metadata` if you may share it. Until then, ignore the rule by its own code.
    """
    for problem in ckpt.problems_of("crashed"):
        code = problem.fqn or ""
        yield replace(Finding.of_problem(problem), at=Location(label=code), identity=(code,))
