"""GEO004: every element of a tensor is stored in some chunk."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.geometry.coverage import holes
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule
from ckptlint.vocabulary.config_fields import attributes

_BUCKET = ".bucket_idx_"


@rule("GEO004", "coverage-hole", Severity.ERROR, whole=True)
def coverage_hole(ckpt: Checkpoint) -> Iterator[Finding]:
    """Part of a tensor's global shape is in no chunk.

    What it checks:
        Every index of the global shape lies in at least one chunk. A warning in the buckets of Megatron-Core's
        distributed optimizer where the common state declares padding, which is not stored and not decoded here.
    Why it matters:
        A load leaves this region as it was in memory and raises nothing.
    Usual causes:
        One rank's state dict lacked the tensor, a mesh axis was lost from its placements, padding was not declared, or
        the plan of an earlier save was reused.
    How to fix:
        Repair the placements and save again from the job, or go back to a step that passes.
    See:
        torch.distributed.checkpoint.metadata.TensorStorageMetadata
    """
    yield from holes(ckpt, _BUCKET if _declares_padding(ckpt) else None)


def _declares_padding(ckpt: Checkpoint) -> bool:
    """Whether the common state says that some ranges of the optimizer's buckets are padding.

    Source:
        `content_metadata` of a development branch of Megatron-Core; no release writes such a declaration yet
    """
    content = attributes(ckpt.common.values.get("content_metadata")) if ckpt.common else {}
    return any("padding" in key for key in content)
