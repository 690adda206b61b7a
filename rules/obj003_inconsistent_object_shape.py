"""OBJ003: the shards of one key agree on their grid."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Location, NotApplicable, Note, Severity, rule


@rule("OBJ003", "inconsistent-object-shape", Severity.ERROR)
def inconsistent_object_shape(ckpt: Checkpoint) -> Iterator[Finding]:
    """The shards of one ShardedObject name different grids.

    What it checks:
        All keys `<key>/shard_<offset>_<shape>` of one key have the same shape.
    Why it matters:
        The loader asks for one shape and finds half a set.
    Usual causes:
        Two saves of different topology in one folder, or ranks that disagree on the size of a group.
    How to fix:
        Save into an empty folder.
    See:
        megatron.core.dist_checkpointing.mapping.ShardedObject
    """
    if not ckpt.objects or not ckpt.is_megatron:
        raise NotApplicable("there are no ShardedObjects")
    shapes: dict[str, dict[tuple[int, ...], list[str]]] = defaultdict(lambda: defaultdict(list))
    for obj in ckpt.objects:
        offset = ".".join(map(str, obj.offset))
        file = ckpt.byte_range_of(obj.record)[0] if obj.record >= 0 else "no file"
        shapes[obj.key][obj.shape].append(f"{offset} in {file}")
    for key, found in shapes.items():
        if len(found) < 2:
            continue
        grids = " and ".join(str(list(shape)) for shape in sorted(found))
        notes: list[Note] = [
            (
                "grid",
                f"{list(shape)}: {', '.join(shards[:4])}{f' and {len(shards) - 4} more' if len(shards) > 4 else ''}",
            )
            for shape, shards in sorted(found.items())
        ]
        yield Finding(
            f"shards{{of}} name different grids: {grids}",
            at=Location(key),
            missing=tuple(map(str, sorted(found))),
            notes=tuple(notes),
            hint="compare the times of these files: the older set is a leftover of another topology",
        )
