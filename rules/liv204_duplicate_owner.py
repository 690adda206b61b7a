"""LIV204: a chunk or object has one owner."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.held_by_ranks import HeldCell, at_cell, cells, ranks_of
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV204", "duplicate-owner", Severity.ERROR, live=True)
def duplicate_owner(ckpt: Checkpoint) -> Iterator[Finding]:
    """Several ranks believe that they write the same chunk or object.

    What it checks:
        Of the copies of a chunk exactly one is the owner. An error for Megatron-Core, which demands a single owner, and
        for objects of its grids. For DTensors, whose save throws away all owners but one, a warning, and a note where
        the contents are the same: a tied weight on two meshes.
    Why it matters:
        One copy survives, and if they are different things under one name, the others are lost.
    Usual causes:
        replica_id lacks a mesh axis (tp, ep), or two modules share a key.
    How to fix:
        Put every replicated axis into replica_id, and prefix keys per module.
    See:
        megatron.core.dist_checkpointing.validation.validate_sharding_integrity
    """
    table = ckpt.ranks
    assert table is not None
    for cell in cells(table):
        mains = [row for row in cell.rows if table.replica[row] == 0]
        ranks = {int(table.rank[row]) for row in mains}
        if len(mains) < 2:
            continue
        digests = {int(table.digest[row]) for row in mains}
        contents = "their contents were not compared" if 0 in digests else "their contents are the same"
        contents = "their contents differ" if len(digests - {0}) > 1 else contents
        is_strict = bool(table.strict[mains].any())
        lesser = Severity.INFO if len(digests) == 1 and 0 not in digests else Severity.WARNING
        who = f"{len(ranks)} ranks write" if len(ranks) > 1 else "one rank writes twice"
        yield Finding(
            f"{who} {_what(cell)}",
            at=at_cell(ckpt, cell, ranks_of(table, mains)),
            missing=(str(cell.box),),
            severity=None if is_strict else lesser,
            notes=(("contents", contents),),
            hint="compare replica_id of these ranks" if is_strict else "",
            alike=contents,
        )


def _what(cell: HeldCell) -> str:
    return "the whole{of}" if cell.is_whole else f"{cell.box}{{of}}"
