"""LIV102: A rank's shard is not one box of the tensor."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.ranks.held_by_ranks import reported
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV102", "shard-not-a-box", Severity.ERROR, live=True)
def shard_not_a_box(ckpt: Checkpoint) -> Iterator[Finding]:
    """A rank's shard is not one box of the tensor.

    What it checks:
        The rows that the placements give a rank are contiguous on every axis.
    Why it matters:
        A checkpoint stores boxes: of a strided shard only the first run of rows gets the right offset.
    Usual causes:
        Two mesh axes split one tensor axis, and not in the order of the mesh ([Shard(0), _StridedShard(0)]).
    How to fix:
        Before the save, redistribute to placements that follow the order of the mesh.
    See:
        torch.distributed.tensor.placement_types._StridedShard
    """
    yield from reported(ckpt)
