from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckptlint.analysis.chunks.coverage import overlaps
from ckptlint.analysis.ranks.rank_chunks import sound
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.text import shape_text
from ckptlint.rule import Finding, Location, Severity, require, rule


@rule("LIV202", "rank-overlap", Severity.ERROR, live=True)
def rank_overlap(ckpt: Checkpoint) -> Iterator[Finding]:
    """Two ranks are about to write overlapping boxes of a tensor.

    What it checks:
        No two chunks that will be written share an element; equal boxes are left to LIV204 and LIV205. Says nothing
        where a rank has a finding about its own chunk, or ranks disagree on the shape.
    Why it matters:
        torch treats chunks at the same offset as copies and keeps one, whatever their sizes. Of other overlaps a load
        keeps the chunk that it reads last.
    Usual causes:
        Two ranks compute their offsets from different sizes, or a replica is not declared as one.
    How to fix:
        Compare how the named ranks compute offsets and sizes.
    See:
        torch.distributed.checkpoint._dedup_save_plans.dedup_save_plans
    """
    view = sound(ckpt)
    for tensor in view.sound_tensors():
        for first, second in tensor.tiling.duplicates:
            boxes = tensor.tiling.box(first), tensor.tiling.box(second)
            if boxes[0].sizes != boxes[1].sizes:
                names, ranks = _writers(view, tensor, (first, second))
                region = boxes[0].intersect(boxes[1])
                yield Finding(
                    f"{names} hold chunks{{of}} that start at {shape_text(boxes[0].offsets)} and differ in size",
                    at=Location(tensor, region=region, rows=(first, second), label=names, ranks=ranks),
                    notes=(("chunks", f"{boxes[0]} and {boxes[1]}; the save keeps one of them"),),
                )
    for finding in overlaps(view):
        at = finding.at
        assert at.tensor is not None
        names, ranks = _writers(view, at.tensor, at.rows)
        yield replace(finding, at=replace(at, label=names, ranks=ranks), hint=f"compare the offsets of {names}")


def _writers(view: Checkpoint, tensor: Tensor, rows: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """The ranks that write some chunks, in words and as numbers."""
    ranks = require(view.ranks).rank[tensor.chunks.record[list(rows)]].tolist()
    return " and ".join(f"rank {rank}" for rank in ranks), tuple(sorted(set(ranks)))
