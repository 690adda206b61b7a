"""LIV213: Part of the state was not compared."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.ranks.held_by_ranks import reported
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV213", "not-compared", Severity.INFO, always=True, live=True)
def not_compared(ckpt: Checkpoint) -> Iterator[Finding]:
    """Part of the state was not compared.

    What it checks:
        The check compared everything that the ranks hold, contents of objects included.
    Why it matters:
        A fault in the rest would go unseen.
    Usual causes:
        Some contents differ between ranks by design (random states, data loaders) and are left out; or the memory for
        digests ran out.
    How to fix:
        Nothing, unless the part matters to you.
    """
    yield from reported(ckpt)
