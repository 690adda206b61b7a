"""LIV102: A rank's shard is not one box of the tensor."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.held_by_ranks import told
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV102", "shard-not-a-box", Severity.ERROR, live=True)
def shard_not_a_box(ckpt: Checkpoint) -> Iterator[Finding]:
    """A rank's shard is not one box of the tensor.

    What it checks:
        The rows that placements give a rank are one run on every axis.
    Why it matters:
        A checkpoint stores boxes: of a strided shard only the first run gets the right offset.
    Usual causes:
        The mesh axes that cut one tensor axis are in another order than the mesh ([Shard(0),
        _StridedShard(0)]).
    How to fix:
        Redistribute to placements whose order follows the mesh before saving.
    See:
        torch.distributed.tensor.placement_types._StridedShard
    """
    yield from told(ckpt)
