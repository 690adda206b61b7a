"""GEO003: no element is in two chunks."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.geometry.coverage import overlaps
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("GEO003", "chunk-overlap", Severity.ERROR)
def chunk_overlap(ckpt: Checkpoint) -> Iterator[Finding]:
    """Two chunks of a tensor hold the same elements.

    What it checks:
        No two chunks with different offsets share an element. Empty chunks count for nothing; equal offsets are GEO007.
    Why it matters:
        A load raises nothing and keeps whichever chunk is read last.
    Usual causes:
        Two ranks claim the region because replica_id or the placement lacks a mesh axis, or offsets were computed from
        padded sizes.
    How to fix:
        Correct the placement and save again.
    See:
        torch.distributed.checkpoint.default_planner._validate_global_plan
    """
    yield from overlaps(ckpt)
