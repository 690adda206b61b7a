from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from ckptlint.analysis.ranks.save_plans import Duplicate, duplicates
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint, RecordState
from ckptlint.model.text import join_words, named_ranks, plural, shape_text
from ckptlint.rule import Finding, Location, NotApplicable, Note, Severity, require, rule
from ckptlint.vocabulary.keys import role


@rule("OBJ001", "duplicate-writer", Severity.ERROR, needs=("Megatron-Core",))
def duplicate_writer(ckpt: Checkpoint) -> Iterator[Finding]:
    """Several ranks planned to write the same key at the same offset.

    What it checks:
        In the plans of all ranks, which Megatron-Core stores from before deduplication, every key and offset occurs
        once. Equal sizes, shapes and dtypes make it a warning. Not judged where plans are absent, were reused from
        another state, or come from a writer whose ranks all plan their replicas. From depth headers on, the record of
        every ShardedObject is a list of one; a longer list holds several objects that one rank saved under one key.
    Why it matters:
        The save keeps one copy and silently drops the rest, so if they differed, a module or a rank has lost
        its state.
    Usual causes:
        replica_id lacks a mesh axis (tp, ep); two modules share inner keys without a prefix; two pipeline stages claim
        a tied layer.
    How to fix:
        Put every replicated axis into replica_id, and prefix keys per module.
    See:
        megatron.core.dist_checkpointing.validation.validate_sharding_integrity
    """
    yield from _lists(ckpt)
    if ckpt.save_plans is None:
        if ckpt.payload is None:
            raise NotApplicable("the metadata holds no plans of the ranks")
        return
    if set(ckpt.save_plans.fqns) != set(ckpt.records.fqns):
        if ckpt.payload is not None:
            return
        raise NotApplicable("the plans belong to another state: their keys differ from the metadata's")
    groups = grouped(
        ((role(duplicate.fqn), duplicate.fqn, duplicate.ranks, duplicate.equal), duplicate)
        for duplicate in duplicates(ckpt.save_plans)
    )
    for same in groups.values():
        first = same[0]
        ranks = f"ranks {join_words([*map(str, first.ranks)])}" if len(first.ranks) < 4 else named_ranks(first.ranks)
        all_ = "both" if len(first.ranks) == 2 else "all"
        what = "a copy" if first.offset is None else plural(len(same), "chunk")
        each = " of each" if first.offset is not None and len(same) > 1 else ""
        yield Finding(
            f"{ranks} {all_} wrote {what}{{of}}; one copy{each} was kept",
            at=Location(ckpt.tensors.get(first.fqn, first.fqn), ranks=first.ranks),
            identity=tuple(str(duplicate.offset) for duplicate in same),
            kind="object" if first.offset is None else "chunk",
            severity=Severity.WARNING if first.equal else None,
            explain=partial(_plans, ckpt, first),
            hint=f"compare replica_id of {ranks}; if their values differed, all but one copy is lost",
            group=f"{first.ranks} {first.equal}",
        )


def _lists(ckpt: Checkpoint) -> Iterator[Finding]:
    """Objects with several values in one record.

    Source: megatron.core.dist_checkpointing.strategies.torch.mcore_to_pyt_state_dict: one list per key and rank
    """
    payload, record = ckpt.payload, ckpt.objects.record
    if payload is None:
        return
    lists = [number for number, content in enumerate(payload.contents) if content.length > 1]
    is_list = (payload.state == RecordState.READ) & np.isin(payload.content, lists)
    for row in np.flatnonzero((record >= 0) & is_list[record]).tolist() if lists else ():
        obj = ckpt.objects[row]
        count = payload.contents[int(payload.content[obj.record])].length
        file, start, length = ckpt.byte_range_of(obj.record)
        yield Finding(
            f"one rank saved {count} objects{{of}} under one key",
            at=Location(obj.fqn, file=file, byte_range=(start, length)),
            identity=("list",),
            kind="list",
            notes=(("record", f"{file}, bytes {start:,}-{start + length - 1:,}: a list of {count}"),),
            why="loading returns the first of them, so the state of the others is lost",
            hint="give each module its own prefix: two of them share this key on one rank",
            group=f"list {count}",
        )


def _plans(ckpt: Checkpoint, duplicate: Duplicate) -> tuple[Note, ...]:
    """Notes on the file that the entry points to, and on how the ranks' plans differ."""
    table, record = require(ckpt.save_plans), -1
    tensor = ckpt.tensors.get(duplicate.fqn)
    if duplicate.offset is None:
        records = {o.fqn: o.record for o in ckpt.objects} | {b.fqn: b.record for b in ckpt.byte_objects}
        record = records.get(duplicate.fqn, -1)
    elif tensor is not None and len(duplicate.offset) == len(tensor.global_shape):
        is_there = (tensor.tiling.offsets == np.array(duplicate.offset, np.int64)).all(axis=1)
        record = int(tensor.chunks.record[is_there][0]) if is_there.any() else -1
    kept = f"the entry points to {ckpt.byte_range_of(record)[0]}" if record >= 0 else "no entry is left"
    notes: list[Note] = [("kept", kept)]
    if duplicate.offset is None:
        notes.append(("plans", "the plans do not say whether the objects are equal"))
    elif duplicate.equal:
        notes.append(
            ("plans", "sizes and dtypes are equal on these ranks; the plans do not say whether the values are")
        )
    else:
        for row in duplicate.rows[:4]:
            sizes, shape = ([v for v in column[row].tolist() if v >= 0] for column in (table.sizes, table.global_shape))
            dtype = table.dtypes[int(table.dtype[row])] if table.dtype[row] >= 0 else "bytes"
            text = f"rank {int(table.rank[row])}: sizes {shape_text(sizes)} of {shape_text(shape)}, {dtype}"
            notes.append(("plan", text))
    return tuple(notes)
