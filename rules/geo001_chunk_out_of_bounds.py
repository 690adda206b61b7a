"""GEO001: every chunk lies inside its tensor."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.boxes import Box
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("GEO001", "chunk-out-of-bounds", Severity.ERROR)
def chunk_out_of_bounds(ckpt: Checkpoint) -> Iterator[Finding]:
    """A chunk leaves the tensor it belongs to.

    What it checks:
        On every axis a chunk starts at 0 or later, its size is not negative, and it ends at the global size or before.
        An empty chunk outside is a note only.
    Why it matters:
        A load reads the wrong rows, or fails on this tensor.
    Usual causes:
        The global size counts packed elements and the offset unpacked ones (NVFP4), padding is counted in the offset
        but not in the size, or the metadata was edited.
    How to fix:
        Make the writer declare the size it strides over, and save again.
    See:
        torch.distributed.checkpoint.metadata.ChunkStorageMetadata
    """
    for tensor in ckpt.sound_tensors():
        layout = tensor.layout
        for row in layout.outside.tolist():
            box = layout.box(row)
            axis, excess = _worst_axis(box, tensor.global_shape)
            size = tensor.global_shape[axis]
            share = f", {excess / size:.3g} of the axis" if size else ""
            yield Finding(
                f"chunk {box}{{of}} leaves the tensor by {excess:,} on dim {axis} (size {size:,}{share})",
                fqn=tensor.fqn,
                tensor=tensor,
                region=box if layout.live[row] else None,
                rows=(row,),
                file=ckpt.chunk_file(tensor, row),
                severity=None if layout.live[row] or min(box.sizes) < 0 else Severity.INFO,
                notes=(("where", f"the chunk is stored in {ckpt.chunk_file(tensor, row) or 'no file'}"),),
                hint="compare this tensor with the same one of the step before; the other chunks tell its true size",
            )


def _worst_axis(box: Box, shape: tuple[int, ...]) -> tuple[int, int]:
    """The axis on which a box leaves a shape most, and by how many elements."""
    excess = [
        max(-start, start + size - extent, -size)
        for start, size, extent in zip(box.offsets, box.sizes, shape, strict=True)
    ]
    axis = max(range(len(shape)), key=lambda a: excess[a])
    return axis, excess[axis]
