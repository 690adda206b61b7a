"""Locates the differences between tensors with matching names: rows, chunks and ranks, new content, distance."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from math import prod

import numpy as np

from ckptlint.comparing.pairs.matching import common
from ckptlint.comparing.values.match import Match, Side, Sides
from ckptlint.comparing.values.rows import compare_rows, row_ranges
from ckptlint.grouping import grouped
from ckptlint.model.cover import Shape
from ckptlint.model.text import at_most, first_names, plural, ranges
from ckptlint.model.tiling import IntArray
from ckptlint.numerics.distance import Distance
from ckptlint.payload.tensor_bytes import TensorBytes
from ckptlint.seals.digests import Words
from ckptlint.seals.row_hashes import Bits, comparable, matrix
from ckptlint.vocabulary.metadata_files import rank_of

ROUNDED_WITHIN = "equal after rounding to bfloat16, stored as float32"
"""What is said of a tensor that lost half of its bits and kept its dtype: a load cannot know it, so it is no match."""

_WIDEST = 2**24  # most columns of a tensor that is read again
_RUNS = 4  # most runs of rows that a sentence names


def locate_differences(matches: Sequence[Match], sides: tuple[Sides, Sides], jobs: int) -> list[Match]:
    """The matches, with notes on rows, chunks, content and distance for tensors that differ, or AccessError."""
    holders = _Holders(sides[0])

    def look(match: Match) -> Match:
        return _with_differences(match, (sides[0][match.old[0]], sides[1][match.new[0]]), holders)

    differs = [match.relation == "differ" and not match.what.startswith("stored") for match in matches]  # not in order
    with ThreadPoolExecutor(jobs) as pool:
        looks = pool.map(look, compress(matches, differs))
        return [next(looks) if is_other else match for match, is_other in zip(matches, differs, strict=True)]


def _with_differences(match: Match, sides: tuple[Side, Side], holders: _Holders) -> Match:
    """A match of differing tensors with notes on the differing rows and columns."""
    dtype = common(*sides)
    if not dtype:
        return match
    a, b = (side.hashes[dtype] for side in sides)
    if matrix(a.shape) != matrix(b.shape):
        shapes = " and ".join(str([*side.shape]) for side in sides)
        return replace(match, notes=(*match.notes, f"shape {shapes}"))
    rows = np.flatnonzero(a.rows != b.rows)
    if not len(rows):
        return match  # rounding alone took the values
    ends = holders.say(sides[0].fqn, dtype, rows, b.rows)
    distance = _distance(dtype, sides, a.shape)
    width = matrix(a.shape)[2]
    columns = np.arange(width) if distance is None else np.flatnonzero(distance.is_off)
    is_all = len(rows) == len(a.rows) and len(columns) == width
    # Training changes every row and column, so listing them all says nothing: only the distance is of interest.
    notes = [] if is_all and not ends else [_where(rows, columns, a.shape, sides[1].stored) + ends]
    if distance is None:
        return replace(match, notes=(*match.notes, *notes))
    if distance.is_rounded:
        return replace(match, notes=(*match.notes, ROUNDED_WITHIN), change=distance.change, cosine=distance.cosine)
    if relation := distance.line.text:
        notes.append(relation)
    elif notes:
        far = f", largest difference {distance.largest:.3g}" if distance.largest or not distance.lost else ""
        notes.append(f"{distance.count:,} of {prod(a.shape):,} elements{far}")
    if distance.lost:
        notes.append(f"{plural(distance.lost, 'element')} became NaN or infinite")
    return replace(match, notes=(*match.notes, *notes), change=distance.change, cosine=distance.cosine)


def _where(rows: IntArray, columns: IntArray, shape: Shape, stored: TensorBytes | None) -> str:
    """Text on the differing rows and columns, and in brackets the chunks that they are exactly."""
    slices, per, width = matrix(shape)
    noun = "rows" if width > 1 or len(shape) > 1 else "elements"
    text = f"{noun} {_shown(rows)} of {slices * per:,}"
    if len(columns) < width:
        across = f"columns {_shown(columns)} of {width:,}"
        text = across if len(rows) == slices * per else f"{text}, {across}"
    return text + _of_chunks(rows, columns, stored)


def _shown(rows: IntArray) -> str:
    spans = ranges(rows.tolist()).split(",")
    return first_names(spans, _RUNS, "range")


def _of_chunks(rows: IntArray, columns: IntArray, stored: TensorBytes | None) -> str:
    """Text on the chunks that consist of exactly the differing elements; "" where no set of chunks does."""
    if stored is None or not stored.shape or len(stored.tensor.chunks) < 2:
        return ""
    tensor, shape = stored.tensor, stored.shape
    skip = len(tensor.global_shape) - len(shape)  # the axis of the layers
    middle, is_flat = prod(shape[1:-1]), len(shape) == 1
    left, names = len(rows) * len(columns), []
    for row in np.flatnonzero(tensor.tiling.live).tolist():
        box = tensor.tiling.box(row)
        offsets, sizes = box.offsets[skip:], box.sizes[skip:]
        if stored.layer is not None and not 0 <= stored.layer - box.offsets[0] < box.sizes[0]:
            continue
        top, bottom = offsets[0] * middle, (offsets[0] + sizes[0]) * middle
        start, stop = (0, 1) if is_flat else (offsets[-1], offsets[-1] + sizes[-1])
        ends = np.searchsorted(rows, [top, bottom]), np.searchsorted(columns, [start, stop])
        if bottom > top and stop > start and int(np.diff(ends[0])[0]) == bottom - top:
            if int(np.diff(ends[1])[0]) != stop - start or sizes[1:-1] != shape[1:-1]:
                continue
            file = stored.ckpt.chunk_file(tensor, row)
            rank = rank_of(file)
            left -= (bottom - top) * (stop - start)
            names.append(f"chunk {row}{'' if rank is None else f', rank {rank}'}, {file}")
    if left or not names:
        return ""
    return f" ({'; '.join(at_most(names, _RUNS, 'chunk', 'and '))})"


@dataclass(slots=True)
class _Holders:
    """Finds tensors of the old side by the hash of one row."""

    sides: Sides
    known: dict[tuple[object, ...], dict[int, list[str]]] = field(default_factory=dict)

    def say(self, fqn: str, dtype: str, rows: IntArray, hashes: Words) -> str:
        """Text on the new content of these rows, if it is zeros or that of another old tensor; else ""."""
        if not hashes[rows].any():
            return " are zeros"
        first, shape = int(rows[0]), matrix(self.sides[fqn].hashes[dtype].shape)
        lookup = dtype, shape, first
        if lookup not in self.known:
            gathered = ((name, side.hashes[dtype]) for name, side in self.sides.items() if dtype in side.hashes)
            alike = ((name, of) for name, of in gathered if matrix(of.shape) == shape and not self.sides[name].is_dull)
            self.known[lookup] = grouped((int(of.rows[first]), name) for name, of in alike)
        for name in self.known[lookup].get(int(hashes[first]), ()):
            if name != fqn and np.array_equal(self.sides[name].hashes[dtype].rows[rows], hashes[rows]):
                return f" hold what {name} holds there"
        return ""


def _distance(dtype: str, sides: tuple[Side, Side], shape: Shape) -> Distance | None:
    """The distance between both; None where they are unreadable or too wide."""
    slices, per, width = matrix(shape)
    if width > _WIDEST:
        return None
    distance = Distance(dtype, np.zeros(width, bool))
    rows = [partial(_rows, side, dtype, shape) for side in sides]
    return distance if compare_rows(row_ranges(0, slices * per, width), rows[0], rows[1], distance.see) else None


def _rows(side: Side, dtype: str, shape: Shape, first: int, last: int) -> Bits | None:
    """Some rows in canonical form, in the common dtype."""
    bits = None if side.stored is None else side.stored.rows(first, last, shape)
    return None if bits is None else comparable(bits, side.dtype, dtype)
