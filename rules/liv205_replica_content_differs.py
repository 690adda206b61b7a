from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.ranks.rank_chunks import at_cell, cells, digest_groups, ranks_of, versions
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, require, rule

_OPEN = "nothing shows which copy is right: find the first step at which they differ, and what these ranks did apart"


@rule("LIV205", "replica-content-differs", Severity.ERROR, live=True)
def replica_content_differs(ckpt: Checkpoint) -> Iterator[Finding]:
    """Ranks that hold copies of one chunk hold different values.

    What it checks:
        All copies of a chunk are equal, bit for bit.
    Why it matters:
        The save keeps any one of the copies: after a load the ranks agree on values that some of them never had.
    Usual causes:
        Replicas drifted apart (a missing all-reduce, different seeds, nondeterministic kernels), or two ranks have
        different tensors under one key.
    How to fix:
        Find the first step at which the named ranks differ. Broadcast from one of them only if you know which is right.
    See:
        torch.distributed.checkpoint._dedup_save_plans.dedup_save_plans
    """
    table = require(ckpt.ranks)
    for cell in cells(table):
        groups = [] if table.is_object[cell.rows[0]] else digest_groups(table, cell)
        if len(groups) > 1:
            what = "copies{of}" if cell.is_whole else f"copies of {cell.box}{{of}}"
            odd = ranks_of(table, groups[-1]) if len(groups[0]) > len(groups[-1]) else ""
            yield Finding(
                f"{what} differ between ranks",
                at=at_cell(ckpt, cell, cell.rows),
                identity=(str(cell.box),),
                notes=versions(table, cell, groups, "copy"),
                hint=f"look at {odd} first" if odd else _OPEN,
                group=str([sorted(int(table.rank[row]) for row in rows) for rows in groups]),
            )
