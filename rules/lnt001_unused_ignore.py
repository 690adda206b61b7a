from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Location, Severity, rule


@rule("LNT001", "unused-ignore", Severity.WARNING, always=True, after="all")
def unused_ignore(ckpt: Checkpoint) -> Iterator[Finding]:
    """An ignore of the settings matched no finding.

    What it checks:
        Each entry of `per-key-ignores` hid at least one finding in this run. Only entries whose rules all ran are
        judged: a rule that was deselected, or needs a greater depth, does not make its ignore unused. It is only info
        if the entry matches no key or file at all, because the settings may serve several models.
    Why it matters:
        An ignore that hides nothing today hides the next real finding of its rule.
    Usual causes:
        Somebody fixed the problem, or renamed the key.
    How to fix:
        Delete the entry.
    """
    for problem in ckpt.problems_of("unused"):
        at = Location(label=f"{problem.file}: per-key-ignores")
        yield replace(Finding.of_problem(problem), at=at, identity=(problem.message,))
