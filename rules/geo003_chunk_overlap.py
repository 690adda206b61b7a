from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.chunks.coverage import overlaps
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("GEO003", "chunk-overlap", Severity.ERROR)
def chunk_overlap(ckpt: Checkpoint) -> Iterator[Finding]:
    """Two chunks of a tensor hold the same elements.

    What it checks:
        No two chunks with different offsets share an element. Empty chunks do not count; chunks with equal offsets are
        GEO007. Where the chunks come from files of two saves, each complete by itself, the finding says so.
    Why it matters:
        Loading raises no error and keeps whichever chunk it reads last.
    Usual causes:
        Two ranks claim the region because replica_id or the placement lacks a mesh axis; offsets were computed from
        padded sizes; files of two saves lie in one folder.
    How to fix:
        Correct the placement and save again. If the files come from two saves, move the older set away.
    See:
        torch.distributed.checkpoint.default_planner._validate_global_plan
    """
    yield from overlaps(ckpt)
