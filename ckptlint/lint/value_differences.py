"""Where tensors differ that names pair, and what lies there instead: the second look, at these alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import nan
from typing import NamedTuple

import numpy as np

from ckptlint.analysis.same_values.facts import Match, Side
from ckptlint.analysis.same_values.matching import common
from ckptlint.geometry.chunk_graph import rank_of
from ckptlint.model import Checkpoint, Tensor
from ckptlint.model.layout import IntArray
from ckptlint.model.text import plural, ranges
from ckptlint.payload.regions import numbers, rows_of
from ckptlint.seals.digests import Words
from ckptlint.seals.words import canonical, matrix, rounded
from ckptlint.storage.folder import Folder

_BUDGET = 64 * 1024**2  # bytes of a tensor's rows that are compared element by element
_RUNS = 4  # of rows that a sentence names


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor and where its bytes lie."""

    folder: Folder
    ckpt: Checkpoint
    tensor: Tensor


def with_differences(
    match: Match, old: Side, new: Side, olds: Mapping[str, Side], places: tuple[Place, Place]
) -> Match:
    """The match with the rows that differ, the chunks and ranks they are of, what they hold, and by how much.

    Args:
        olds: all tensors of the old side.
        places: of both.

    Raises:
        AccessError: a read was refused.
    """
    dtype = common(old, new)
    if not dtype:
        return match
    a, b = old.words[dtype], new.words[dtype]
    if matrix(a.shape) != matrix(b.shape):
        return replace(match, notes=(*match.notes, f"shape {[*old.shape]} and {[*new.shape]}"))
    rows = np.flatnonzero(a.rows != b.rows)
    noun = "rows" if matrix(a.shape)[2] > 1 or len(a.shape) > 1 else "elements"
    held = _holds(old, olds, dtype, rows, b.rows)
    sizes = _sizes(dtype, (old, new), places, rows)
    said = f"{noun} {_shown(rows)} of {len(a.rows):,}{_of_chunks(places[1], rows)}{held}"
    is_all = len(rows) == len(a.rows) and not held  # training moves everything, and how far is what tells
    notes = (*match.notes, *(() if is_all else (said,)), *([sizes.text] if sizes and not is_all else []))
    return replace(match, notes=notes, change=sizes.change if sizes else nan)


def _shown(rows: IntArray) -> str:
    parts = ranges(rows.tolist()).split(",")
    return ", ".join(parts[:_RUNS]) + (f" and {len(parts) - _RUNS:,} more ranges" if len(parts) > _RUNS else "")


def _of_chunks(place: Place, rows: IntArray) -> str:
    """The chunks of the new side that hold these rows and no others, in brackets."""
    tensor = place.tensor
    if len(tensor.global_shape) < 1 or len(tensor.chunks) < 2:
        return ""
    middle = int(np.prod(tensor.global_shape[1:-1])) if len(tensor.global_shape) > 1 else 1
    wanted, held, names = {*rows.tolist()}, set[int](), []
    for row in np.flatnonzero(tensor.layout.live).tolist():
        box = tensor.layout.box(row)
        own = range(box.offsets[0] * middle, (box.offsets[0] + box.sizes[0]) * middle)
        if len(own) and wanted.issuperset(own):
            file = place.ckpt.chunk_file(tensor, row)
            rank = rank_of(file)
            held.update(own)
            names.append(f"chunk {row}{'' if rank is None else f', rank {rank}'}, {file}")
    if held != wanted or not names:
        return ""
    return f" ({'; '.join(names[:_RUNS])}{f'; and {len(names) - _RUNS:,} more chunks' if len(names) > _RUNS else ''})"


def _holds(old: Side, olds: Mapping[str, Side], dtype: str, rows: IntArray, words: Words) -> str:
    """What lies there instead, where it is what another tensor holds in these rows, or zeros."""
    if not words[rows].any():
        return " are zeros"
    shape = matrix(old.words[dtype].shape)
    others = ((name, side.words[dtype]) for name, side in olds.items() if dtype in side.words and not side.is_dull)
    for name, own in others:
        if name != old.fqn and matrix(own.shape) == shape and np.array_equal(own.rows[rows], words[rows]):
            return f" hold what {name} holds there"
    return ""


class _Sizes(NamedTuple):
    text: str
    change: float


def _sizes(dtype: str, sides: tuple[Side, Side], places: tuple[Place, Place], rows: IntArray) -> _Sizes | None:
    """How many elements differ, by how much at most, and the norm of the difference relative to the old one's."""
    columns = matrix(sides[0].words[dtype].shape)[2]
    first = int(rows[0])
    last = min(int(rows[-1]) + 1, first + max(_BUDGET // (8 * columns), 1))
    if any(matrix(side.shape) != matrix(sides[0].words[dtype].shape) for side in sides):
        return None
    found = []
    for side, place in zip(sides, places, strict=True):
        bits = rows_of(place.folder, place.ckpt, place.tensor, first, last)
        bits = None if bits is None else rounded(bits, side.dtype, dtype)
        if bits is None:
            return None
        found.append(canonical(bits, dtype))
    is_odd = found[0] != found[1]
    text = f"{int(is_odd.sum()):,} of {is_odd.size:,} elements"
    if last <= rows[-1]:
        text += f" of the first {plural(last - first, 'row')} from there"
    values = [numbers(bits, dtype) for bits in found]
    if values[0] is None or values[1] is None:
        return _Sizes(text, nan)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        apart = np.abs(values[0] - values[1])
        most = float(np.nanmax(apart)) if not np.isnan(apart).all() else nan
        change = float(np.linalg.norm(apart) / np.linalg.norm(values[0]))
    return _Sizes(f"{text}, largest difference {most:.3g}", change)
