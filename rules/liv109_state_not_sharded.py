"""LIV109: The state of a sharded parameter is a plain tensor of the local size."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.ranks.held_by_ranks import reported
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV109", "state-not-sharded", Severity.WARNING, live=True)
def state_not_sharded(ckpt: Checkpoint) -> Iterator[Finding]:
    """The state of a sharded parameter is a plain tensor of the local size.

    What it checks:
        Where a parameter is a DTensor with several shards, its moments are DTensors too.
    Why it matters:
        Each rank saves its own slice under one key as if it were the whole. One slice survives.
    Usual causes:
        The optimizer was built from local tensors, or a library that does not know DTensor made its state.
    How to fix:
        Make the state a DTensor with the parameter's mesh and placements.
    See:
        NVIDIA TransformerEngine issue 2795
    """
    yield from reported(ckpt)
