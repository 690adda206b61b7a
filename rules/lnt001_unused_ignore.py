"""LNT001: every ignore of the settings hides some finding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Location, Severity, rule


@rule("LNT001", "unused-ignore", Severity.WARNING, always=True, after="all")
def unused_ignore(ckpt: Checkpoint) -> Iterator[Finding]:
    """An ignore of the settings matched no finding.

    What it checks:
        Each entry of `per-key-ignores` hid at least one finding of some checkpoint of the run. Only entries are judged
        whose rules all ran: one that was deselected, or needs a greater depth, does not make its ignore unused. A note
        where no key or file matches at all, since the settings may serve several models.
    Why it matters:
        A dead ignore hides the next real finding of its rule.
    Usual causes:
        The problem was solved, or a key was renamed.
    How to fix:
        Delete the entry.
    """
    for problem in ckpt.problems_of("unused"):
        at = Location(label=f"{problem.file}: per-key-ignores")
        yield replace(Finding.of_problem(problem), at=at, missing=(problem.message,))
