from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ckptlint.depth import Depth
from ckptlint.geometry.writers import ranks_of_files
from ckptlint.model import Checkpoint
from ckptlint.model.text import gaps, plural, ranges
from ckptlint.model.tiling import distinct
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule

_MOST = 2**16


@rule("PAY008", "rank-files", Severity.INFO, depth=Depth.FILES)
def rank_files(ckpt: Checkpoint) -> Iterator[Finding]:
    """Some ranks stored nothing.

    What it checks:
        Every rank has a payload file that some entry names: the rank numbers in the names have no gap. If the metadata
        holds the plans of all ranks, every rank that planned something counts.
    Why it matters:
        What other findings miss may belong to this rank. A rank stores nothing if it never saved, and also if
        deduplication gave all its items to other ranks.
    Usual causes:
        Deduplication, a save by one group of ranks only (HSDP), or a rank that never saved.
    How to fix:
        Nothing by itself; read it together with PAY003, GEO004 and OBJ002.
    See:
        torch.distributed.checkpoint.filesystem.FileSystemWriter
    """
    table = ckpt.records
    ranks = distinct(ranks_of_files(ckpt)[distinct(table.file[table.byte_length > 0])])
    present = set(ranks[ranks >= 0].tolist())
    if not present:
        raise NotApplicable("no payload file has a rank number in its name")
    planning = set(distinct(ckpt.save_plans.rank).tolist()) if ckpt.save_plans else None
    world = ckpt.topology.get("world")
    last = max(present) if planning is None or world is None else world.size - 1
    if planning is None:
        silent = [*islice((rank for rank in range(last + 1) if rank not in present), _MOST)]
        named = gaps(present, last + 1)
    else:
        silent = sorted(rank for rank in planning - present if rank <= last)
        named = ranges(silent)
    if silent:
        yield Finding(
            f"rank{'s' if len(silent) > 1 else ''} {named} of {last + 1} stored nothing: no entry names such a file",
            at=Location(label=f"{plural(len(present), 'rank')} of {last + 1} stored something", ranks=tuple(silent)),
            identity=tuple(map(str, silent)),
            inferred_from="the rank numbers in the names of the payload files",
        )
