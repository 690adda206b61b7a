"""Locates the differences between tensors with matching names: rows, chunks and ranks, new content, distance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from math import inf, nan, prod, sqrt

import numpy as np
import numpy.typing as npt

from ckptlint.comparing.match import Match, Side
from ckptlint.comparing.pairs.matching import common
from ckptlint.comparing.regions import TensorBytes
from ckptlint.comparing.rows import ROUNDING, compare_rows, row_ranges
from ckptlint.geometry.chunk_graph import rank_of
from ckptlint.model.cover import Shape
from ckptlint.model.text import at_most, first_names, plural, ranges
from ckptlint.model.tiling import IntArray
from ckptlint.numerics.decode import Numbers, decoded
from ckptlint.seals.digests import Words
from ckptlint.seals.row_hashes import Bits, comparable, matrix

_WIDEST = 2**24  # most columns of a tensor that is read again
_RUNS = 4  # most runs of rows that a sentence names
_FEW = 64  # fewer elements fit a constant factor by chance


def locate_differences(
    found: Sequence[Match],
    sides: tuple[Mapping[str, Side], Mapping[str, Side]],
    jobs: int,
) -> list[Match]:
    """The matches, with notes on rows, chunks, content and distance for tensors that differ.

    Args:
        sides: tensors of both sides by key.
        jobs: reader threads.

    Raises:
        AccessError: a read was refused.
    """
    holders = _Holders(sides[0])

    def look(match: Match) -> Match:
        return _with_differences(match, (sides[0][match.old[0]], sides[1][match.new[0]]), holders)

    differs = [match.relation == "differ" and not match.what.startswith("stored") for match in found]  # not in order
    with ThreadPoolExecutor(jobs) as pool:
        looks = pool.map(look, compress(found, differs))
        return [next(looks) if is_other else match for match, is_other in zip(found, differs, strict=True)]


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
    parts = ranges(rows.tolist()).split(",")
    return first_names(parts, _RUNS, "range")


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

    sides: Mapping[str, Side]
    known: dict[tuple[object, ...], dict[int, list[str]]] = field(default_factory=dict)

    def say(self, fqn: str, dtype: str, rows: IntArray, hashes: Words) -> str:
        """Text on the new content of these rows, if it is zeros or that of another old tensor; else ""."""
        if not hashes[rows].any():
            return " are zeros"
        first, shape = int(rows[0]), matrix(self.sides[fqn].hashes[dtype].shape)
        lookup = dtype, shape, first
        if lookup not in self.known:
            holders: dict[int, list[str]] = defaultdict(list)
            for name, side in self.sides.items():
                of_dtype = side.hashes.get(dtype)
                if of_dtype is not None and matrix(of_dtype.shape) == shape and not side.is_dull:
                    holders[int(of_dtype.rows[first])].append(name)
            self.known[lookup] = holders
        for name in self.known[lookup].get(int(hashes[first]), ()):
            if name != fqn and np.array_equal(self.sides[name].hashes[dtype].rows[rows], hashes[rows]):
                return f" hold what {name} holds there"
        return ""


# ---------------------------------------------------------------- by how much


@dataclass(slots=True)
class _Line:
    """Tests whether one tensor is the other times or plus a constant; some norms are stored minus 1."""

    fitting: list[tuple[str, float, Callable[[npt.NDArray[np.float64], float], npt.NDArray[np.float64]]]] | None = None

    def see(self, one: Numbers, two: Numbers, dtype: str) -> None:
        """Test some elements of both."""
        if self.fitting == [] or dtype not in ROUNDING:
            return
        with np.errstate(invalid="ignore"):  # of a NaN
            a, b = one.astype(np.float64), two.astype(np.float64)
        if self.fitting is None:
            # The largest element gives the most exact factor. A few dozen elements, or a constant tensor, fit any
            # factor.
            at = int(np.argmax(np.abs(a)))
            if len(a) < _FEW or not np.isfinite(b[at]) or not a[at] or a[at] == b[at] or b.min() == b.max():
                self.fitting = []
                return
            self.fitting = [
                ("scaled by", float(b[at] / a[at]), np.multiply),
                ("the old one plus", float(b[at] - a[at]), np.add),
            ]
        with np.errstate(invalid="ignore", over="ignore"):
            self.fitting = [
                (relation, value, apply)
                for relation, value, apply in self.fitting
                if value
                and bool(
                    (np.abs((made := apply(a, value)) - b) <= 4 * ROUNDING[dtype] * (np.abs(made) + np.abs(b))).all()
                )
            ]

    @property
    def text(self) -> str:
        """The relation in words, "" for none."""
        if not self.fitting:
            return ""
        relation, value, _ = self.fitting[0]
        return f"{relation} {value:.6g}"


@dataclass(slots=True)
class _Distance:
    """The distance between two tensors.

    Attributes:
        dtype: dtype of the comparison.
        is_off: bool [columns], columns with differing elements.
        count: number of differing elements.
        lost: number of elements that became NaN or infinite.
        largest: largest absolute difference; NaN for dtypes without numbers.
        squares: float64 [4], sums of squares of the difference, of old and of new, and of the product old * new.
    """

    dtype: str
    is_off: npt.NDArray[np.bool_]
    count: int = 0
    lost: int = 0
    largest: float = 0.0
    squares: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(4))
    line: _Line = field(default_factory=_Line)

    def see(self, _: int, old: Bits, new: Bits) -> None:
        """Add some rows of both, in canonical form."""
        is_off = old != new
        self.count += int(np.count_nonzero(is_off))
        self.is_off |= is_off.any(axis=0)
        numbered = decoded(old, self.dtype), decoded(new, self.dtype)
        if numbered[0] is None or numbered[1] is None:
            self.largest = nan
            return
        with np.errstate(invalid="ignore", over="ignore"):
            one, two = numbered[0].reshape(-1), numbered[1].reshape(-1)
            distance = two - one
            self.lost += int(np.count_nonzero(is_off.reshape(-1) & ~np.isfinite(two)))
            self.largest = max(self.largest, float(np.abs(distance[np.isfinite(distance)]).max(initial=0.0)))
            pairs = (distance, distance), (one, one), (two, two), (one, two)
            self.squares += [float(np.dot(*pair)) for pair in pairs]
        self.line.see(one, two, self.dtype)

    @property
    def change(self) -> float:
        """Norm of the difference divided by the norm of the old tensor."""
        apart, old = map(sqrt, self.squares[:2])
        if self.largest != self.largest:
            return nan
        return apart / old if old else (inf if apart else nan)

    @property
    def cosine(self) -> float:
        """Cosine of the angle between both; NaN for a zero tensor."""
        _, old, new, both = map(float, self.squares)
        return both / (sqrt(old) * sqrt(new)) if old > 0 and new > 0 else nan


def _distance(dtype: str, sides: tuple[Side, Side], shape: Shape) -> _Distance | None:
    """The distance between both; None where they are unreadable or too wide."""
    slices, per, width = matrix(shape)
    if width > _WIDEST:
        return None
    distance = _Distance(dtype, np.zeros(width, bool))
    rows = [partial(_rows, side, dtype, shape) for side in sides]
    return distance if compare_rows(row_ranges(0, slices * per, width), rows[0], rows[1], distance.see) else None


def _rows(side: Side, dtype: str, shape: Shape, first: int, last: int) -> Bits | None:
    """Some rows in canonical form, in the common dtype."""
    bits = None if side.stored is None else side.stored.rows(first, last, shape)
    return None if bits is None else comparable(bits, side.dtype, dtype)
