"""LIV103: A tensor's own chunk list is missing, or contradicts its write items."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.ranks.held_by_ranks import reported
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV103", "chunk-override-broken", Severity.ERROR, live=True)
def chunk_override_broken(ckpt: Checkpoint) -> Iterator[Finding]:
    """A tensor's own chunk list is missing, or contradicts its write items.

    What it checks:
        A tensor that is not split as its placements say has both `__create_chunk_list__` and `__create_write_items__`,
        and the two agree.
    Why it matters:
        Without them the save falls back to the offsets of an even split. A load then puts rows in the wrong places.
    Usual causes:
        `detach()`, `clone()`, or `to_local()` followed by `from_local`, on an uneven DTensor of Megatron-FSDP: the new
        tensor lacks the two attributes.
    How to fix:
        Save the state dict that the framework returned, or copy the two attributes to the new local tensor.
    See:
        megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor
    """
    yield from reported(ckpt)
