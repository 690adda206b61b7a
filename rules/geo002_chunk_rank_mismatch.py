"""GEO002: offsets, sizes and shape have one length."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Location, Severity, rule


@rule("GEO002", "chunk-rank-mismatch", Severity.ERROR)
def chunk_rank_mismatch(ckpt: Checkpoint) -> Iterator[Finding]:
    """A chunk has another number of axes than its tensor.

    What it checks:
        The offsets and the sizes of each chunk have as many numbers as the global shape.
    Why it matters:
        torch raises an IndexError that does not name the tensor, or slices the wrong axes.
    Usual causes:
        Prepended layer or expert axes are present in the offsets and absent in the sizes, or the shape was edited.
    How to fix:
        Give the sizes the same leading ones as the offsets, and save again.
    See:
        torch.distributed.checkpoint.metadata.ChunkStorageMetadata
    """
    for tensor in ckpt.tensors.values():
        chunks = [c for c in tensor.malformed if not len(c.offsets) == len(c.sizes) == len(tensor.global_shape)]
        if not chunks or not tensor.is_representable:
            continue
        chunk = chunks[0]
        yield Finding(
            f"{len(chunks)} of {len(chunks) + len(tensor.chunks)} chunks{{of}} do not have its "
            f"{len(tensor.global_shape)} axes: offsets {list(chunk.offsets)}, sizes {list(chunk.sizes)}, "
            f"shape {list(tensor.global_shape)}",
            at=Location.of(tensor),
            hint="look for an axis that was prepended (layer, expert) or dropped on one side only",
        )
