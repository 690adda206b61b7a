"""LIV203: the chunks of all ranks together hold every element."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ckptlint.analysis.held_by_ranks import holders, ranks_of, sound
from ckptlint.geometry.coverage import holes
from ckptlint.model import Checkpoint
from ckptlint.model.text import named_ranks
from ckptlint.rule import Finding, Location, Severity, rule


@rule("LIV203", "chunk-missing", Severity.ERROR, live=True)
def chunk_missing(ckpt: Checkpoint) -> Iterator[Finding]:
    """Part of a tensor is about to be written by nobody.

    What it checks:
        Every element of the global shape lies in a chunk that some rank writes; further copies of a chunk do not count,
        since they are not written. Not judged where a rank has a finding about its own chunk of the tensor, or ranks
        disagree about its shape.
    Why it matters:
        A load leaves this region as it was in memory and raises nothing.
    Usual causes:
        A rank lacks the tensor in its state dict, or every holder believes another one to be the owner.
    How to fix:
        See which ranks hold the tensor; the missing part belongs to one that does not.
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
        yield replace(finding, at=replace(at, label=f"written by {writers}"))
    for tensor in view.sound_tensors():
        held = rows[tensor.fqn]
        if len(tensor.chunks) == 0 and len(held.live):
            yield Finding(
                "only further copies{of} are held: no rank writes it",
                at=Location(tensor.fqn, label=ranks_of(table, held.live.tolist())),
                missing=("owner",),
                hint="its owner, replica 0, is on none of the ranks that checked",
            )
