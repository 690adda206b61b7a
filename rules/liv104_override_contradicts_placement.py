"""LIV104: A tensor's own chunk list cuts an axis that no placement shards."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.held_by_ranks import told
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV104", "override-contradicts-placement", Severity.WARNING, live=True)
def override_contradicts_placement(ckpt: Checkpoint) -> Iterator[Finding]:
    """A tensor's own chunk list cuts an axis that no placement shards.

    What it checks:
        An axis on which the chunk list gives less than the whole is sharded by some placement.
    Why it matters:
        One of the two is wrong, and the save follows the chunk list.
    Usual causes:
        The tensor was transposed or its placements were changed after the chunk list was attached.
    How to fix:
        Attach the chunk list again after the change.
    See:
        torch.distributed.checkpoint.planner_helpers._create_chunk_list
    """
    yield from told(ckpt)
