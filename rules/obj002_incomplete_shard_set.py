from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

import numpy as np

from ckptlint.model import Checkpoint
from ckptlint.model.text import first_names, numbered, plural, shape_text, verb
from ckptlint.rule import Finding, Location, Note, Severity, rule
from ckptlint.vocabulary.mesh import axes_of_size

_GRID_LIMIT = 1_000_000


@rule("OBJ002", "incomplete-shard-set", Severity.ERROR, whole=True, needs=("ShardedObjects",))
def incomplete_shard_set(ckpt: Checkpoint) -> Iterator[Finding]:
    """Some shards of a ShardedObject are missing.

    What it checks:
        For every key with the suffix `/shard_<offset>_<shape>`, the offsets fill the grid `shape`. It is a warning for
        `_extra_state`, whose absence most loads survive.
    Why it matters:
        Megatron-Core refuses to load a key whose shards are not all there.
    Usual causes:
        Ranks were missing when the job saved, or a stage or branch of the model did not save.
    How to fix:
        Save again with all ranks, or go back to a complete step.
    See:
        megatron.core.dist_checkpointing.mapping.ShardedObject
    """
    for key, shape, rows in ckpt.objects.rows_by_grid():
        # zarr-era names may have a shape one shorter than the offset; they say nothing about the grid
        offsets = ckpt.objects.offsets_of(rows, len(shape))
        offsets = offsets[np.lexsort(offsets.T[::-1])]
        present = offsets[np.append(True, (offsets[1:] != offsets[:-1]).any(axis=1))[: len(offsets)]]
        is_inside = (present < np.array(shape, np.int64)).all(axis=1)
        inside = present[is_inside]
        lost, outside = prod(shape) - len(inside), len(present) - len(inside)
        if not len(present) or not (lost or outside):
            continue
        place = f"{ckpt.metadata_file}: grid {shape_text(shape)}, {len(inside):,} of {prod(shape):,} shards stored"
        if outside:
            far = present[~is_inside][0]
            subject = f"{plural(outside, 'shard')}{{of}} {verb(outside, 'lies')}"
            message = f"{subject} outside its grid {shape_text(shape)}, the first at {shape_text(far.tolist())}"
        else:
            message = f"{lost:,} of {prod(shape):,} ShardedObject shards{{of}} {verb(lost, 'is')} missing"
        there = set(map(tuple, inside.tolist()))
        cells = product(*map(range, shape)) if prod(shape) <= _GRID_LIMIT else ()
        missing = [cell for cell in cells if cell not in there]
        yield Finding(
            message,
            at=Location(key, label=place),
            identity=tuple(".".join(map(str, offset)) for offset in missing[:64]),
            severity=Severity.WARNING if key.endswith("_extra_state") else None,
            notes=_which(ckpt, shape, missing, lost) if lost else (),
            hint="find the ranks that own the missing shards: they did not save, or none of them was the main replica "
            "(replica_id 0)"
            if lost
            else "compare its keys with those of another step: they were made for another grid",
        )


def _which(ckpt: Checkpoint, shape: tuple[int, ...], missing: list[tuple[int, ...]], lost: int) -> tuple[Note, ...]:
    if not missing:
        return (("missing", f"{lost:,} shards"),)
    if len(shape) == 1:
        return (("missing", numbered("shard", (o[0] for o in missing))),)
    for axis, size in enumerate(shape):
        values = {offset[axis] for offset in missing}
        if len(values) < size and len(missing) == len(values) * prod(shape) // size:
            names = axes_of_size(ckpt.topology, size)
            name = f"dim {axis} ({names[0]})" if len(names) == 1 else f"dim {axis}"
            gone = f"{numbered('shard', values)} {verb(len(values), 'is')}"
            return (("mesh", f"{name} has {size} shards; {gone} missing everywhere"),)
    return (("missing", first_names((".".join(map(str, offset)) for offset in missing), 8)),)
