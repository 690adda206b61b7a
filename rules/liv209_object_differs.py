"""LIV209: values that are no tensors are the same on all ranks that save them under one key."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.held_by_ranks import cells, digest_groups, ranks_of
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Location, Severity, rule


@rule("LIV209", "object-differs", Severity.WARNING, live=True)
def object_differs(ckpt: Checkpoint) -> Iterator[Finding]:
    """Ranks hold different values, which are no tensors, under one key.

    What it checks:
        Numbers, texts, lists and mappings under one key are equal on all ranks. Names of random states, data loaders
        and the like are left out, and so are values of classes that ckptlint does not know (LIV213 counts them).
    Why it matters:
        The save keeps the value of one rank, and after a load all ranks have it.
    Usual causes:
        A step counter that is ahead on one rank, per-rank state under a name without the rank.
    How to fix:
        Put the rank into the key where values differ by design.
    See:
        torch.distributed.checkpoint._dedup_save_plans.dedup_save_plans
    """
    table = ckpt.ranks
    assert table is not None
    for cell in cells(table):
        groups = digest_groups(table, cell) if table.is_object[cell.rows[0]] else []
        if len(groups) > 1:
            yield Finding(
                "the value{of} differs between ranks",
                at=Location(cell.fqn, label=ranks_of(table, cell.rows)),
                missing=(str(cell.box),),
                notes=tuple(("equal", ranks_of(table, rows)) for rows in groups[:8]),
                alike=str(len(groups)),
            )
