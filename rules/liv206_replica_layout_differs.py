from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.ranks.rank_chunks import at_cell, cells
from ckptlint.model import Checkpoint
from ckptlint.model.text import named_ranks, verb
from ckptlint.rule import Finding, Severity, require, rule


@rule("LIV206", "replica-layout-differs", Severity.ERROR, live=True)
def replica_layout_differs(ckpt: Checkpoint) -> Iterator[Finding]:
    """A rank holds a replica of a box that no rank writes.

    What it checks:
        The box of every replica is also the box of a chunk that is written.
    Why it matters:
        This rank assumes a different layout from the owners: after a load it holds different rows than before.
    Usual causes:
        Different code or settings sharded the replicas of one tensor.
    How to fix:
        Compare the placements of the named ranks with those of the owners.
    """
    table = require(ckpt.ranks)
    written = {cell.fqn for cell in cells(table) if (table.replica[cell.rows] <= 0).any()}
    for cell in cells(table):
        if cell.fqn in written and (table.replica[cell.rows] > 0).all():
            ranks = set(table.rank[cell.rows].tolist())
            who = f"{named_ranks(ranks)} {verb(len(ranks), 'holds')}"
            message = f"{who} a replica of {cell.box}{{of}}, which no rank writes"
            yield Finding(message, at=at_cell(ckpt, cell, cell.rows), identity=(str(cell.box),))
