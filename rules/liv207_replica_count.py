"""LIV207: a chunk has as many copies as its placements say."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.held_by_ranks import cells, ranks_of
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Location, Severity, rule


@rule("LIV207", "replica-count", Severity.INFO, live=True)
def replica_count(ckpt: Checkpoint) -> Iterator[Finding]:
    """A chunk is held by more or fewer ranks than its placements say.

    What it checks:
        The number of ranks that hold a chunk is the product of the mesh axes on which it is replicated.
    Why it matters:
        A rank lost its copy, or holds one that its mesh does not know; the save itself is whole.
    Usual causes:
        A key that is left out of the state dict on some ranks of a mesh.
    How to fix:
        See which ranks of the mesh do not hold it.
    """
    table = ckpt.ranks
    assert table is not None
    for cell in cells(table):
        copies = int(table.copies[cell.rows[0]])
        if copies and (table.copies[cell.rows] == copies).all() and copies != len(cell.rows):
            yield Finding(
                f"{len(cell.rows)} ranks hold {cell.box}{{of}}, its placements say {copies}",
                at=Location(cell.fqn, label=ranks_of(table, cell.rows)),
                missing=(str(cell.box),),
                alike=f"{len(cell.rows)} {copies}",
            )
