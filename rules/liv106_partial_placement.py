"""LIV106: A tensor of partial sums is about to be saved."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.ranks.held_by_ranks import reported
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV106", "partial-placement", Severity.ERROR, live=True)
def partial_placement(ckpt: Checkpoint) -> Iterator[Finding]:
    """A tensor of partial sums is about to be saved.

    What it checks:
        No placement is Partial.
    Why it matters:
        The save would write one rank's summand instead of the value.
    Usual causes:
        Somebody took the tensor out of a computation before its reduction.
    How to fix:
        Redistribute it to Replicate or Shard first.
    See:
        torch.distributed.tensor.placement_types.Partial
    """
    yield from reported(ckpt)
