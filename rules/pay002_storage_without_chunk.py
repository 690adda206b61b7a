from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Location, Severity, rule

_SHOWN = 64


@rule("PAY002", "storage-without-chunk", Severity.WARNING, needs=("no safetensors", "no torch file"), whole=True)
def storage_without_chunk(ckpt: Checkpoint) -> Iterator[Finding]:
    """A storage entry matches no chunk and no bytes entry.

    What it checks:
        Each entry in storage_data has the key and offset of a chunk or of a bytes entry. Tensors with wrong chunks are
        left to GEO001, GEO002 and PAY001.
    Why it matters:
        The file holds bytes that no key uses.
    Usual causes:
        The save reused a cached plan of another state, or somebody edited the metadata.
    How to fix:
        Save again with a fresh plan.
    See:
        torch.distributed.checkpoint.metadata.Metadata.storage_data
    """
    table = ckpt.records
    stray = np.flatnonzero(~table.owned)
    if not len(stray):
        return
    excused = {
        tensor.fqn
        for tensor in ckpt.tensors.values()
        if not tensor.is_sound or len(tensor.tiling.outside) or ((tensor.chunks.record < 0) & tensor.tiling.live).any()
    }
    others = {entry.fqn for entry in ckpt.objects} | {entry.fqn for entry in ckpt.byte_objects}
    by_key = grouped((table.name(row), row) for row in stray.tolist())
    for fqn, rows in by_key.items():
        if fqn in excused:
            continue
        row, more = rows[0], len(rows) > 1
        offset = table.unreferenced[row]
        where = "without an offset" if offset is None else f"at offset {list(offset)}"
        file, start, length = ckpt.byte_range_of(row)
        known = "it is not a tensor" if fqn in others else "there is no such key"
        known = "no chunk starts there" if fqn in ckpt.tensors else known
        yield Finding(
            f"{len(rows):,} storage entries{{of}} match nothing, the first {where}: {known}"
            if more
            else f"the storage entry{{of}} {where} matches nothing: {known}",
            at=Location(fqn, file=file, byte_range=(start, length)),
            identity=tuple(str(table.unreferenced[row]) for row in rows[:_SHOWN]),
            hint="compare the keys with those of another step; a reused plan repeats the keys of an older state",
        )
