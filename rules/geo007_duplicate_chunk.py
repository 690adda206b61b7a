from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ckptlint.analysis.chunks.two_saves import saves_hint, saves_note
from ckptlint.geometry.writers import saved_by
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint
from ckptlint.model.text import join_words, shape_text
from ckptlint.rule import Finding, Location, Severity, rule

_SHOWN, _NAMED, _ROWS = 64, 3, 15


@rule("GEO007", "duplicate-chunk", Severity.ERROR)
def duplicate_chunk(ckpt: Checkpoint) -> Iterator[Finding]:
    """Two chunks of a tensor start at the same offset.

    What it checks:
        Chunks with elements have distinct offsets within a tensor. Where the chunks come from files of two saves, each
        complete by itself, the finding says so.
    Why it matters:
        Loaders find stored bytes by key and offset, so only one of the two can be read.
    Usual causes:
        Two modules or ranks saved different tensors under one key; metadata files were merged; files of two saves lie
        in one folder.
    How to fix:
        Make keys unique per module, and save again. If the files come from two saves, move the older set away.
    See:
        torch.distributed.checkpoint.metadata.MetadataIndex
    """
    for tensor in ckpt.sound_tensors():
        at_place = grouped((first, second) for first, second in tensor.tiling.duplicates)
        for first, others in islice(at_place.items(), _SHOWN):
            files = dict.fromkeys(ckpt.chunk_file(tensor, row) or "no file" for row in (first, *others))
            place = join_words([*files][:_NAMED]) + (" and others" if len(files) > _NAMED else "")
            place = f"stored in {place}" if len(files) > 1 else f"all of them share one entry in {place}"
            if len(at_place) > 1 and first == next(iter(at_place)):
                place += f"; chunks repeat at {len(at_place):,} offsets"
            boxes = [tensor.tiling.box(row) for row in (first, *others[:_NAMED])]
            same = (tensor.tiling.sizes[others] == tensor.tiling.sizes[first]).all()
            more = f" and {len(others) - _NAMED:,} more" if len(others) > _NAMED else ""
            what = f"sizes {shape_text(boxes[0].sizes)}" if same else " and ".join(map(str, boxes)) + more
            count = "two" if len(others) == 1 else f"{len(others) + 1:,}"
            rows = (first, *others[:_ROWS])
            yield Finding(
                f"{count} chunks{{of}} start at offset {shape_text(boxes[0].offsets)}: {what}",
                at=Location(tensor, region=boxes[0].intersect(boxes[1]), rows=rows, ranks=saved_by(ckpt, tensor, rows)),
                notes=(("where", place), ("two saves", saves_note(ckpt))),
                hint=saves_hint(ckpt) or "find the two writers of this key: the tensor of one writer is lost",
            )
