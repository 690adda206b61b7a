"""LIV206: a further copy of a chunk lies where its owner's lies."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.held_by_ranks import at_cell, cells, ranks_of
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV206", "replica-layout-differs", Severity.ERROR, live=True)
def replica_layout_differs(ckpt: Checkpoint) -> Iterator[Finding]:
    """A rank holds a copy of a chunk that no rank writes.

    What it checks:
        The box of every further copy is the box of a chunk that is written.
    Why it matters:
        The rank believes in another layout than the owners do: after a load it holds other rows than before the save.
    Usual causes:
        Replicas of one tensor were sharded by different code or settings.
    How to fix:
        Compare the placements of the named ranks.
    """
    table = ckpt.ranks
    assert table is not None
    written = {cell.fqn for cell in cells(table) if (table.replica[cell.rows] <= 0).any()}
    for cell in cells(table):
        if cell.fqn in written and (table.replica[cell.rows] > 0).all():
            yield Finding(
                f"a copy of {cell.box}{{of}} has no owner: no rank writes this box",
                at=at_cell(ckpt, cell, ranks_of(table, cell.rows)),
                missing=(str(cell.box),),
            )
