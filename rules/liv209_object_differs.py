from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.ranks.rank_chunks import at_ranks, cells, digest_groups, versions
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, require, rule


@rule("LIV209", "object-differs", Severity.WARNING, live=True)
def object_differs(ckpt: Checkpoint) -> Iterator[Finding]:
    """Ranks hold different plain values under one key.

    What it checks:
        Numbers, strings, lists and mappings under one key are equal on all ranks. Leaves out the keys of random states,
        data loaders and the like, and values of classes that ckptlint does not know (LIV213 names them).
    Why it matters:
        The save keeps the value of one rank, and a load gives it to all.
    Usual causes:
        A step counter is ahead on one rank, or a key for per-rank state does not contain the rank.
    How to fix:
        Put the rank into the key where values differ by design.
    See:
        torch.distributed.checkpoint._dedup_save_plans.dedup_save_plans
    """
    table = require(ckpt.ranks)
    for cell in cells(table):
        groups = digest_groups(table, cell) if table.is_object[cell.rows[0]] else []
        if len(groups) > 1:
            yield Finding(
                "the value{of} differs between ranks",
                at=at_ranks(table, cell.fqn, cell.rows),
                identity=(str(cell.box),),
                notes=versions(table, cell, groups, "value"),
                group=str(len(groups)),
            )
