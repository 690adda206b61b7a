"""GEO007: no two chunks of a tensor start at the same place."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Location, Severity, rule

_SHOWN = 64


@rule("GEO007", "duplicate-chunk", Severity.ERROR)
def duplicate_chunk(ckpt: Checkpoint) -> Iterator[Finding]:
    """Two chunks of a tensor have the same offsets.

    What it checks:
        The offsets of the chunks with elements are distinct within a tensor.
    Why it matters:
        Stored bytes are found by (fqn, offset), so only one of the two is on disk or can be reached.
    Usual causes:
        Two modules or ranks saved different tensors under one key, or metadata files were merged.
    How to fix:
        Make keys unique per module, and save again.
    See:
        torch.distributed.checkpoint.metadata.MetadataIndex
    """
    for tensor in ckpt.sound_tensors():
        pairs = tensor.layout.duplicates
        for first, second in pairs[:_SHOWN]:
            place = f"both are filed under one entry, in {ckpt.chunk_file(tensor, first) or 'no file'}"
            if (first, second) == pairs[0] and len(pairs) > 1:
                place += f"; {len(pairs):,} chunks repeat an earlier one"
            boxes = tensor.layout.box(first), tensor.layout.box(second)
            what = f"sizes {list(boxes[0].sizes)}" if boxes[0] == boxes[1] else f"{boxes[0]} and {boxes[1]}"
            yield Finding(
                f"two chunks{{of}} start at {list(boxes[0].offsets)}: {what}",
                at=Location.of(tensor, region=boxes[0].intersect(boxes[1]), rows=(first, second)),
                notes=(("where", place),),
                hint="find the two writers of this key; one of their tensors is lost",
            )
