"""LIV210: A rank could not read its own state, so nothing was compared."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.ranks.held_by_ranks import reported
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV210", "rank-unreadable", Severity.ERROR, always=True, live=True)
def rank_unreadable(ckpt: Checkpoint) -> Iterator[Finding]:
    """A rank could not read its own state, so nothing was compared.

    What it checks:
        Every rank can walk its state dict and hash its values.
    Why it matters:
        Nobody knows what that rank is about to save.
    Usual causes:
        A `state_dict()` that raises, or a tensor type that ckptlint does not know.
    How to fix:
        Fix the exception in the message. The LiveError of that rank carries its traceback.
    """
    yield from reported(ckpt)
