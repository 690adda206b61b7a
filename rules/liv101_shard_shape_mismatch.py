"""LIV101: A rank's local tensor does not have the size that its placements give it."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.ranks.held_by_ranks import reported
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV101", "shard-shape-mismatch", Severity.ERROR, live=True)
def shard_shape_mismatch(ckpt: Checkpoint) -> Iterator[Finding]:
    """A rank's local tensor does not have the size that its placements give it.

    What it checks:
        The shape of the local tensor equals the size of the chunk that the save records for it.
    Why it matters:
        The save writes the local tensor at offsets that belong to another size. A load then puts rows in the wrong
        places.
    Usual causes:
        DTensor.from_local without shape and stride for an uneven split; code that replaced the local tensor.
    How to fix:
        Give from_local the global shape and stride, or distribute the tensor again.
    See:
        torch.distributed.tensor.DTensor.from_local
    """
    yield from reported(ckpt)
