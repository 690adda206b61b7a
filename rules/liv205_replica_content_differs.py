"""LIV205: copies of one chunk hold the same bytes."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.held_by_ranks import at_cell, cells, digest_groups, ranks_of
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV205", "replica-content-differs", Severity.ERROR, live=True)
def replica_content_differs(ckpt: Checkpoint) -> Iterator[Finding]:
    """Ranks that hold copies of one chunk hold different values.

    What it checks:
        The bytes of all copies of a chunk of a tensor are equal, bit for bit.
    Why it matters:
        The save keeps one copy, any of them: after a load the ranks agree on values that some of them never had.
    Usual causes:
        Replicas that drifted apart (a missing all-reduce, a different seed, nondeterministic kernels), or different
        tensors of two ranks under one key.
    How to fix:
        Find the step from which on the named ranks differ; broadcast from one of them only if you know which is right.
    See:
        torch.distributed.checkpoint._dedup_save_plans.dedup_save_plans
    """
    table = ckpt.ranks
    assert table is not None
    for cell in cells(table):
        groups = [] if table.is_object[cell.rows[0]] else digest_groups(table, cell)
        if len(groups) > 1:
            what = "copies{of}" if cell.is_whole else f"copies of {cell.box}{{of}}"
            yield Finding(
                f"{what} differ between ranks",
                at=at_cell(ckpt, cell, ranks_of(table, cell.rows)),
                missing=(str(cell.box),),
                notes=tuple(("equal", ranks_of(table, rows)) for rows in groups),
                hint=f"look at {ranks_of(table, groups[-1])} first" if len(groups[0]) > len(groups[-1]) else "",
                alike=str([sorted(int(table.rank[row]) for row in rows) for rows in groups]),
            )
