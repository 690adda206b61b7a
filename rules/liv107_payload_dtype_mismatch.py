"""LIV107: The tensor that a rank holds has another dtype than it declares."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.held_by_ranks import told
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV107", "payload-dtype-mismatch", Severity.ERROR, live=True)
def payload_dtype_mismatch(ckpt: Checkpoint) -> Iterator[Finding]:
    """The tensor that a rank holds has another dtype than it declares.

    What it checks:
        The dtype of the local data equals that of the sharded tensor around it.
    Why it matters:
        The metadata names one dtype and the bytes have another.
    Usual causes:
        The data was cast and the object that describes it was not made again.
    How to fix:
        Build the sharded tensor from the data as it is.
    See:
        megatron.core.dist_checkpointing.mapping.ShardedTensor
    """
    yield from told(ckpt)
