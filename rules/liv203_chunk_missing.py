"""LIV203: together the chunks of all ranks hold every element."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ckptlint.analysis.held_by_ranks import at_ranks, holders, sound
from ckptlint.geometry.coverage import holes
from ckptlint.model import Checkpoint
from ckptlint.model.text import named_ranks
from ckptlint.rule import Finding, Severity, rule


@rule("LIV203", "chunk-missing", Severity.ERROR, live=True)
def chunk_missing(ckpt: Checkpoint) -> Iterator[Finding]:
    """A part of a tensor is missing: no rank writes it.

    What it checks:
        Every element of the global shape lies in a chunk that some rank writes; replicas do not count, since nobody
        writes them. Says nothing where a rank has a finding about its own chunk, or ranks disagree on the shape.
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
    table = view.ranks
    assert table is not None
    rows = {held.fqn: held for held in holders(table)}
    for finding in holes(view):
        at = finding.at
        assert at.tensor is not None
        writers = named_ranks(np.unique(table.rank[at.tensor.chunks.record]).tolist())
        absent = tuple(sorted(set(range(table.world_size)) - set(table.rank[rows[at.tensor.fqn].rows].tolist())))
        note = (
            "absent",
            f"{named_ranks(absent)} {'has' if len(absent) == 1 else 'have'} no such key, or an empty shard",
        )
        look = f"look at the state dict of {named_ranks(absent)}"
        yield replace(
            finding,
            at=replace(at, label=f"written by {writers}", ranks=absent or at.ranks),
            notes=(note, *finding.notes) if absent else finding.notes,
            hint=finding.hint or (look if 0 < 2 * len(absent) <= table.world_size else ""),
        )
    for tensor in view.sound_tensors():
        held = rows[tensor.fqn]
        if len(tensor.chunks) == 0 and len(held.live):
            yield Finding(
                "the ranks hold only replicas{of}: no rank writes it",
                at=at_ranks(table, tensor.fqn, held.live),
                missing=("owner",),
                hint="find the rank that should hold replica 0, the copy that is written",
            )
