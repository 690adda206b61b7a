"""LIV105: A rank's chunk reaches outside the tensor."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.ranks.held_by_ranks import reported
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV105", "local-chunk-out-of-bounds", Severity.ERROR, live=True)
def local_chunk_out_of_bounds(ckpt: Checkpoint) -> Iterator[Finding]:
    """A rank's chunk reaches outside the tensor.

    What it checks:
        Offsets are not negative, offsets plus sizes stay within the global shape, and all three have the same number of
        axes.
    Why it matters:
        torch refuses the save, or a load fails on this tensor.
    Usual causes:
        The code computes the global shape from other parallel sizes than the offsets.
    How to fix:
        Correct the offsets or the global shape in the sharding code.
    See:
        torch.distributed.checkpoint.metadata.ChunkStorageMetadata
    """
    yield from reported(ckpt)
