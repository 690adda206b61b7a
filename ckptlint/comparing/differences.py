"""Finds differences of keys, shapes and dtypes between two checkpoints, and of chunks on request (`ckptlint diff`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, Literal

import numpy as np

from ckptlint.analysis.fit.key_matching import match_keys
from ckptlint.loaders.reference import tensors_of
from ckptlint.model import Checkpoint, Reference, Tensor
from ckptlint.model.text import plural
from ckptlint.shown import Shown

DifferenceKind = Literal["removed", "added", "renamed", "kind", "shape", "dtype", "cut", "files"]


@dataclass(frozen=True, slots=True)
class Item:
    """A stored entry: a tensor, an object of Megatron-Core, or bytes."""

    kind: Literal["tensor", "object", "bytes"]
    dtype: str = ""
    shape: tuple[int, ...] = ()
    is_flattened: bool = False

    def has_shape_of(self, other: Item) -> bool:
        """Whether the shapes are equal; flattened tensors need only the same number of elements."""
        if self.is_flattened or other.is_flattened:
            return prod(self.shape) == prod(other.shape)
        return self.shape == other.shape

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}" if self.kind == "tensor" else self.kind


@dataclass(frozen=True, slots=True)
class Difference:
    """One key that differs.

    Attributes:
        key: its name in the old checkpoint; in the new one where only that has it.
        old, new: what the two hold, "" where there is nothing.
        other: the name in the new checkpoint, of a tensor that is there under another one.
    """

    kind: DifferenceKind
    key: str
    old: str = ""
    new: str = ""
    other: str = ""


@dataclass(frozen=True, eq=False, repr=False)
class Diff(Shown):
    """Two checkpoints and what differs.

    Attributes:
        old, new: the checkpoints of either side, one for each component.
        shared: keys that both have.
    """

    old: Sequence[Checkpoint]
    new: Sequence[Checkpoint]
    shared: int = 0
    differences: list[Difference] = field(default_factory=list)

    def __repr__(self) -> str:
        paths = " -> ".join(", ".join(ckpt.path for ckpt in side) for side in (self.old, self.new))
        return f"<Diff {paths}: {plural(len(self.differences), 'difference')}>"

    def rows(self) -> list[dict[str, Any]]:
        """A row for each difference; None for what is not there."""
        return [{name: value or None for name, value in asdict(item).items()} for item in self.differences]

    @property
    def exit_code(self) -> int:
        """0 the same, 1 different."""
        return 1 if self.differences else 0

    @cached_property
    def counts(self) -> Counter[DifferenceKind]:
        """Differences by kind."""
        return Counter(item.kind for item in self.differences)


def differences(old: Mapping[str, Checkpoint], new: Mapping[str, Checkpoint], layout: bool = False) -> Diff:
    """The differences of two steps by component, single ones whatever their names; `layout`: of chunks, files too."""
    shared, all_changes = 0, list[Difference]()
    if is_single := len(old) == len(new) == 1:
        old, new = ({"": ckpt} for ckpt in (*old.values(), *new.values()))
    for name in dict.fromkeys([*old, *new]):
        before, after = (side.get(name) or Checkpoint("", "dcp") for side in (old, new))
        count, changes = _compare(before, after, layout)
        shared += count
        all_changes += [item if is_single else replace(item, key=f"{name}/{item.key}") for item in changes]
    return Diff([*old.values()], [*new.values()], shared, all_changes)


def _compare(old: Checkpoint, new: Checkpoint, layout: bool) -> tuple[int, list[Difference]]:
    """(number of shared keys, differences): removed, added and renamed keys, changed kinds, shapes and chunks."""
    before, after = _items(old), _items(new)
    shared = [key for key in before if key in after]
    changes = list(_renamed(old, new, before, after))
    for key in shared:
        a, b = before[key], after[key]
        if a.kind != b.kind:
            changes.append(Difference("kind", key, str(a), str(b)))
            continue
        if not a.has_shape_of(b):
            changes.append(Difference("shape", key, str(list(a.shape)), str(list(b.shape))))
        if a.dtype != b.dtype:
            changes.append(Difference("dtype", key, a.dtype, b.dtype))
        if layout and a.kind == "tensor" and a.shape == b.shape:
            changes += _layout(old, old.tensors[key], new, new.tensors[key])
    grids = [dict(ckpt.objects.grids) for ckpt in (old, new)] if layout else [{}, {}]
    for key, shape in grids[0].items():  # of objects: Megatron-Core keeps the mesh in them
        if (new_shape := grids[1].get(key, shape)) != shape:
            texts = ("grid " + " x ".join(map(str, grid)) for grid in (shape, new_shape))
            changes.append(Difference("cut", key, *texts))
    return len(shared), changes


def _items(ckpt: Checkpoint) -> dict[str, Item]:
    """Everything by key; the shards of one object of Megatron-Core are one item."""
    items = {t.fqn: Item("tensor", t.dtype, t.global_shape, t.is_flattened) for t in ckpt.tensors.values()}
    items |= {entry.fqn: Item("bytes") for entry in ckpt.byte_objects}
    return items | {key: Item("object") for key in ckpt.objects.keys}


def _renamed(
    old: Checkpoint, new: Checkpoint, before: Mapping[str, Item], after: Mapping[str, Item]
) -> Iterator[Difference]:
    """The keys that one side alone has; those that mean the same under another name or stacking are paired."""
    removed, added = [key for key in before if key not in after], [key for key in after if key not in before]
    mine = replace(new, tensors={key: new.tensors[key] for key in added if key in new.tensors})
    theirs = tensors_of(replace(old, tensors={key: old.tensors[key] for key in removed if key in old.tensors}))
    paired: set[tuple[str, str]] = set()
    if mine.tensors and theirs:
        for pair in match_keys(mine, Reference("", "checkpoint", theirs)).pairs:
            key, new_key = pair.expected.fqn, pair.stored.fqn
            is_same = pair.expected_shape == pair.stored_shape
            is_same = is_same or (pair.alike and before[key].has_shape_of(after[new_key]))
            if is_same and (key, new_key) not in paired:
                paired.add((key, new_key))
                yield Difference("renamed", key, str(before[key]), str(after[new_key]), new_key)
    gone, come = {key for key, _ in paired}, {new_key for _, new_key in paired}
    yield from (Difference("removed", key, old=str(before[key])) for key in removed if key not in gone)
    yield from (Difference("added", key, new=str(after[key])) for key in added if key not in come)


def _layout(old: Checkpoint, before: Tensor, new: Checkpoint, after: Tensor) -> Iterator[Difference]:
    """Chunks by their place; the files only of tensors that are cut alike."""
    a, b = _by_place(before), _by_place(after)
    sides = ((before, a), (after, b))
    offsets, sizes = ([getattr(tensor.tiling, name)[rows] for tensor, rows in sides] for name in ("offsets", "sizes"))
    if not (np.array_equal(*offsets) and np.array_equal(*sizes)):
        texts = [_cut(before), _cut(after)]
        if texts[0] == texts[1]:
            texts[1] += ", at different offsets"
        yield Difference("cut", before.fqn, *texts)
        return
    placed = ((old, before, a), (new, after, b))
    files = [[ckpt.chunk_file(tensor, row) for row in rows.tolist()] for ckpt, tensor, rows in placed]
    if files[0] != files[1]:
        first = next(i for i, (x, y) in enumerate(zip(*files, strict=True)) if x != y)
        yield Difference("files", before.fqn, *(names[first] or "stored nowhere" for names in files))


def _by_place(tensor: Tensor) -> Any:
    """Rows of the chunk table in the order of their offsets and sizes."""
    keys = np.concatenate([tensor.tiling.sizes, tensor.tiling.offsets], axis=1)
    return np.lexsort(keys.T) if keys.shape[1] else np.arange(len(keys))


def _cut(tensor: Tensor) -> str:
    """`4 x 1 in 4 chunks`: into how many intervals each axis is cut."""
    chunks = plural(len(tensor.chunks) + len(tensor.malformed), "chunk")
    if not tensor.is_sound or not tensor.global_shape:
        return chunks
    degrees = " x ".join(str(len(tensor.tiling.intervals(axis))) for axis in range(len(tensor.global_shape)))
    return f"{degrees} in {chunks}"
