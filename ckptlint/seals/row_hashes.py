"""Hashes of the rows and columns of a tensor: sums over its elements, the same however it is cut and stored.

All arithmetic is modulo 2^64. An element is mixed, f(bits) = fin(bits * k), which leaves 0 at 0. The hash of row i is
the sum over the columns j of f(bits(i, j)) * c(j), and that of column j the sum over the rows i of
f(bits(i, j)) * c(i). Both have the same pseudo-random odd c, so a matrix's rows hash as its transpose's columns. k and
c follow from a salt: who does not know it cannot make other values with the same hashes; against who does they prove
nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import lru_cache
from math import prod
from threading import Lock, local
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckptlint.model.cover import Shape
from ckptlint.seals.digests import GOLD, MASK, Elements, Words, finalise, mix
from ckptlint.vocabulary.dtypes import ENCODINGS, ITEM_BITS

Bits = npt.NDArray[np.unsignedinteger[Any]]

VALUES = "rows64-1"
"""The name of these hashes, as a manifest gives it."""

_LONG = 2**20  # elements of a vector that are rows of their own
_ROW = 4096  # elements of a row that a longer vector is cut into
_FIT = 2**14  # elements that are worked on at once: they and their scratch stay in a core's own cache
_FIRST = 2**14  # weights that are made once


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


def new_salt() -> int:
    """64 bits that nobody knew before."""
    return int.from_bytes(os.urandom(8))


class _Buffers(local):
    """What each thread mixes elements in, over and over: new memory would cost more than the work."""

    def __init__(self) -> None:
        self.mixed, self.scratch = np.empty((2, _FIT), np.uint64)


_BUFFERS = _Buffers()


def _mixed(bits: Bits, salt: int) -> Words:
    """The elements, `_FIT` at most, mixed, until the next call of this thread."""
    mixed, scratch = (buffer[: bits.size].reshape(bits.shape) for buffer in (_BUFFERS.mixed, _BUFFERS.scratch))
    if bits.itemsize <= 2:
        place = scratch.view(np.intp)  # take makes such indices of others, in new memory
        place[...] = bits
        return np.take(_table(salt), place, out=mixed, mode="clip")  # none is beyond it, and nothing is buffered
    return finalise(np.multiply(bits, _keys(salt)[0], out=mixed), scratch)


@lru_cache(4)
def _table(salt: int) -> Words:
    """uint64 [65536]: each element of 16 bits or fewer, mixed."""
    return finalise(np.arange(2**16, dtype=np.uint64) * _keys(salt)[0])


@lru_cache(4)
def _keys(salt: int) -> tuple[np.uint64, Words]:
    """k, and c(n) for the first n, of a salt."""
    return np.uint64(_made(salt, np.array([MASK - 1], np.uint64))[0]), _made(salt, np.arange(_FIRST, dtype=np.uint64))


def _weights(salt: int, first: int, count: int) -> Words:
    """uint64 [count], odd: c(n) for n from `first` on."""
    if first + count <= _FIRST:
        return _keys(salt)[1][first : first + count]
    return _made(salt, np.arange(first, first + count, dtype=np.uint64))


def _made(salt: int, number: Words) -> Words:
    return finalise((number + np.uint64(1)) * np.uint64(GOLD) + mix(np.array([salt], np.uint64))) | np.uint64(1)


@dataclass(slots=True, eq=False)
class RowHashes:
    """The hashes of one tensor, gathered chunk by chunk.

    Attributes:
        shape: as which it is looked at: the global shape, or that which its elements have elsewhere.
        dtype: of the elements; those of a wider one were rounded to it.
        salt: 64 bits; hashes of another one are other hashes.
        rows: uint64 [slices * rows].
        by_columns: whether the hashes of columns are wanted.
        columns: uint64 [slices, columns]; [0, 0] for vectors and where they are not wanted.
        count: elements that were added.
        zeros: those of them that are zero, where they are counted.
    """

    shape: Shape
    dtype: str
    salt: int
    by_columns: bool = True
    rows: Words = field(init=False)
    columns: Words = field(init=False)
    count: int = 0
    zeros: int = 0
    lock: Any = field(default_factory=Lock, repr=False)

    def __post_init__(self) -> None:
        slices, rows, columns = matrix(self.shape)
        self.rows = np.zeros(slices * rows, np.uint64)
        self.columns = np.zeros((slices, columns) if self.by_columns and len(self.shape) > 1 else (0, 0), np.uint64)

    def __getstate__(self) -> dict[str, Any]:
        """All but the lock, which cannot travel."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in (state | {"lock": Lock()}).items():
            setattr(self, name, value)

    @property
    def is_whole(self) -> bool:
        """Whether each element was added (once, where no chunks overlap)."""
        return self.count == prod(self.shape)

    def add(self, bits: Bits, row: int, column: int) -> None:
        """Adds a block [rows, columns] of canonical elements of one slice, whose first row counts in all slices."""
        count, width = bits.shape
        per = matrix(self.shape)[1]
        down = _weights(self.salt, row % per, count) if self.columns.size else None
        sums, across = np.zeros(count, np.uint64), np.zeros(width, np.uint64)
        wide = min(width, _FIT)
        tall = _FIT // wide
        for first in range(0, width, wide):
            weights = _weights(self.salt, column + first, min(wide, width - first))
            for top in range(0, count, tall):
                mixed = _mixed(bits[top : top + tall, first : first + wide], self.salt)
                sums[top : top + tall] += np.einsum("ij,j->i", mixed, weights)
                if down is not None:
                    across[first : first + wide] += np.einsum("ij,i->j", mixed, down[top : top + tall])
        with self.lock:
            self.rows[row : row + count] += sums
            if down is not None:
                self.columns[row // per, column : column + width] += across
            self.count += bits.size

    def layers(self) -> list[RowHashes]:
        """The hashes of each part along the first axis, of a tensor that has three axes or more."""
        count, shape = self.shape[0], self.shape[1:]
        rows, columns = self.rows.reshape(count, -1), self.columns.reshape(count, -1, max(self.columns.shape[-1], 1))
        layers = []
        for number in range(count):
            layer = RowHashes(shape[:1] if shape[1:] == (1,) else shape, self.dtype, self.salt, self.by_columns)
            layer.rows = rows[number]
            layer.columns = columns[number] if layer.columns.size else layer.columns
            layer.count = prod(shape) if self.is_whole else 0
            layers.append(layer)
        return layers

    def scatter(self, bits: Bits, places: Words) -> None:
        """Adds canonical elements [n] one by one, by their row-major numbers [n] in the whole tensor."""
        _, per, columns = matrix(self.shape)
        row, column = np.divmod(places, np.uint64(columns))
        slices, inside = np.divmod(row, np.uint64(per))
        for first in range(0, bits.size, _FIT):
            some = slice(first, first + _FIT)
            mixed = _mixed(bits[some], self.salt)
            with self.lock:
                np.add.at(self.rows, row[some], mixed * _made(self.salt, column[some]))
                if self.columns.size:
                    place = slices[some], column[some]
                    np.add.at(self.columns, place, mixed * _made(self.salt, inside[some]))
        with self.lock:
            self.count += bits.size


class Placed(NamedTuple):
    """A chunk of a tensor whose hashes are wanted."""

    hashes: tuple[RowHashes, ...]  # to add to; more than one where the elements are wanted after rounding too
    dtype: str  # of the elements in the file
    where: Elements  # their places in the whole tensor, row by row

    def add(self, bits: Bits, first: int) -> None:
        """Adds a run [n] of its elements, as stored, from the element `first` of the chunk on."""
        for hashes in self.hashes:
            words = comparable(bits, self.dtype, hashes.dtype)
            if words is None:
                continue
            if len(self.hashes) > 1:  # rounding may make zeros
                with hashes.lock:
                    hashes.zeros += words.size - int(np.count_nonzero(words))
            if self.dtype.startswith("complex"):  # both parts are one element
                words = _paired(words.reshape(-1, 2), hashes.salt)
            if self.where.strides and self.where.strides[-1] != 1:
                hashes.scatter(words, self.where.places(first, len(words)))
                continue
            for row, column, at, count, width in blocks(self.where, first, len(words), hashes.shape):
                hashes.add(words[at : at + count * width].reshape(count, width), row, column)


def _paired(pairs: Bits, salt: int) -> Words:
    """uint64 [n], real and imaginary part as one number."""
    made = pairs[:, 1].astype(np.uint64)
    for first in range(0, len(made), _FIT):
        made[first : first + _FIT] ^= _mixed(pairs[first : first + _FIT, 0], salt)
    return made


def blocks(where: Elements, first: int, count: int, shape: Shape) -> Iterator[tuple[int, int, int, int, int]]:
    """Blocks of the elements [first, first + count) of a chunk: row, column, position in these, rows, columns.

    Rows and columns are those of the whole tensor, as `matrix` has them.
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


def canonical(bits: Bits, dtype: str) -> Bits:
    """The bits of real numbers with one zero and one NaN, whatever its payload; as they are for other dtypes."""
    encoding = ENCODINGS.get(dtype)
    # where encoding.single, one pattern of bits is NaN, and nothing has two zeros
    if encoding is None or encoding.unsigned or encoding.single or not bits.size:
        return bits
    top = 1 << (8 * bits.itemsize - 1)
    worst = encoding.bad + encoding.has_infinity  # what is from here on is NaN
    signed = bits.view(f"i{bits.itemsize}")
    is_zero, is_nan = signed.min() == -top, signed.max() >= worst or bits.max() >= top | worst
    if not (is_zero or is_nan):
        return bits
    made = bits.copy()
    if is_zero:
        made[bits == top] = 0
    if is_nan:
        made[(bits & bits.dtype.type(top - 1)) >= worst] = worst
    return made


def comparable(bits: Bits, dtype: str, to: str) -> Bits | None:
    """The elements rounded to a dtype and canonical, None where no rounding is known.

    A finite one that is infinite in it has the bits of a second NaN, which no canonical element has.
    """
    made = rounded(bits, dtype, to)
    if made is None:
        return None
    made = canonical(made, to)
    if dtype != to:
        sign, infinite = made.dtype.type((1 << 8 * made.itemsize - 1) - 1), ENCODINGS[to].bad
        at = np.flatnonzero((made & sign) == infinite)
        at = at[(bits.reshape(-1)[at] & bits.dtype.type((1 << 8 * bits.itemsize - 1) - 1)) < ENCODINGS[dtype].bad]
        made.reshape(-1)[at] = infinite + 2
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
    return f"<u{ITEM_BITS[dtype] // (16 if dtype.startswith('complex') else 8)}"


def digest(hashes: Words) -> int:
    """Of hashes in their order."""
    total = 0
    for first in range(0, len(hashes), _FIT):
        some = hashes[first : first + _FIT]
        number = np.arange(first + 1, first + len(some) + 1, dtype=np.uint64) * np.uint64(GOLD)
        total += int(finalise(some ^ finalise(number)).sum())
    return total & MASK


def multiset(hashes: Words) -> int:
    """Of hashes in any order; that of two sets together is the sum of both."""
    return sum(int(finalise(hashes[at : at + _FIT].copy()).sum()) for at in range(0, len(hashes), _FIT)) & MASK
