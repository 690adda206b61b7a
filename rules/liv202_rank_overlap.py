"""LIV202: no element is written by two ranks under different boxes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckptlint.analysis.held_by_ranks import sound
from ckptlint.geometry.coverage import overlaps
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Location, Severity, rule


@rule("LIV202", "rank-overlap", Severity.ERROR, live=True)
def rank_overlap(ckpt: Checkpoint) -> Iterator[Finding]:
    """Ranks are about to write boxes of a tensor that intersect.

    What it checks:
        No two chunks that will be written share an element, equal boxes aside (LIV204, LIV205). Not judged where a rank
        has a finding about its own chunk of the tensor, or ranks disagree about its shape.
    Why it matters:
        Chunks at one offset are taken for copies and one is kept, whatever their sizes; of others a load keeps
        whichever is read last.
    Usual causes:
        Two ranks computed their offsets from different sizes, or a replica was not declared as one.
    How to fix:
        Compare how the named ranks compute offsets and sizes.
    See:
        torch.distributed.checkpoint._dedup_save_plans.dedup_save_plans
    """
    view = sound(ckpt)
    for tensor in view.sound_tensors():
        for first, second in tensor.layout.duplicates:
            boxes = tensor.layout.box(first), tensor.layout.box(second)
            if boxes[0].sizes != boxes[1].sizes:
                ranks = " and ".join(view.chunk_file(tensor, row) for row in (first, second))
                yield Finding(
                    f"{ranks} hold chunks{{of}} that start at {list(boxes[0].offsets)} and differ in size",
                    at=Location.of(tensor, region=boxes[0].intersect(boxes[1]), rows=(first, second), label=ranks),
                    notes=(("chunks", f"{boxes[0]} and {boxes[1]}; the save keeps one of them"),),
                )
    for finding in overlaps(view):
        at = finding.at
        assert at.tensor is not None
        ranks = " and ".join(view.chunk_file(at.tensor, row) for row in at.rows)
        yield replace(finding, at=replace(at, label=ranks))
