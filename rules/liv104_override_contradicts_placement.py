"""LIV104: A tensor's own chunk list splits an axis that no placement shards."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.ranks.held_by_ranks import reported
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV104", "override-contradicts-placement", Severity.WARNING, live=True)
def override_contradicts_placement(ckpt: Checkpoint) -> Iterator[Finding]:
    """A tensor's own chunk list splits an axis that no placement shards.

    What it checks:
        Where the chunk list holds less than the whole axis, some placement shards that axis.
    Why it matters:
        One of the two is wrong, and the save follows the chunk list.
    Usual causes:
        Code transposed the tensor, or changed its placements, after it had attached the chunk list.
    How to fix:
        Attach the chunk list again after the change.
    See:
        torch.distributed.checkpoint.planner_helpers._create_chunk_list
    """
    yield from reported(ckpt)
