from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.ranks.rank_chunks import at_ranks, cells
from ckptlint.model import Checkpoint
from ckptlint.model.text import plural
from ckptlint.rule import Finding, Severity, require, rule


@rule("LIV207", "replica-count", Severity.INFO, live=True)
def replica_count(ckpt: Checkpoint) -> Iterator[Finding]:
    """More or fewer ranks hold a chunk than its placements say.

    What it checks:
        The number of ranks that hold a chunk is the product of the mesh axes that replicate it.
    Why it matters:
        A rank lost its copy, or holds one outside the mesh. The save itself is complete.
    Usual causes:
        Some ranks of a mesh leave the key out of their state dict.
    How to fix:
        Find the ranks of the mesh that do not hold it.
    """
    table = require(ckpt.ranks)
    for cell in cells(table):
        copies = int(table.copies[cell.rows[0]])
        if copies and (table.copies[cell.rows] == copies).all() and copies != len(cell.rows):
            yield Finding(
                f"{plural(len(cell.rows), 'rank', 'holds')} {cell.box}{{of}}; its placements say {copies}",
                at=at_ranks(table, cell.fqn, cell.rows),
                identity=(str(cell.box),),
                group=f"{len(cell.rows)} {copies}",
            )
