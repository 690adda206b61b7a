"""LIV110: A Megatron ShardedTensor's grid does not fit its global shape."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.held_by_ranks import told
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV110", "fragmentation-mismatch", Severity.ERROR, live=True)
def fragmentation_mismatch(ckpt: Checkpoint) -> Iterator[Finding]:
    """A Megatron ShardedTensor's grid does not fit its global shape.

    What it checks:
        On a regular grid each offset is a multiple of the local size, and fragments times local size is the
        global size.
    Why it matters:
        The save writes chunks that leave holes or overlap.
    Usual causes:
        axis_fragmentations was computed from other parallel sizes than the local shape.
    How to fix:
        Make the tensor with ShardedTensor.from_rank_offsets.
    See:
        megatron.core.dist_checkpointing.mapping.ShardedTensor
    """
    yield from told(ckpt)
