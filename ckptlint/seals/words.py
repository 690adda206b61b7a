"""Words of the rows and columns of a tensor: sums over its elements, the same however it is cut and stored.

All arithmetic is modulo 2^64. The word of row i is the sum over the columns j of bits(i, j) * c(j), that of column j
the sum over the rows i of bits(i, j) * c(i), with the same pseudo-random odd c: the rows of a matrix and the columns of
its transpose have the same words. They find accidents and are no signatures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from threading import Lock, local
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptlint.seals.digests import GOLD, MASK, Elements, Words, fin
from ckptlint.vocabulary.dtypes import ENCODINGS, ITEM_BITS

Bits = npt.NDArray[np.unsignedinteger[Any]]
Shape = tuple[int, ...]

_LONG = 2**20  # elements of a vector that are rows of their own
_ROW = 4096  # elements of a row that a longer vector is cut into
_LIMBS = 4  # of 16 bits: products of two and 2^21 sums of them are exact in float64
_FIT = 2**17  # units that are worked on at once: they fit the cache, and their sums float64


def matrix(shape: Shape) -> tuple[int, int, int]:
    """(slices, rows of each, columns) as which a tensor is looked at; of its axes the last two are rows and columns.

    Short vectors are a column, long ones are cut into rows of 4,096 elements, the last of which may be shorter.

    >>> matrix((8, 4, 2)), matrix((3,)), matrix(()), matrix((2**20 + 1,))
    ((8, 4, 2), (1, 3, 1), (1, 1, 1), (1, 257, 4096))
    """
    if len(shape) > 1:
        return prod(shape[:-2]), shape[-2], shape[-1]
    elements = prod(shape)
    return (1, elements, 1) if elements <= _LONG else (1, -(-elements // _ROW), _ROW)


_FIRST = 2**14  # coefficients that small tensors share


def _limbs(first: int, count: int, units: int) -> npt.NDArray[np.float64]:
    """float64 [count * units, 4]: the coefficients of so many elements, each of so many units of 16 bits, in limbs."""
    if first + count <= _FIRST:
        return _made_limbs(0, _FIRST, units)[first * units : (first + count) * units]
    return _made_limbs(first, count, units)


@lru_cache(16)
def _made_limbs(first: int, count: int, units: int) -> npt.NDArray[np.float64]:
    words = _coefficients(first, count)
    shifted = np.stack([words << np.uint64(16 * unit) for unit in range(units)], axis=1).reshape(-1)
    limbs = [(shifted >> np.uint64(16 * limb)) & np.uint64(0xFFFF) for limb in range(_LIMBS)]
    return np.asarray(np.stack(limbs, axis=1), np.float64)


class _Buffers(local):
    """What each thread turns numbers into, over and over: new memory would cost more than the work."""

    def __init__(self) -> None:
        self.numbers = np.empty(_FIT)


_BUFFERS = _Buffers()


def _numbers(part: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """The units as float64, until the next call of this thread."""
    into = _BUFFERS.numbers[: part.size].reshape(part.shape)
    np.copyto(into, part)
    return into


def _coefficients(first: int, count: int) -> Words:
    """uint64 [count], odd: c(n) for n from `first` on."""
    return _coefficients_at(np.arange(first, first + count, dtype=np.uint64))


def _coefficients_at(number: Words) -> Words:
    return fin((number + np.uint64(1)) * np.uint64(GOLD)) | np.uint64(1)


def _joined(limbs: npt.NDArray[np.float64]) -> Words:
    """uint64 [n] of float64 [n, 4]."""
    whole = limbs.astype(np.uint64)
    total = whole[:, 0]
    for limb in range(1, _LIMBS):
        total = total + (whole[:, limb] << np.uint64(16 * limb))
    return total


@dataclass(slots=True, eq=False)
class TensorWords:
    """The words of one tensor, gathered chunk by chunk.

    Attributes:
        shape: as which it is looked at: the global shape, or that which its elements have elsewhere.
        dtype: of the elements; those of a wider one were rounded to it.
        rows: uint64 [slices * rows].
        by_columns: whether the words of columns are wanted.
        columns: uint64 [slices, columns]; [0, 0] for vectors and where they are not wanted.
        count: elements that were added.
    """

    shape: Shape
    dtype: str
    by_columns: bool = True
    rows: Words = field(init=False)
    columns: Words = field(init=False)
    count: int = 0
    lock: Any = field(default_factory=Lock, repr=False)

    def __post_init__(self) -> None:
        slices, rows, columns = matrix(self.shape)
        self.rows = np.zeros(slices * rows, np.uint64)
        self.columns = np.zeros((slices, columns) if self.by_columns and len(self.shape) > 1 else (0, 0), np.uint64)

    @property
    def is_whole(self) -> bool:
        """Whether each element was added (once, where no chunks overlap)."""
        return self.count == prod(self.shape)

    def add(self, bits: Bits, row: int, column: int) -> None:
        """Add a block of elements.

        Args:
            bits: [rows, columns], canonical, of any unsigned word; of one slice.
            row, column: where its first element lies: the row among those of all slices.
        """
        count, width = bits.shape
        units = max(bits.itemsize // 2, 1)
        raw = np.ascontiguousarray(bits).view("<u2" if bits.itemsize > 1 else "u1")
        sums = np.zeros(count, np.uint64)
        per = matrix(self.shape)[1]
        many = _limbs(row % per, count, 1).T if self.columns.size else None
        across = np.zeros((_LIMBS, width * units if many is not None else 0))
        wide = max(_FIT // units, 1) * units
        for first in range(0, width * units, wide):
            last = min(first + wide, width * units)
            limbs = _limbs(column + first // units, (last - first) // units, units)
            tall = max(_FIT // (last - first), 1)
            for top in range(0, count, tall):
                part = raw[top : top + tall, first:last]
                number = _numbers(part)
                sums[top : top + tall] += _joined(number @ limbs)
                if many is not None:
                    across[:, first:last] += many[:, top : top + tall] @ number
        totals = None
        if many is not None:
            joined = _joined(across.T).reshape(width, units)
            totals = joined[:, 0]
            for unit in range(1, units):
                totals = totals + (joined[:, unit] << np.uint64(16 * unit))
        with self.lock:
            self.rows[row : row + count] += sums
            if totals is not None:
                self.columns[row // per, column : column + width] += totals
            self.count += bits.size

    def layers(self) -> list[TensorWords]:
        """The words of each part along the first axis, of a tensor that has three axes or more."""
        count, own = self.shape[0], self.shape[1:]
        rows, columns = self.rows.reshape(count, -1), self.columns.reshape(count, -1, max(self.columns.shape[-1], 1))
        made = []
        for number in range(count):
            part = TensorWords(own[:1] if own[1:] == (1,) else own, self.dtype, self.by_columns)
            part.rows = rows[number]
            part.columns = columns[number] if part.columns.size else part.columns
            part.count = prod(own) if self.is_whole else 0
            made.append(part)
        return made

    def scatter(self, bits: Bits, places: Words) -> None:
        """Add elements one by one.

        Args:
            bits: [n], canonical.
            places: uint64 [n], their row-major numbers in the whole tensor.
        """
        _, per, columns = matrix(self.shape)
        row, column = np.divmod(places, np.uint64(columns))
        wide = bits.astype(np.uint64)
        with self.lock:
            np.add.at(self.rows, row, wide * _coefficients_at(column))
            if self.columns.size:
                slices, inside = np.divmod(row, np.uint64(per))
                np.add.at(self.columns, (slices, column), wide * _coefficients_at(inside))
            self.count += bits.size


@dataclass(frozen=True, slots=True)
class Placed:
    """A chunk of a tensor whose words are wanted.

    Attributes:
        words: those to add to; more than one where the elements are wanted after rounding too.
        dtype: of the elements in the file.
        where: their places in the whole tensor, row by row.
    """

    words: tuple[TensorWords, ...]
    dtype: str
    where: Elements

    def add(self, bits: Bits, first: int) -> None:
        """Add a run of its elements.

        Args:
            bits: [n], as stored.
            first: position of the first of them in the chunk, in elements.
        """
        parts = 2 if self.dtype.startswith("complex") else 1
        for words in self.words:
            own = rounded(bits, self.dtype, words.dtype) if words.dtype != self.dtype else bits
            if own is None:
                continue
            own = canonical(own, words.dtype)
            if parts > 1:  # both parts are one element, of twice the width
                own = np.ascontiguousarray(own).view(f"<u{own.itemsize}").reshape(-1, 2)
                own = own[:, 0] + own[:, 1] * own.dtype.type(_IMAGINARY & (1 << 8 * own.itemsize) - 1)
            if self.where.strides and self.where.strides[-1] != 1:
                words.scatter(own, _places(self.where, first, len(own)))
                continue
            for row, column, at, count, width in blocks(self.where, first, len(own), words.shape):
                words.add(own[at : at + count * width].reshape(count, width), row, column)


_IMAGINARY = 0x9E3779B97F4A7C15


def blocks(where: Elements, first: int, count: int, shape: Shape) -> Iterator[tuple[int, int, int, int, int]]:
    """Blocks of the elements [first, first + count) of a chunk: row, column, position in these, rows, columns.

    Args:
        shape: of the whole tensor; see `matrix`.
    """
    _, per, columns = matrix(shape)
    run = where.sizes[-1] if where.sizes else 1
    at = first
    while at < first + count:
        number, inside = divmod(at, run)
        start = first_place(where, number) + inside
        left = first + count - at
        row, column = divmod(start, columns)
        rows = 1
        if not inside and run <= columns - column and left >= run:  # whole runs, each in a row of its own
            step = where.strides[-2] if len(where.sizes) > 1 else columns
            if step == columns:
                rows = min(left // run, (where.sizes[-2] - number % where.sizes[-2]) if len(where.sizes) > 1 else 1)
            width = run
        elif column or min(run - inside, left) < columns:  # to the end of this row
            width = min(run - inside, left, columns - column)
        else:  # whole rows
            rows, width = min(run - inside, left) // columns, columns
        rows = min(rows, per - row % per)
        yield row, column, at - first, rows, width
        at += rows * width


def first_place(where: Elements, number: int) -> int:
    """The place in the whole tensor of the first element of a run."""
    place = where.start
    for size, stride in zip(where.sizes[-2::-1], where.strides[-2::-1], strict=True):
        number, index = divmod(number, size)
        place += index * stride
    return place


def _places(where: Elements, first: int, count: int) -> Words:
    """uint64 [count], the places in the whole tensor of elements that are not stored row by row."""
    number = np.arange(first, first + count, dtype=np.uint64)
    found = np.full(count, where.start, np.uint64)
    for size, stride in zip(where.sizes[::-1], where.strides[::-1], strict=True):
        number, index = np.divmod(number, np.uint64(size))
        found += index * np.uint64(stride)
    return found


def canonical(bits: Bits, dtype: str) -> Bits:
    """The bits with one zero and one NaN: -0.0 as 0.0, NaN whatever its payload; as they are for other dtypes.

    Args:
        bits: of real numbers: of complex elements both parts.
    """
    encoding = ENCODINGS.get(dtype)
    if encoding is None or encoding.unsigned:
        return bits
    if encoding.single:  # one pattern of bits is NaN, and nothing has two zeros
        return bits
    top = 1 << (8 * bits.itemsize - 1)
    worst = encoding.bad + encoding.has_infinity  # what lies from here on is NaN
    signed = bits.view(f"i{bits.itemsize}")
    if not bits.size:
        return bits
    is_zero, is_nan = signed.min() == -top, signed.max() >= worst or bits.max() >= top | worst
    if not (is_zero or is_nan):
        return bits
    made = bits.copy()
    if is_zero:
        made[bits == top] = 0
    if is_nan:
        made[(bits & bits.dtype.type(top - 1)) >= worst] = worst
    return made


def rounded(bits: Bits, dtype: str, to: str) -> Bits | None:
    """The elements rounded to a narrower dtype, to nearest even as torch's `.to`; None where that is not known."""
    if dtype == to:
        return bits
    if dtype not in ("float64", "float32", "float16", "bfloat16") or to not in ("float32", "float16", "bfloat16"):
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == "bfloat16":
            number: npt.NDArray[Any] = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        else:
            number = bits.view({"float64": np.float64, "float32": np.float32, "float16": np.float16}[dtype])
        if to == "float16":
            return number.astype(np.float16).view(np.uint16)
        single = number.astype(np.float32).view(np.uint32)
    if to == "float32":
        return single
    up = single + np.uint32(0x7FFF) + ((single >> np.uint32(16)) & np.uint32(1))
    is_nan = (single & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return (np.where(is_nan, single | np.uint32(0x00400000), up) >> np.uint32(16)).astype(np.uint16)


def can_be_rounded(dtype: str, to: str) -> bool:
    """Whether `rounded` knows how, and `to` is the narrower one."""
    known = {"float64": 3, "float32": 2, "float16": 1, "bfloat16": 1}
    return known.get(dtype, 0) > known.get(to, 9)


def word_of(dtype: str) -> str:
    """The numpy dtype of the elements as unsigned words; complex ones are two."""
    bits = ITEM_BITS[dtype]
    return f"<u{bits // 8 // (2 if dtype.startswith('complex') else 1)}"


def digest(words: Words) -> int:
    """Of words in their order."""
    number = np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(GOLD)
    return int(fin(words ^ fin(number)).sum()) & MASK


def multiset(words: Words) -> int:
    """Of words in any order; that of two sets together is the sum of both."""
    return int(fin(words.copy()).sum()) & MASK
