from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import prod

import numpy as np

from ckptlint.analysis.chunks.coverage import holes
from ckptlint.analysis.ranks.rank_chunks import KeyRows, at_ranks, described_row, holders, sound, torn
from ckptlint.model import Checkpoint, RankTable
from ckptlint.model.text import named_ranks, verb
from ckptlint.rule import Finding, Severity, require, rule


@rule("LIV203", "chunk-missing", Severity.ERROR, live=True)
def chunk_missing(ckpt: Checkpoint) -> Iterator[Finding]:
    """A part of a tensor is missing: no rank writes it.

    What it checks:
        Every element of the global shape lies in a chunk that some rank writes, and each of Megatron-Core's
        ShardedObjects is there; replicas do not count, since nobody writes them. Says nothing where a rank has a
        finding about its own chunk, or ranks disagree on the shape.
    Why it matters:
        Loading raises no error; this part keeps whatever was in memory.
    Usual causes:
        The key is absent from a rank's state dict, or every holder takes another rank for the owner.
    How to fix:
        Look first at the ranks that have no such key. If all have it, compare their offsets.
    See:
        torch.distributed.checkpoint.metadata.TensorStorageMetadata
    """
    view = sound(ckpt)
    table = require(view.ranks)
    rows = {key_rows.fqn: key_rows for key_rows in holders(table)}
    everyone = {*range(table.world_size)}
    holes_with_ranks = [
        (finding, tuple(sorted(everyone.difference(table.rank[rows[finding.at.fqn or ""].rows].tolist()))))
        for finding in holes(view)
    ]
    lacking = Counter[tuple[int, ...]]()
    for absent, fqn in {(absent, finding.at.fqn or "") for finding, absent in holes_with_ranks}:
        lacking[absent] += 1 + len(table.alike.get(fqn, ()))
    for finding, absent in holes_with_ranks:
        at = finding.at
        assert at.tensor is not None
        writers = named_ranks(np.unique(table.rank[at.tensor.chunks.record]).tolist())
        finding = replace(finding, at=replace(at, label=f"written by {writers}", ranks=absent or at.ranks))
        counts = lacking[absent], len(rows) + sum(map(len, table.alike.values()))
        yield _with_absent(finding, absent, table.world_size, counts) if absent else finding
    for key_rows in rows.values():
        if table.strict[key_rows.rows].all() and table.is_object[key_rows.rows].all():
            yield from _missing_objects(table, key_rows)
    for tensor in view.sound_tensors():
        key_rows = rows[tensor.fqn]
        if len(tensor.chunks) == 0 and len(key_rows.live):
            message = "the ranks hold only replicas{of}: no rank writes it"
            hint = "find the rank that should hold replica 0, the copy that is written"
            yield Finding(message, at=at_ranks(table, tensor.fqn, key_rows.live), identity=("owner",), hint=hint)


def _missing_objects(table: RankTable, key_rows: KeyRows) -> Iterator[Finding]:
    """Cells of the grid of a ShardedObject that no rank writes."""
    _, _, grid = described_row(table, int(key_rows.rows[0]))
    written = key_rows.live[table.replica[key_rows.live] == 0]
    present = key_rows.live if len(written) else written  # LIV206 tells replicas of cells that nobody writes
    count = prod(grid) - len(np.unique(table.offsets[present], axis=0))
    if count > 0 and key_rows.fqn not in torn(table):
        what = "the object{of} is" if prod(grid) == 1 else f"{count:,} of {prod(grid):,} objects{{of}} are"
        message = f"{what} missing: no rank writes {'it' if prod(grid) == 1 else 'them'}"
        yield Finding(message, at=at_ranks(table, key_rows.fqn, key_rows.rows), identity=("objects",))


def _with_absent(finding: Finding, absent: tuple[int, ...], world: int, counts: tuple[int, int]) -> Finding:
    """Adds a note on the ranks without the key; `counts`: keys with a hole that these ranks lack, and all keys."""
    text = f"{named_ranks(absent)} {verb(len(absent), 'has')} no such key, or an empty shard"
    if counts[0] > 1:
        text += f"; the same holds for {counts[0]:,} of {counts[1]:,} keys"
    with_ranks = replace(finding, notes=(("absent", text), *finding.notes))
    if 2 * len(absent) > world:
        return with_ranks
    explain = finding.explain or tuple
    return replace(
        with_ranks,
        hint=f"look at the state dict of {named_ranks(absent)}",
        explain=lambda: tuple(note for note in explain() if note[0] != "hint"),
    )
