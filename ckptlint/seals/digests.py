"""Digests of contents: of the elements of a tensor whatever its sharding, and of objects.

All arithmetic is modulo 2^64. `finalise` is a bijection of 64-bit words, so one changed element always changes the
digest of a tensor; more changes are missed with a probability of 2^-64. It finds accidents and is no signature: whoever
wants to can balance a sum.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from io import BytesIO
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

GOLD = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio."""

ALGORITHM = "elem64-1"
"""The name of `elem_digest`, as a seal gives it."""

MASK = 2**64 - 1

_BLOCK = 1 << 14  # words that are worked on at once: they and a second row of them stay in a core's own cache
_RAMP = np.arange(_BLOCK, dtype=np.uint64) * np.uint64(GOLD)
_STEPS = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST = np.uint64(31)
_DEEP = 64

_Leaf = Callable[[Any], "bytes | None"]


def finalise(words: Words, scratch: Words | None = None) -> Words:
    """The words mixed in place: the finaliser of splitmix64, a bijection that leaves 0 at 0; overwrites `scratch` too.

    Source: Vigna's splitmix64: shifts 30, 27, 31, two multiplications
    """
    scratch = np.empty_like(words) if scratch is None else scratch
    for shift, factor in _STEPS:
        np.right_shift(words, shift, out=scratch)
        np.bitwise_xor(words, scratch, out=words)
        np.multiply(words, factor, out=words)
    np.right_shift(words, _LAST, out=scratch)
    return np.bitwise_xor(words, scratch, out=words)


def mix(words: Words) -> Words:
    """fin(words + GOLD), as a new array: what keys and seeds go through."""
    return finalise(words + np.uint64(GOLD))


class Elements(NamedTuple):
    """Where a run of stored elements is in the whole tensor.

    Attributes:
        start: row-major number of the first of them in the whole tensor.
        sizes: extents of the chunk in the order of storage, the slowest axis first; axes that run on are joined.
        strides: the distance in the whole tensor of two neighbours on each of these axes, in elements.
    """

    start: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Elements of the chunk."""
        return prod(self.sizes)

    def places(self, first: int, count: int) -> Words:
        """uint64 [count], the numbers in the whole tensor of the stored elements [first, first + count)."""
        number = np.arange(first, first + count, dtype=np.uint64)
        places = np.full(count, self.start & MASK, np.uint64)
        for size, stride in zip(self.sizes[::-1], self.strides[::-1], strict=True):
            number, index = np.divmod(number, np.uint64(size))
            places += index * np.uint64(stride & MASK)
        return places


def elements(
    offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int], order: Sequence[int] | None = None
) -> Elements:
    """The elements of a chunk.

    Args:
        offsets, sizes: the chunk; shape: the whole tensor; all in elements and of equal length.
        order: the axes as the chunk is stored, the slowest first; row-major by default.

    >>> elements((4, 0), (2, 8), (16, 8)), elements((0, 2), (4, 2), (4, 8), (1, 0))
    (Elements(start=32, sizes=(16,), strides=(1,)), Elements(start=2, sizes=(2, 4), strides=(1, 8)))
    """
    whole = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    joined: list[tuple[int, int]] = []
    for axis in range(len(shape)) if order is None else order:
        size, stride = sizes[axis], whole[axis]
        if joined and joined[-1][1] == size * stride and size != 1:
            joined[-1] = joined[-1][0] * size, stride
        elif size != 1:
            joined.append((size, stride))
    start = sum(offset * stride for offset, stride in zip(offsets, whole, strict=True))
    return Elements(start, tuple(size for size, _ in joined), tuple(stride for _, stride in joined))


def elem_digest(bits: npt.NDArray[np.unsignedinteger[Any]], where: Elements, first: int = 0, parts: int = 1) -> int:
    """The digest of elements together with their places: additive, and so independent of the sharding.

    Sum over the elements of fin(bits ^ fin((L + 1) * GOLD)), L their row-major number in the whole tensor. The sum over
    chunks that tile a tensor is the digest of the tensor.

    Args:
        bits: [n], the elements' own 1, 2, 4 or 8 bytes as numbers, in the order of storage.
        first: position of the first of them in the chunk, so that a chunk may come in pieces.
        parts: 2 for complex: `bits` are then real and imaginary parts, `where` and `first` still count elements.
    """
    if parts > 1:
        doubled = (*(stride * parts for stride in where.strides), 1)
        where, first = Elements(where.start * parts, (*where.sizes, parts), doubled), first * parts
    total = 0
    for at, keys in _keys(where, first, len(bits)):
        np.bitwise_xor(finalise(keys), bits[at : at + len(keys)], out=keys)
        total += int(finalise(keys).sum())
    return total & MASK


def _keys(where: Elements, first: int, count: int) -> Iterator[tuple[int, Words]]:
    """Blocks of (L + 1) * GOLD for the stored elements [first, first + count), each with its position from `first`.

    L is linear in the index on each axis, and so is the product modulo 2^64: rows and columns are added up.
    """
    run, step = (where.sizes[-1], where.strides[-1]) if where.sizes else (1, 1)
    ramp = _RAMP if step == 1 else _RAMP * np.uint64(step)
    at = first
    while at < first + count:
        row, column = divmod(at, run)
        left = first + count - at
        if run >= _BLOCK or column or left < run:
            width = min(run - column, left, _BLOCK)
            base = int(_starts(where, row, 1)[0]) + column * step * GOLD
            yield at - first, ramp[:width] + np.uint64(base & MASK)
            at += width
        else:
            rows = min(left // run, max(_BLOCK // run, 1))
            yield at - first, (_starts(where, row, rows)[:, None] + ramp[:run]).reshape(-1)
            at += rows * run


def _starts(where: Elements, row: int, rows: int) -> Words:
    """uint64 [rows], (L + 1) * GOLD at the start of some runs of the last axis."""
    runs = Elements(where.start, where.sizes[:-1], where.strides[:-1])
    return (runs.places(row, rows) + np.uint64(1)) * np.uint64(GOLD)


def object_digest(
    value: Any, leaf: _Leaf = lambda value: None, before_each: Callable[[], object] = lambda: None
) -> int | None:
    """The digest of a value as it reads, independent of the order of mappings and sets; None when it has none.

    Types are part of it, floats count by every bit but the payload of a NaN, arrays by dtype, shape and bytes. A value
    that holds more than its kind does, as a list with attributes or a masked array, has no digest.

    Args:
        leaf: what stands for a value of a type that is not known here, a tensor say; None for no idea.
        before_each: is called before each value within the value; it may raise to end this.

    >>> object_digest({"lr": 0.1, "step": 3}) == object_digest({"step": 3, "lr": 0.1})
    True
    >>> object_digest([1]) == object_digest([1.0]), object_digest(object())
    (False, None)
    """
    from hashlib import blake2b  # it loads a library of its own

    text = _canonical(value, leaf, before_each, 0)
    return None if text is None else int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def _canonical(value: Any, leaf: _Leaf, before_each: Callable[[], object], depth: int) -> bytes | None:
    """The value as bytes that no other value has: tag, length, content. None for what is unknown, or too deep."""
    if depth > _DEEP:
        return None
    before_each()
    kind = type(value)
    name = kind.__qualname__
    if isinstance(value, Enum):
        return _joined(name, [value.name, value.value], leaf, before_each, depth)
    if kind in (int, bool):
        return _tagged(name, f"{value:x}".encode())  # decimal digits are limited to some thousands
    if value is None or kind in (str, complex):
        return _tagged(name, repr(value).encode("utf-8", "surrogatepass"))
    if kind is np.ndarray or isinstance(value, np.generic):
        if value.dtype.hasobject:
            return None
        head = f"{value.dtype.str} {value.shape}".encode()
        return _tagged("array", _tagged("", head) + np.ascontiguousarray(value).tobytes())
    if kind is float:
        return _tagged(name, b"nan" if math.isnan(value) else value.hex().encode())
    if kind in (bytes, bytearray, memoryview):
        return _tagged(name, bytes(value))
    if kind is BytesIO:
        return _tagged(name, value.getvalue())
    from argparse import Namespace  # of these Megatron's arguments are; a check of metadata meets none

    if kind is Namespace:
        return _joined(name, [vars(value)], leaf, before_each, depth)
    base = next((base for base in _CONTAINERS if isinstance(value, base)), None)
    if base is None and is_dataclass(value) and not isinstance(value, type):
        content = {field.name: getattr(value, field.name) for field in fields(value)}
        return _joined(name, [content], leaf, before_each, depth) if _attributes(value) <= content.keys() else None
    if base is None:
        known = leaf(value)
        return None if known is None else _tagged(name, known)
    if kind not in _PLAIN and _attributes(value):
        return None
    if base in (list, tuple):
        return _joined(name, [*base.__iter__(value)], leaf, before_each, depth)
    if base in (set, frozenset):
        members = [_canonical(member, leaf, before_each, depth + 1) for member in base.__iter__(value)]
    else:
        members = [_joined("", pair, leaf, before_each, depth) for pair in base.items(value)]
    return None if None in members else _tagged(name, b"".join(sorted(m for m in members if m is not None)))


_CONTAINERS: tuple[Any, ...] = (dict, list, tuple, set, frozenset, MappingProxyType)
_PLAIN = {*_CONTAINERS, OrderedDict, defaultdict, Counter}


def _attributes(value: Any) -> set[str]:
    """What an instance holds beside what its kind does, by name."""
    slots = [kind.__dict__.get("__slots__", ()) for kind in type(value).__mro__]
    names = {name for some in slots for name in ((some,) if isinstance(some, str) else some)}
    return (names - {"__dict__", "__weakref__"}) | getattr(value, "__dict__", {}).keys()


def _joined(
    tag: str, values: Sequence[Any], leaf: _Leaf, before_each: Callable[[], object], depth: int
) -> bytes | None:
    pieces = []
    for value in values:
        piece = _canonical(value, leaf, before_each, depth + 1)
        if piece is None:
            return None
        pieces.append(piece)
    return _tagged(tag, b"".join(pieces))


def _tagged(tag: str, content: bytes) -> bytes:
    return f"{tag}:{len(content)}:".encode() + content
