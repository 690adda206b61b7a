"""LIV106: A tensor whose parts were not summed up yet is about to be saved."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.held_by_ranks import told
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV106", "partial-placement", Severity.ERROR, live=True)
def partial_placement(ckpt: Checkpoint) -> Iterator[Finding]:
    """A tensor whose parts were not summed up yet is about to be saved.

    What it checks:
        No placement is Partial.
    Why it matters:
        What is saved is one rank's summand, not the value.
    Usual causes:
        A reduction is pending: the tensor was taken from the middle of a computation.
    How to fix:
        Redistribute it to Replicate or Shard first.
    See:
        torch.distributed.tensor.placement_types.Partial
    """
    yield from told(ckpt)
