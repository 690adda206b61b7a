"""GEO006: a tensor with elements has a chunk with elements."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Location, Severity, rule
from ckptlint.vocabulary.keys import role


@rule("GEO006", "empty-chunk-list", Severity.ERROR, whole=True)
def empty_chunk_list(ckpt: Checkpoint) -> Iterator[Finding]:
    """A tensor is listed, but no chunk holds any of it.

    What it checks:
        A tensor whose global shape has elements has at least one chunk with elements. A scalar needs its one chunk.
    Why it matters:
        The key loads as if it were there, and nothing is read.
    Usual causes:
        No rank considered itself the writer, because the main replica was elected in the wrong group.
    How to fix:
        Elect the main replica in the right group, and save again.
    See:
        torch.distributed.checkpoint.metadata.TensorStorageMetadata
    """
    stored = {role(tensor.fqn) for tensor in ckpt.sound_tensors() if tensor.layout.live.any()}
    for tensor in ckpt.sound_tensors():
        if tensor.volume and not tensor.layout.live.any():
            count = "its chunk list is empty" if not len(tensor.chunks) else "all its chunks are empty"
            yield Finding(
                f"nothing{{of}} is stored: {count}",
                at=Location.of(tensor),
                hint="compare with the same tensor of another layer, which has chunks"
                if role(tensor.fqn) in stored
                else "check which rank is elected to write it (replica_id): none was",
            )
