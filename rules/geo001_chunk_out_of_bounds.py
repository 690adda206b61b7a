from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from ckptlint.model import Checkpoint
from ckptlint.model.tiling import Box
from ckptlint.rule import Finding, Location, Severity, rule

_SHOWN = 64
_DENOMINATOR = 1024


@rule("GEO001", "chunk-out-of-bounds", Severity.ERROR)
def chunk_out_of_bounds(ckpt: Checkpoint) -> Iterator[Finding]:
    """A chunk lies partly or wholly outside its tensor.

    What it checks:
        On every dim a chunk starts at 0 or later, has a size of 0 or more, and ends at the global size or before. An
        empty chunk outside the tensor is only info.
    Why it matters:
        Loading reads the wrong rows, or fails on this tensor.
    Usual causes:
        The global size counts packed elements and the offset unpacked ones (NVFP4); padding counts in the offset but
        not in the size; somebody edited the metadata.
    How to fix:
        Let the writer declare the size that its offsets run over, and save again.
    See:
        torch.distributed.checkpoint.metadata.ChunkStorageMetadata
    """
    for tensor in ckpt.sound_tensors():
        layout = tensor.tiling
        rows = layout.outside.tolist()
        for row in rows[:_SHOWN]:
            box = layout.box(row)
            file = ckpt.chunk_file(tensor, row)
            place = f"stored in {file or 'no file'}"
            if row == rows[0] and len(rows) > 1:
                place += f"; {len(rows):,} chunks of this tensor lie outside"
            yield Finding(
                f"chunk {box}{{of}} {_fault(box, tensor.global_shape)}",
                at=Location(tensor, region=box if layout.live[row] else None, rows=(row,), file=file),
                severity=None if layout.live[row] or min(box.sizes) < 0 else Severity.INFO,
                notes=(("where", place),),
                hint="compare with the same tensor of the previous step; the other chunks show its true size",
            )


def _fault(box: Box, shape: tuple[int, ...]) -> str:
    """By how many elements a box leaves a shape on its worst axis, or which of its sizes is negative.

    >>> _fault(Box((12,), (8,)), (16,)), _fault(Box((4, 0), (-2, 8)), (16, 8))
    ('reaches 4 beyond the tensor on dim 0 (size 16, 1/4 of it)', 'has size -2 on dim 0')
    """
    axis = min(range(len(shape)), key=lambda a: box.sizes[a])
    if box.sizes[axis] < 0:
        return f"has size {box.sizes[axis]:,} on dim {axis}"
    excess = [max(-start, stop - size) for start, stop, size in zip(box.offsets, box.ends, shape, strict=True)]
    axis = max(range(len(shape)), key=lambda a: excess[a])
    size = shape[axis]
    ratio = Fraction(excess[axis], size) if size else Fraction(1, _DENOMINATOR + 1)
    share = f", {ratio} of it" if ratio.denominator <= _DENOMINATOR else ""
    return f"reaches {excess[axis]:,} beyond the tensor on dim {axis} (size {size:,}{share})"
