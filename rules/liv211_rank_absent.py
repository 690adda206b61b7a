"""LIV211: A rank did not come to the check, or was lost in it."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.ranks.held_by_ranks import reported
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV211", "rank-absent", Severity.WARNING, always=True, live=True)
def rank_absent(ckpt: Checkpoint) -> Iterator[Finding]:
    """A rank did not come to the check, or was lost in it.

    What it checks:
        Every rank enters the check in time, and its reductions finish.
    Why it matters:
        Nothing was verified. The job itself goes on.
    Usual causes:
        A rank raised before the check, skips it under a condition that the others do not meet, or is dead.
    How to fix:
        Look at the logs of the named ranks. Call the check on all ranks.
    """
    yield from reported(ckpt)
