from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ckptlint.model import Checkpoint
from ckptlint.model.text import first_names, shape_text
from ckptlint.model.tiling import IntArray
from ckptlint.rule import Finding, Location, Severity, rule


@rule("OBJ003", "inconsistent-object-shape", Severity.ERROR, needs=("ShardedObjects",))
def inconsistent_object_shape(ckpt: Checkpoint) -> Iterator[Finding]:
    """The shards of one ShardedObject name different grids.

    What it checks:
        All keys `<key>/shard_<offset>_<shape>` of one key have the same shape.
    Why it matters:
        The loader asks for one shape and finds half a set.
    Usual causes:
        Two saves of different topology lie in one folder, or ranks disagree on the size of a group.
    How to fix:
        Save into an empty folder.
    See:
        megatron.core.dist_checkpointing.mapping.ShardedObject
    """
    shapes: dict[str, dict[tuple[int, ...], IntArray]] = defaultdict(dict)
    for key, shape, rows in ckpt.objects.rows_by_grid():
        shapes[key][shape] = rows
    for key, rows_of in shapes.items():
        if len(rows_of) < 2:
            continue
        places_of: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for shape, obj in ((shape, ckpt.objects[row]) for shape, rows in rows_of.items() for row in rows.tolist()):
            file = ckpt.byte_range_of(obj.record)[0] if obj.record >= 0 else "no file"
            places_of[shape].append(f"{'.'.join(map(str, obj.offset))} in {file}")
        grids = " and ".join(map(shape_text, sorted(places_of)))
        texts = [f"{shape_text(shape)}: {first_names(shards)}" for shape, shards in sorted(places_of.items())]
        message = f"shards{{of}} name different grids: {grids}"
        notes = tuple(("grid", text) for text in texts)
        hint = "compare the times of these files: the older set is probably left from a save of another topology"
        yield Finding(message, at=Location(key), identity=tuple(map(str, sorted(places_of))), notes=notes, hint=hint)
