from __future__ import annotations

from collections.abc import Iterator

from ckptlint.model import Checkpoint
from ckptlint.model.text import plural, shape_text, verb
from ckptlint.rule import Finding, Location, Severity, rule


@rule("GEO002", "chunk-rank-mismatch", Severity.ERROR)
def chunk_rank_mismatch(ckpt: Checkpoint) -> Iterator[Finding]:
    """A chunk has a different number of dims from its tensor.

    What it checks:
        The offsets and the sizes of each chunk have as many numbers as the global shape.
    Why it matters:
        torch raises an IndexError that does not name the tensor, or slices the wrong dims.
    Usual causes:
        A layer or expert dim was prepended to the offsets but not to the sizes, or somebody edited the shape.
    How to fix:
        Prepend the same dims to the sizes as to the offsets, and save again.
    See:
        torch.distributed.checkpoint.metadata.ChunkStorageMetadata
    """
    for tensor in ckpt.tensors.values():
        chunks = [c for c in tensor.malformed if not len(c.offsets) == len(c.sizes) == len(tensor.global_shape)]
        if not chunks or not tensor.is_representable:
            continue
        chunk = chunks[0]
        yield Finding(
            f"{len(chunks)} of {plural(len(chunks) + len(tensor.chunks), 'chunk')}{{of}} "
            f"{verb(len(chunks), 'does')} not have the tensor's {len(tensor.global_shape)} dims: "
            f"offsets {shape_text(chunk.offsets)}, sizes {shape_text(chunk.sizes)}, "
            f"shape {shape_text(tensor.global_shape)}",
            at=Location(tensor),
            hint="look for a dim (layer, expert) that was prepended or dropped on one side only",
        )
