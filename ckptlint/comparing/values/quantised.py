"""Compares quantised weights with their unquantised originals, row by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod

import numpy as np
import numpy.typing as npt

from ckptlint.comparing.values.match import Match
from ckptlint.comparing.values.quantised_weights import Quantised, Rows, quantised_of
from ckptlint.comparing.values.rows import compare_rows, tall
from ckptlint.model.text import ranges
from ckptlint.numerics.distance import ROUNDING
from ckptlint.payload.tensor_bytes import BytesByKey, Matrix, TensorBytes
from ckptlint.seals.row_hashes import matrix

_SAMPLE = 2**24  # most elements of a weight that are compared
_BLOCK = 128  # at least one row of so many is compared
_EDGE = 1.01  # tolerance on half a step, since quantisers compute in float32
_ROUNDING = ROUNDING["bfloat16"]  # of the scale and of a weight
# Methods such as GPTQ do not round to the nearest code, but shift errors to other columns. Assumed: their rows stay
# within three times the error of rounding, and they move over a hundredth of the elements by more than half a step.
_MOST = 3.0
_MANY = 0.01
_RUN = 64  # columns of a run, which has few scales
_WRONG = 0.4  # slope error of a run: rounding reaches 0.1, a scale halved or doubled at least 0.5
_ERRORS = 9.0  # standard errors; no sum of rounding errors is so far out in 2**40 groups (Hoeffding: exp(-81 / 2) each)
_WIDE = ("float64", "float32", "float16", "bfloat16")


def with_quantised(matches: Sequence[Match], places: tuple[BytesByKey, BytesByKey]) -> list[Match]:
    """The matches, with quantised weights of one side compared with unquantised ones of the other, or AccessError."""
    judged: list[Match] = []
    for number in (0, 1):
        wide = {key: place for key, place in places[1 - number].items() if place.tensor.dtype in _WIDE}
        endings = {key.partition(".")[2]: key for key in wide}
        if wide:
            for quantised in quantised_of(places[number]):
                key = quantised.fqn if quantised.fqn in wide else endings.get(quantised.fqn.partition(".")[2], "")
                if key:
                    match = _judge(quantised, wide[key], key)
                    judged.append(replace(match, old=match.new, new=match.old) if number else match)
    gone = [{name for match in judged for name in match.old}, {name for match in judged for name in match.new}]
    left = [match for match in matches if not (gone[0].intersection(match.old) or gone[1].intersection(match.new))]
    return [*left, *judged]


@dataclass(slots=True)
class _Seen:
    """Statistics of the comparison of one weight.

    Attributes:
        group: columns of a row that share a scale.
        count: elements compared; far: elements more than half a step from the original.
        worst: largest error of a row, relative to the expected error of rounding.
        bad: rows with an error that no rounding explains.
        sums: totals of `_sums`.
    """

    group: int
    count: int = 0
    far: int = 0
    worst: float = 0.0
    bad: list[int] = field(default_factory=list)
    sums: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(5))
    rows: int = 0

    def see(self, first: int, rows: Rows, wanted: Matrix) -> None:
        """Add the comparison of some rows with the original."""
        with np.errstate(all="ignore"):
            distance = np.abs(rows.values - wanted)
            noise = np.float32(_ROUNDING) * (np.abs(rows.values) + np.abs(wanted))
            is_cut = rows.is_end & (np.abs(wanted) > np.abs(rows.values)) & (wanted * rows.values > 0)
            is_far = ~(distance <= rows.half * _EDGE + noise) & ~is_cut
            error = np.sqrt(np.square(np.where(is_cut, 0, distance), dtype=np.float64).sum(axis=1))
            usual = np.sqrt(np.square(rows.half / np.sqrt(3) + noise, dtype=np.float64).sum(axis=1))
            ratio = np.where(usual > 0, error / usual, np.where(error > 0, np.inf, 0.0))
        self.rows += len(ratio)
        self.count += distance.size
        self.far += int(is_far.sum())
        self.worst = max(self.worst, float(np.nanmax(ratio, initial=0.0)))
        sums = _sums(rows, wanted, self.group)
        is_other = _has_wrong_scale(rows, wanted, noise) | _is_scaled(sums).any(axis=1)
        is_bad = ~(ratio <= _MOST) | (is_far.any(axis=1) & is_other)
        self.bad += (first + np.flatnonzero(is_bad)).tolist()
        self.sums += sums.sum(axis=(1, 2))


def _judge(quantised: Quantised, original: TensorBytes, key: str) -> Match:
    """The match of a quantised weight, as if it were on the old side."""
    names = quantised.keys, (key,)
    whole = original.shape
    shape = quantised.shape or whole
    is_transposed = shape != whole and shape[:-2] == whole[:-2] and shape[-2:] == whole[:-3:-1]
    if shape != whole and not is_transposed:
        return Match("differ", *names, False, f"shape {[*shape]} and {[*whole]}")
    seen = _Seen(quantised.group)
    if not compare_rows(_samples(quantised), quantised.rows, partial(_wide, original, shape, is_transposed), seen.see):
        return Match("unread", *names, False, f"{quantised.scheme}: its rows cannot be read")
    return _verdict(seen, names, quantised, is_transposed)


def _samples(quantised: Quantised) -> Iterator[tuple[int, int]]:
    """(first, last) of the rows to compare: all, or evenly spread runs of a large weight."""
    slices, per, width = matrix(quantised.shape)
    step = max(min(tall(width), per), 1)
    share = min(_SAMPLE / max(prod(quantised.shape), 1), 1.0)
    step = min(step, _BLOCK) if share < 1 else step
    for top in range(0, slices * per, max(per, 1)):
        for start in range(top, top + per, step):
            yield start, start + max(round(min(step, top + per - start) * share), 1)


def _wide(place: TensorBytes, shape: tuple[int, ...], is_transposed: bool, first: int, last: int) -> Matrix | None:
    """Rows of the original, or its columns where it is stored transposed."""
    if not is_transposed:
        return place.numbers(first, last, shape)
    per, width = shape[-2:]
    number = first // per
    numbers = place.numbers(number * width, (number + 1) * width)
    return None if numbers is None else np.ascontiguousarray(numbers[:, first - number * per : last - number * per].T)


def _has_wrong_scale(rows: Rows, wanted: Matrix, noise: Matrix) -> npt.NDArray[np.bool_]:
    """bool [rows], whether a run of columns is a multiple of the original far from 1, so that its scale is wrong."""
    run = _RUN if wanted.shape[1] % _RUN == 0 else wanted.shape[1]
    shape = len(wanted), -1, run
    product, square = (np.reshape(array, shape) for array in (rows.values * wanted, np.square(wanted)))
    usual = np.square(rows.half / np.sqrt(3) + noise).reshape(shape).sum(axis=2)
    with np.errstate(all="ignore"):
        slope = product.sum(axis=2) / square.sum(axis=2)
    return np.asarray(((np.abs(slope - 1) > _WRONG) & (square.sum(axis=2) > 4 * usual)).any(axis=1))


def _sums(rows: Rows, wanted: Matrix, group: int) -> npt.NDArray[np.float64]:
    """float64 [5, rows, groups], sums over the original `o`, dequantised values `d` and rounding errors `e`.

    They are `o * d`, `d * d`, `o * o`, and the expected `e * e` and `(d * e) ** 2`. The last codes are excluded: larger
    weights are clipped to them by an unknown amount.
    """
    values, originals = (np.where(rows.is_end, 0, array) for array in (rows.values, wanted))
    error = np.where(rows.is_end, 0, np.square(rows.half) / 3)
    terms = values * originals, np.square(values), np.square(originals), error, np.square(values) * error
    starts = np.arange(0, wanted.shape[1], group)
    return np.stack([np.add.reduceat(term, starts, axis=1, dtype=np.float64) for term in terms])


def _is_scaled(sums: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Whether the best factor between original and dequantised values differs from 1 by more than chance."""
    # Rounding lowers the factor by the share of its errors in the squares, and adds noise. Methods that weigh columns
    # make larger errors, so the tolerance grows with the measured error.
    both, norm, original_norm, error, product = sums
    with np.errstate(all="ignore"):
        more = np.maximum((norm - both * both / original_norm) / error, 1)
        explained = 2 * _ROUNDING + more * error / norm + _ERRORS * np.sqrt(more * product) / norm
        return np.asarray(np.abs(both / norm - 1) > explained)


def _verdict(
    seen: _Seen, names: tuple[tuple[str, ...], tuple[str, ...]], quantised: Quantised, is_transposed: bool
) -> Match:
    """The verdict: proven if every element is within half a step, or if the errors fit a known method."""
    slices, per, _ = matrix(quantised.shape)
    scheme = quantised.scheme + (", transposed" if is_transposed else "")
    if seen.rows < slices * per:
        scheme += f", {seen.rows:,} of {slices * per:,} rows looked at"
    if not seen.far:
        return Match("quantised", *names, True, f"{scheme}: all within half a step")
    share = seen.far / max(seen.count, 1)
    is_scaled = bool(_is_scaled(seen.sums))
    if not seen.bad and not is_scaled and share > _MANY:
        what = f"{scheme}: rows within {seen.worst:.2g} times the error of rounding"
        return Match("quantised", *names, True, what)
    notes = [f"{seen.far:,} of {seen.count:,} elements are further than half a step from those of {names[1][0]}"]
    if is_scaled:
        notes.append(f"together scaled by {seen.sums[0] / seen.sums[2]:.3g}")
    elif seen.bad:
        spans = ranges(seen.bad).split(",")
        shown = f"rows {', '.join(spans[:4])}{' and more' if len(spans) > 4 else ''}"
        notes.append(f"{'all rows' if len(seen.bad) == seen.rows else shown} are not this weight's")
    return Match("differ", *names, False, scheme, tuple(notes))
