"""LIV210: A rank could not read its own state, so nothing was compared."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.held_by_ranks import told
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV210", "rank-unreadable", Severity.ERROR, always=True, live=True)
def rank_unreadable(ckpt: Checkpoint) -> Iterator[Finding]:
    """A rank could not read its own state, so nothing was compared.

    What it checks:
        The state dict of every rank can be walked, and its values hashed.
    Why it matters:
        What that rank is about to save is unknown.
    Usual causes:
        A tensor type that ckptlint does not know, or a state_dict() that raises.
    How to fix:
        See the exception; the rank's own log has all of it.
    """
    yield from told(ckpt)
