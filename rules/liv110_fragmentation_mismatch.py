"""LIV110: A Megatron ShardedTensor does not fit the grid that it declares."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.ranks.held_by_ranks import reported
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV110", "fragmentation-mismatch", Severity.ERROR, live=True)
def fragmentation_mismatch(ckpt: Checkpoint) -> Iterator[Finding]:
    """A Megatron ShardedTensor does not fit the grid that it declares.

    What it checks:
        On a regular grid each offset is a multiple of the local size, and the number of fragments times the local size
        is the global size.
    Why it matters:
        The save writes chunks that overlap or leave holes.
    Usual causes:
        The code computes axis_fragmentations from other parallel sizes than the local shape.
    How to fix:
        Make the tensor with ShardedTensor.from_rank_offsets.
    See:
        megatron.core.dist_checkpointing.mapping.ShardedTensor
    """
    yield from reported(ckpt)
