"""Compares two checkpoints by the values of their tensors (`ckptlint diff --values`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import numpy as np

from ckptlint.analysis.step_before.movement import Movement
from ckptlint.comparing.differences import differences
from ckptlint.comparing.locate_differences import locate_differences
from ckptlint.comparing.pairs.canonical import Heads
from ckptlint.comparing.pairs.matching import matches
from ckptlint.comparing.pairs.stacked import layer_by_layer, stacked
from ckptlint.comparing.sides import OpenedCheckpoint
from ckptlint.comparing.values.match import Match, Side
from ckptlint.comparing.values.merges import with_merges
from ckptlint.comparing.values.quantised import with_quantised
from ckptlint.comparing.values.same_bytes import UnequalError, twins_of
from ckptlint.comparing.values.updates import movements
from ckptlint.depth import Depth
from ckptlint.formats.pickles.safe_pickle import paused_gc
from ckptlint.model import Tensor
from ckptlint.model.cover import Shape
from ckptlint.model.text import first_names, plural, printable
from ckptlint.payload.reader import read_payload
from ckptlint.payload.reading import default_reading
from ckptlint.payload.tensor_bytes import TensorBytes
from ckptlint.seals.digests import Words
from ckptlint.seals.row_hashes import RowHashes, can_be_rounded, digest, new_salt
from ckptlint.shown import Shown
from ckptlint.vocabulary.config_fields import read_declared
from ckptlint.vocabulary.dtypes import FLOATS, ITEM_BITS
from ckptlint.vocabulary.keys import COMPUTED, parse


@dataclass(frozen=True, slots=True, repr=False)
class Values(Shown):
    """The result of a comparison by values.

    Attributes:
        old, new: key -> tensor.
        matches: related tensors of both sides.
        sentences: obstacles to reading a side.
        movements: how far each weight moved, where the sides are two steps of a run.
        lone: weights without any counterpart, except buffers and copies of matched weights.
    """

    old: Mapping[str, Side]
    new: Mapping[str, Side]
    matches: Sequence[Match]
    sentences: tuple[str, ...] = ()
    movements: Sequence[Movement] = ()
    lone: Sequence[str] = ()

    def __repr__(self) -> str:
        count, whole = self.proven
        return f"<Values: {count:,} of {plural(whole, 'tensor')} proven>"

    def rows(self) -> list[dict[str, Any]]:
        """One row per match; several keys of one side are joined into one text, and absent values are None."""
        rows = [match.as_dict() for match in self.matches]
        for row in rows:
            del row["notes"]
            row |= {side: ", ".join(row[side]) or None for side in ("old", "new")}
        return rows

    @property
    def is_read(self) -> bool:
        """Whether every tensor of both sides was read."""
        return not any(match.relation == "unread" for match in self.matches)

    @property
    def proven(self) -> tuple[int, int]:
        """(proven tensors, all tensors) of the side with fewer tensors."""
        is_old = len(self.old) <= len(self.new)
        names = [match.old if is_old else match.new for match in self.matches if match.is_proven]
        return sum(map(len, names)), min(len(self.old), len(self.new))

    @property
    def exit_code(self) -> int:
        """0 where all weights and all values of the smaller side are proven, 4 where something was not read, else 1."""
        count, whole = self.proven
        is_unmerged = any(match.relation == "unmerged" for match in self.matches)
        return 4 if not self.is_read else int(count < whole or not whole or is_unmerged or bool(self.lone))


@paused_gc()
def compared_values(
    old: Sequence[OpenedCheckpoint],
    new: Sequence[OpenedCheckpoint],
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    adapter: Sequence[OpenedCheckpoint] = (),
    jobs: int | None = None,
) -> Values:
    """Read both sides and match them, or raise AccessError, or ConfigError for an adapter that is none.

    Args:
        old, new: components of each side; the first component with a key counts.
        select, ignore: globs of keys to compare (default: all), and of keys to skip.
        adapter: adapter that the new side should have merged into the old one.
        jobs: reader threads; by default one per processor, at most 8.
    """
    sides = [
        {name: tensor for name, tensor in _tensors(side).items() if _is_meant(name, select, ignore)}
        for side in (old, new)
    ]
    if not adapter and (same := _equal_bytes((old, new), sides, jobs)):
        return Values(same, same, [Match("equal", (name,), (name,), True) for name in same])
    renamed = {
        name: new_name for name, new_name in _renamed(old, new).items() if name in sides[0] and new_name in sides[1]
    }
    forth = {name: name for name in sides[0] if name in sides[1]} | renamed
    back = {new_name: name for name, new_name in forth.items()}
    salt = new_salt()
    blocks = [stacked(side, there) for side, there in ((old, sides[1]), (new, sides[0]))]
    read: list[dict[str, Side]] = []
    sentences: list[str] = []
    for tensors, there, names, opened, block in zip(sides, sides[::-1], (forth, back), (old, new), blocks, strict=True):
        wanted = {}
        others = {there[name].dtype for name in there.keys() - {*names.values()}}
        for name, tensor in tensors.items():
            counterpart = there.get(names.get(name, ""))
            dtypes = others if counterpart is None else {counterpart.dtype}
            wanted[name] = _gatherers(tensor, counterpart, dtypes, salt, name in block, names.get(name) != name)
        tensors_read, obstacles = _read(opened, tensors, wanted, jobs)
        read.append(layer_by_layer(tensors_read, block))
        sentences += obstacles
    known = {name: new_name for name, new_name in renamed.items() if name in read[0] and new_name in read[1]}
    pairs = matches(read[0], read[1], known, *_declared(old, new))
    pairs = locate_differences(pairs, (read[0], read[1]), jobs or default_reading(Depth.DATA).jobs)
    where = [{name: tensor.stored for name, tensor in side.items() if tensor.stored} for side in read]
    pairs = with_quantised(pairs, (where[0], where[1]))
    if adapter:
        pairs = with_merges(pairs, (where[0], where[1]), adapter)
    moved = [] if adapter else movements(pairs, new, read[1])
    lone = _lone(pairs, (read[0], read[1]))
    return Values(read[0], read[1], pairs, tuple(sentences), moved, lone)


def _equal_bytes(
    opened: Sequence[Sequence[OpenedCheckpoint]], tensors: Sequence[Mapping[str, Tensor]], jobs: int | None
) -> dict[str, Side]:
    """All tensors, if every one has equal bytes on both sides; else {}."""
    # the side with checksums is streamed, so that bytes equal to it need no further check
    first = int(all(item.ckpt.is_safetensors for item in opened[0]))
    wanted = twins_of(tensors[first], opened[1 - first], tensors[1 - first], jobs)
    if not wanted:
        return {}
    try:
        tensors_read, obstacles = _read(opened[first], tensors[first], wanted, jobs)
    except UnequalError:
        return {}
    is_same = not obstacles and all(side.is_read for side in tensors_read.values())
    return {name: tensors_read[name] for name in tensors[0]} if is_same else {}


def _lone(matches: Sequence[Match], sides: tuple[Mapping[str, Side], Mapping[str, Side]]) -> list[str]:
    """The weights of either side without a counterpart."""
    lone = []
    for number in (0, 1):
        proven = {name for match in matches if match.is_proven for name in (match.old, match.new)[number]}
        absent = [name for match in matches if match.relation == "absent" for name in (match.old, match.new)[number]]
        # those whose loss matters: float weights of the model, no buffers, and not equal to others by chance
        weights = [
            side
            for side in (sides[number][name] for name in absent if proven)
            if parse(side.fqn).kind == "model" and side.dtype in FLOATS
            if side.fqn.rpartition(".")[2] not in COMPUTED and not side.is_dull
        ]
        # Tied weights are stored once or twice: a second key with the content of a matched one loses nothing.
        proven_sides = (side for name, side in sides[number].items() if name in proven and side.is_read)
        proven_contents = {_content(side) for side in proven_sides} if weights else set()
        lone += [side.fqn for side in weights if _content(side) not in proven_contents]
    return lone


def _content(side: Side) -> tuple[str, int]:
    return side.dtype, digest(side.hashes[side.dtype].rows)


def _is_meant(key: str, select: Sequence[str], ignore: Sequence[str]) -> bool:
    """Whether a key matches a glob of `select`, if any, and none of `ignore`."""
    is_selected = not select or any(fnmatchcase(key, glob) for glob in select)
    return is_selected and not any(fnmatchcase(key, glob) for glob in ignore)


def row_hashes_of(side: Sequence[OpenedCheckpoint], salt: int) -> tuple[dict[str, dict[str, Words]], list[str]]:
    """(key -> dtype -> row hashes, obstacles to reading) of a checkpoint, or AccessError.

    Wider floats are also hashed after rounding to bfloat16, the usual dtype of exports.
    """
    tensors = _tensors(side)
    wanted = {name: _gatherers(tensor, None, {"bfloat16"}, salt, by_columns=False) for name, tensor in tensors.items()}
    read, sentences = _read(side, tensors, wanted, None)
    hashes_by_key = {
        printable(name): {dtype: hashes.rows for dtype, hashes in tensor.hashes.items()}
        for name, tensor in read.items()
        if tensor.is_read
    }
    if unread := [name for name, tensor in read.items() if not tensor.is_read]:
        count = plural(len(unread), "tensor")
        sentences.append(f"{count} could not be read to the last element: {first_names(unread)}")
    return hashes_by_key, sentences


def _declared(old: Sequence[OpenedCheckpoint], new: Sequence[OpenedCheckpoint]) -> tuple[Heads, int]:
    """(heads, smaller vocabulary) that the configurations declare; -1 where they disagree on heads, 0 where unknown."""
    declarations: list[dict[str, Any]] = []
    for opened in (*old, *new):
        config = opened.ckpt.config
        declared = opened.ckpt.declared | (read_declared([(config.file, config.values)]) if config else {})
        declarations.append({name: item.value for name, item in declared.items()})
        declarations[-1]["model_type"] = config.values.get("model_type") if config else None
        hidden, heads = declarations[-1].get("hidden"), declarations[-1].get("heads")
        if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            declarations[-1].setdefault("head_dim", hidden // heads)

    def of_all(name: str) -> int:
        values = {declared[name] for declared in declarations if isinstance(declared.get(name), int)}
        return next(iter(values), 0) if len(values) < 2 else -1

    types = {declared["model_type"] for declared in declarations if isinstance(declared["model_type"], str)}
    sizes = [declared["vocab"] for declared in declarations if isinstance(declared.get("vocab"), int)]
    return Heads(of_all("head_dim"), of_all("heads"), types.pop() if len(types) == 1 else ""), min(sizes, default=0)


def _renamed(old: Sequence[OpenedCheckpoint], new: Sequence[OpenedCheckpoint]) -> dict[str, str]:
    """Old key -> new key of tensors that were renamed, by name alone."""
    named = [{str(number): item.ckpt for number, item in enumerate(side)} for side in (old, new)]
    several = len(old) > 1 or len(new) > 1  # keys have the number of their component then
    renames = (item for item in differences(named[0], named[1]).differences if item.kind == "renamed")
    return {item.key.partition("/")[2] if several else item.key: item.other for item in renames}


def _tensors(side: Sequence[OpenedCheckpoint]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for opened in side:
        for tensor in opened.ckpt.tensors.values():
            tensors.setdefault(tensor.fqn, tensor)
    return tensors


def _gatherers(
    tensor: Tensor,
    counterpart: Tensor | None,
    dtypes: set[str],
    salt: int,
    is_stacked: bool = False,
    by_columns: bool = True,
) -> tuple[RowHashes, ...]:
    """Collectors of a tensor's row hashes: in its own dtype, and rounded to narrower dtypes of the other side."""
    if not tensor.is_tiled or ITEM_BITS.get(tensor.dtype, 0) % 8 or tensor.dtype not in ITEM_BITS:
        return ()
    shape: Shape = tensor.global_shape
    if counterpart is not None and prod(counterpart.global_shape) == prod(shape) and len(shape) == 1:
        shape = counterpart.global_shape  # of a flat tensor
    elif is_stacked and len(shape) == 2:
        shape = (*shape, 1)  # vectors of all layers count one by one
    narrow = ("float32", "float16", "bfloat16")
    narrower = [dtype for dtype in narrow if dtype in dtypes and can_be_rounded(tensor.dtype, dtype)]
    return tuple(RowHashes(shape, dtype, salt, by_columns) for dtype in (tensor.dtype, *narrower))


def _read(
    side: Sequence[OpenedCheckpoint],
    tensors: Mapping[str, Tensor],
    wanted: Mapping[str, tuple[RowHashes, ...]],
    jobs: int | None,
) -> tuple[dict[str, Side], list[str]]:
    """(tensors with their hashes, obstacles) of a side; damaged tensors have no hashes."""
    damaged: set[str] = set()
    where: dict[str, TensorBytes] = {}
    sentences: list[str] = []
    for opened in side:
        wanted_here = {
            name: hashes for name, hashes in wanted.items() if hashes and opened.ckpt.tensors.get(name) is tensors[name]
        }
        how = default_reading(Depth.DATA)
        how = replace(how, hashes_only=True, jobs=jobs or how.jobs)
        ckpt = read_payload(opened.folder, opened.ckpt, how, wanted_here)
        assert ckpt.payload is not None
        bad = np.array(sorted({damage.record for damage in ckpt.payload.damages if damage.record >= 0}), np.int64)
        damaged_files = {damage.file for damage in ckpt.payload.damages if damage.record < 0}
        where |= {name: TensorBytes(opened.folder, ckpt, ckpt.tensors[name]) for name in wanted_here}
        for name in wanted_here if len(bad) or damaged_files else ():
            records = ckpt.tensors[name].chunks.record
            files = {ckpt.files.names[number] for number in ckpt.records.file[records[records >= 0]].tolist()}
            if np.isin(records, bad).any() or files & damaged_files:
                damaged.add(name)
        sentences += [problem.message for problem in ckpt.problems if problem not in opened.ckpt.problems]
        sentences += [f"{damage.file} does not match its checksum" for damage in ckpt.payload.damages[:4]]
    tensors_read = {}
    for name, tensor in tensors.items():
        hashes = {} if name in damaged else {wanted_here.dtype: wanted_here for wanted_here in wanted[name]}
        tensors_read[name] = Side(name, tensor.dtype, tensor.global_shape, hashes, stored=where.get(name))
    return tensors_read, sentences
