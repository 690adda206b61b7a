from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ckptlint.analysis.chunks.missing import absent_writer
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint
from ckptlint.model.text import verb
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule


@rule("PAY001", "chunk-without-storage", Severity.ERROR, needs=("no torch file",))
def chunk_without_storage(ckpt: Checkpoint) -> Iterator[Finding]:
    """A chunk or bytes entry has no storage entry.

    What it checks:
        storage_data has an entry for every chunk with elements, every bytes entry and every ShardedObject, under its
        key and offset.
    Why it matters:
        The load cannot find these bytes, and fails.
    Usual causes:
        The save did not merge the results of some ranks, reused the plan of an earlier save, or somebody edited the
        metadata.
    How to fix:
        Save again with a fresh plan.
    See:
        torch.distributed.checkpoint.metadata.Metadata.storage_data
    """
    if not len(ckpt.records):
        lost = sum(bool(t.tiling.live.any()) for t in ckpt.sound_tensors()) + len(ckpt.objects) + len(ckpt.byte_objects)
        if not lost:
            raise NotApplicable("nothing is stored")
        message = f"storage_data is empty: {'1 entry has' if lost == 1 else f'all {lost:,} entries have'} no known file"
        hint = "restore the original .metadata: a rewrite or a merge dropped its storage part"
        yield Finding(message, identity=("all",), hint=hint)
        return
    unreferenced = grouped((ckpt.records.name(row), row) for row in np.flatnonzero(~ckpt.records.owned).tolist())
    for tensor in ckpt.sound_tensors():
        rows = np.flatnonzero((tensor.chunks.record < 0) & tensor.tiling.live)
        if not len(rows):
            continue
        box = tensor.tiling.box(int(rows[0]))
        count = f"chunk {box}" if len(rows) == 1 else f"{len(rows):,} of {len(tensor.chunks):,} chunks"
        owner = absent_writer(ckpt, tensor, box) if len(rows) == 1 else None
        unfiled_rows = unreferenced.get(tensor.fqn, [])[:3]
        hint = "save again with a fresh plan, or restore the original .metadata"
        if offsets := [str(list(ckpt.records.unreferenced[row] or ())) for row in unfiled_rows]:
            hint = f"compare the offsets: storage_data has an entry at {', '.join(offsets)}, where no chunk starts"
        files = sorted({ckpt.chunk_file(tensor, row) for row in range(min(len(tensor.chunks), 512))} - {""})
        yield Finding(
            f"{count}{{of}} {verb(len(rows), 'has')} no storage entry",
            at=Location(tensor, region=box, rows=tuple(rows[:16].tolist()), ranks=() if owner is None else (owner,)),
            notes=(("stored", "its other chunks are in " + ", ".join(files[:6]) if files else "none of it is stored"),),
            hint=hint,
        )
    lost_objects = np.flatnonzero(ckpt.objects.record < 0).tolist()
    unfiled = [ckpt.objects[row].fqn for row in lost_objects] + [b.fqn for b in ckpt.byte_objects if b.record < 0]
    for fqn in unfiled:
        yield Finding("the bytes{of} have no storage entry", at=Location(fqn))
