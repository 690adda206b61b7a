from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.ranks.rank_chunks import at_cell, cells
from ckptlint.model import Checkpoint
from ckptlint.model.text import named_ranks
from ckptlint.rule import Finding, Severity, require, rule


@rule("LIV204", "duplicate-owner", Severity.ERROR, live=True)
def duplicate_owner(ckpt: Checkpoint) -> Iterator[Finding]:
    """Several ranks are about to write the same chunk or object.

    What it checks:
        A chunk has exactly one owner. An error for Megatron-Core, which demands one, and for its sharded objects. For
        DTensors, whose save keeps one copy, a warning; if the contents are the same (a tied weight on two meshes), only
        info.
    Why it matters:
        The save keeps one copy. If two different tensors share the key, the other one is lost.
    Usual causes:
        replica_id lacks a mesh axis (tp, ep), or two modules share a key.
    How to fix:
        Put every replicated axis into replica_id, and give each module its own prefix.
    See:
        megatron.core.dist_checkpointing.validation.validate_sharding_integrity
    """
    table = require(ckpt.ranks)
    for cell in cells(table):
        mains = [row for row in cell.rows if table.replica[row] == 0]
        ranks = {int(table.rank[row]) for row in mains}
        if len(mains) < 2:
            continue
        digests = {int(table.digest[row]) for row in mains}
        contents = "not compared" if 0 in digests else "equal on all ranks"
        contents = "they differ" if len(digests - {0}) > 1 else contents
        is_strict = bool(table.strict[mains].any())
        lesser = Severity.INFO if len(digests) == 1 and 0 not in digests else Severity.WARNING
        who = f"{len(ranks)} ranks write" if len(ranks) > 1 else f"rank {min(ranks)} writes twice"
        yield Finding(
            f"{who} {'the whole' if cell.is_whole else cell.box}{{of}}",
            at=at_cell(ckpt, cell, mains),
            identity=(str(cell.box),),
            severity=None if is_strict else lesser,
            notes=(("contents", contents),),
            hint=f"compare replica_id of {named_ranks(ranks)}" if is_strict and len(ranks) > 1 else "",
            group=contents,
        )
