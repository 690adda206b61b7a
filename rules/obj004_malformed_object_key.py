from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ckptlint.model import Checkpoint
from ckptlint.model.text import shape_text
from ckptlint.rule import Finding, Location, Severity, rule


@rule("OBJ004", "malformed-object-key", Severity.WARNING, needs=("Megatron-Core",))
def malformed_object_key(ckpt: Checkpoint) -> Iterator[Finding]:
    """The key of a ShardedObject does not parse.

    What it checks:
        In a Megatron-Core checkpoint every bytes entry with `/shard_` in its key is `<key>/shard_<offset>_<shape>`:
        numbers joined by dots, no other slash in the key, and as many numbers in offset and shape. One shape number
        less is allowed, as zarr-era writers leave one out.
    Why it matters:
        Megatron-Core splits the key on "/" and "_" and misreads it.
    Usual causes:
        A module name contains a slash, or somebody made the key by hand.
    How to fix:
        Rename the module key, and save again.
    See:
        megatron.core.dist_checkpointing.mapping.ShardedObject.empty_from_unique_key
    """
    for entry in ckpt.byte_objects:
        if "/shard_" in entry.fqn:
            key, _, suffix = entry.fqn.rpartition("/shard_")
            reason = f"the key {key!r} contains a slash" if "/" in key else f"{suffix!r} is not <offset>_<shape>"
            yield Finding(f"the object key{{of}} does not parse: {reason}", at=Location(entry.fqn))
    objects = ckpt.objects
    surplus = np.diff(objects.start) - np.array([len(shape) for _, shape in objects.grids], np.int64)[objects.grid]
    for row in np.flatnonzero((surplus != 0) & (surplus != 1)).tolist():
        obj = objects[row]
        yield Finding(
            f"the object key{{of}} does not parse: offset {shape_text(obj.offset)}, shape {shape_text(obj.shape)}",
            at=Location(obj.fqn),
        )
