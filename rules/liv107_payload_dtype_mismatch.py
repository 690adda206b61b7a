"""LIV107: A rank's data has a different dtype from the one it declares."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.ranks.held_by_ranks import reported
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV107", "payload-dtype-mismatch", Severity.ERROR, live=True)
def payload_dtype_mismatch(ckpt: Checkpoint) -> Iterator[Finding]:
    """A rank's data has a different dtype from the one it declares.

    What it checks:
        The dtype of the local data equals that of the sharded tensor around it.
    Why it matters:
        The metadata names one dtype and the bytes have another.
    Usual causes:
        Code cast the data and kept the old ShardedTensor around it.
    How to fix:
        Build the ShardedTensor again from the cast data.
    See:
        megatron.core.dist_checkpointing.mapping.ShardedTensor
    """
    yield from reported(ckpt)
