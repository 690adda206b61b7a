from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from ckptlint.analysis.optimizer.inventory import dp_group
from ckptlint.model import ByteObject, Checkpoint, Tensor
from ckptlint.model.text import first_names, fold_names, plural
from ckptlint.model.tiling import IntArray
from ckptlint.rule import Finding, Location, Severity, rule
from ckptlint.vocabulary.keys import parse

_SHOWN = 4
_EXTRA = "_extra_state"


@dataclass(slots=True)
class _Kinds:
    """Everything stored under one logical key: tensors, bytes entries, and rows of ShardedObjects."""

    tensors: list[Tensor] = field(default_factory=list)
    shards: list[IntArray] = field(default_factory=list)
    entries: list[ByteObject] = field(default_factory=list)


@rule("OBJ006", "kind-clash", Severity.WARNING)
def kind_clash(ckpt: Checkpoint) -> Iterator[Finding]:
    """One logical key is a tensor in one place and bytes in another.

    What it checks:
        A key that differs only by the number of a layer or expert, by a wrapper, or by standing in the optimizer
        instead of the model, is a tensor everywhere or bytes everywhere. It is info for `_extra_state`; other runtime
        entries are left out.
    Why it matters:
        A planner decides how to read a key by its kind in the running job, and fails late if the file stores the
        other kind.
    Usual causes:
        A library changed how it wraps a state between the saves of two parts.
    How to fix:
        Load with the version that wrote it, and save again.
    See:
        torch.distributed.checkpoint.metadata.BytesStorageMetadata
    """
    kinds_of: dict[tuple[object, ...], _Kinds] = defaultdict(_Kinds)
    for key, _, rows in ckpt.objects.rows_by_grid():
        if name := _logical(key):
            kinds_of[name].shards.append(rows)
    for entry in ckpt.byte_objects:
        if name := _logical(entry.fqn):
            kinds_of[name].entries.append(entry)
    for tensor in ckpt.tensors.values() if kinds_of else ():
        if (name := _logical(tensor.fqn)) in kinds_of:
            kinds_of[name].tensors.append(tensor)
    for kinds in kinds_of.values():
        if kinds.tensors:
            yield _finding(ckpt, kinds)


def _logical(fqn: str) -> tuple[object, ...] | None:
    """A key that is equal for two names of one thing; None for runtime entries and keys of no parameter."""
    key = parse(fqn)
    if key.kind == "runtime" and not key.path.endswith(_EXTRA):
        return None
    if key.kind == "optimizer":
        if dp_group(fqn) is not None:
            return None
        inner = parse(key.path.split(".", 1)[1])
        return (key.scope, inner.role) if inner.role else None
    role = key.role or parse(key.path.removesuffix(_EXTRA) + "extra").role
    return key.scope, role


def _finding(ckpt: Checkpoint, kinds: _Kinds) -> Finding:
    lead = kinds.tensors[0]
    is_extra = lead.fqn.endswith(_EXTRA)
    shards = [ckpt.objects[row] for rows in kinds.shards for row in rows.tolist()]
    in_bytes = [(obj.fqn, obj.record) for obj in shards] + [(entry.fqn, entry.record) for entry in kinds.entries]
    files = {ckpt.byte_range_of(record)[0] for _, record in in_bytes if record >= 0}
    files |= {ckpt.chunk_file(tensor, 0) for tensor in kinds.tensors if len(tensor.chunks)} - {""}
    return Finding(
        f"key{{of}} is a tensor here and bytes elsewhere: {plural(len(kinds.tensors), 'tensor')}, "
        f"{len(in_bytes)} in bytes",
        at=Location(lead),
        severity=Severity.INFO if is_extra else None,
        notes=(
            ("tensors", first_names(fold_names(t.fqn for t in kinds.tensors), _SHOWN, "pattern")),
            ("bytes", first_names(fold_names(fqn for fqn, _ in in_bytes), _SHOWN, "pattern")),
            ("stored in", ", ".join(sorted(files)[:_SHOWN]) + (" and others" if len(files) > _SHOWN else "")),
        ),
        hint="find out which library version wrote each of the two, and load with that one",
        inferred_from="keys that are equal but for a number or a wrapper",
    )
