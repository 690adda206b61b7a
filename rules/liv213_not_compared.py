"""LIV213: A part of the state was not compared."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.held_by_ranks import told
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV213", "not-compared", Severity.INFO, always=True, live=True)
def not_compared(ckpt: Checkpoint) -> Iterator[Finding]:
    """A part of the state was not compared.

    What it checks:
        Everything that ranks hold is compared, contents of objects included.
    Why it matters:
        A fault in that part would not be seen.
    Usual causes:
        Contents that differ between ranks by design (random states, data loaders) are left out; memory for
        digests ran out.
    How to fix:
        Nothing, unless the part matters to you.
    """
    yield from told(ckpt)
