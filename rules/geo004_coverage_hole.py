from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.chunks.coverage import holes
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule
from ckptlint.vocabulary.config_fields import attributes

_BUCKET = ".bucket_idx_"


@rule("GEO004", "coverage-hole", Severity.ERROR, whole=True)
def coverage_hole(ckpt: Checkpoint) -> Iterator[Finding]:
    """Part of a tensor is missing: no chunk holds it.

    What it checks:
        Every index of the global shape lies in at least one chunk. In the buckets of Megatron-Core's distributed
        optimizer a hole is only a warning if the common state declares padding, which nobody stores.
    Why it matters:
        Loading raises no error; this part keeps whatever was in memory.
    Usual causes:
        One rank's state dict lacked the tensor; the placements lost a mesh axis; padding was not declared; the plan of
        an earlier save was reused.
    How to fix:
        Repair the placements and save again from the job, or go back to a step that passes.
    See:
        torch.distributed.checkpoint.metadata.TensorStorageMetadata
    """
    # a development branch of Megatron-Core declares which ranges of buckets are padding; no release writes that yet
    content = attributes(ckpt.common_value("content_metadata"))
    yield from holes(ckpt, _BUCKET if any("padding" in key for key in content) else None)
