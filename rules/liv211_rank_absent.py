"""LIV211: Not all ranks came to the check, or one was lost in it."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.held_by_ranks import told
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV211", "rank-absent", Severity.WARNING, always=True, live=True)
def rank_absent(ckpt: Checkpoint) -> Iterator[Finding]:
    """Not all ranks came to the check, or one was lost in it.

    What it checks:
        Every rank enters the check in time and its reductions finish.
    Why it matters:
        Nothing was verified; the job itself is not held up.
    Usual causes:
        A rank raised before the check, calls it under a condition that others do not meet, or is dead.
    How to fix:
        Look at the named ranks' logs. Call the check on all ranks.
    """
    yield from told(ckpt)
