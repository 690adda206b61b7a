"""PAY008: every rank has a file."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.depth import Depth
from ckptlint.geometry.chunk_graph import ranks_of_files
from ckptlint.model import Checkpoint
from ckptlint.model.layout import distinct
from ckptlint.model.text import ranges
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule


@rule("PAY008", "rank-files", Severity.INFO, needs=Depth.FILES)
def rank_files(ckpt: Checkpoint) -> Iterator[Finding]:
    """Some ranks stored nothing.

    What it checks:
        The numbers in the names of the payload files that entries refer to have no gap. Where the plans of all ranks
        are stored they reach the number of ranks, and ranks that planned nothing do not count.
    Why it matters:
        It is context for other findings: a rank whose every item was deduplicated stores nothing, and so does a rank
        that was lost.
    Usual causes:
        Deduplication, a save by one group of ranks only (HSDP), or a lost file.
    How to fix:
        Nothing by itself; read it together with PAY003, GEO004 and OBJ002.
    See:
        torch.distributed.checkpoint.filesystem.FileSystemWriter
    """
    table = ckpt.records
    ranks = distinct(ranks_of_files(ckpt)[distinct(table.file[table.byte_length > 0])])
    present = set(ranks[ranks >= 0].tolist())
    if not present:
        raise NotApplicable("no payload file carries a rank number")
    planning = set(distinct(ckpt.save_plans.rank).tolist()) if ckpt.save_plans else None
    world = ckpt.topology.get("world")
    last = max(present) if planning is None or world is None else world.size - 1
    silent = set(range(last + 1)) - present
    if planning is not None:
        silent &= planning
    if silent:
        yield Finding(
            f"rank{'s' if len(silent) > 1 else ''} {ranges(silent)} of {last + 1} stored nothing that an entry names",
            at=Location(label=f"{len(present)} ranks stored something", ranks=tuple(sorted(silent))),
            missing=tuple(str(rank) for rank in sorted(silent)),
        )
