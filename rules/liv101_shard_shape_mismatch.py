"""LIV101: The tensor that a rank holds does not have the sizes that its placements imply."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.held_by_ranks import told
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV101", "shard-shape-mismatch", Severity.ERROR, live=True)
def shard_shape_mismatch(ckpt: Checkpoint) -> Iterator[Finding]:
    """The tensor that a rank holds does not have the sizes that its placements imply.

    What it checks:
        The shape of the local tensor equals the sizes of the chunk it is saved as.
    Why it matters:
        The save writes the local tensor under offsets that belong to another size, so a load puts rows in wrong
        places.
    Usual causes:
        A DTensor was made with from_local without shape and stride for an uneven split, or its local tensor was
        replaced.
    How to fix:
        Give from_local the global shape and stride, or distribute the tensor again.
    See:
        torch.distributed.tensor.DTensor.from_local
    """
    yield from told(ckpt)
