"""Digests of contents against the formulas written out in plain Python, and what they tell apart."""

from __future__ import annotations

import random
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from io import BytesIO
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptlint.seals import digests
from ckptlint.seals.digests import GOLD, MASK, elem_digest, elements, finalise, mix, object_digest

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def plain_finalise(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def plain_elem_digest(values: np.ndarray, offsets: Sequence[int], shape: Sequence[int]) -> int:
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    total = 0
    for index in np.ndindex(values.shape):
        number = sum((o + i) * s for o, i, s in zip(offsets, index, strides, strict=True))
        total += plain_finalise(int(values[index]) ^ plain_finalise((number + 1) * GOLD & MASK))
    return total & MASK


def bits(seed: int, count: int, item: int) -> np.ndarray:
    return np.frombuffer(random.Random(seed).randbytes(count * item), WORDS[item])


def test_fin_and_mix_are_the_words_of_splitmix64() -> None:
    # the first two outputs of Vigna's generator with seed 1234567, as other implementations have them too
    state = np.array([1234567, 1234567 + GOLD], np.uint64)
    assert mix(state).tolist() == [6457827717110365317, 3203168211198807973]
    assert finalise(np.array([0, 1, MASK], np.uint64)).tolist() == [
        plain_finalise(0),
        plain_finalise(1),
        plain_finalise(MASK),
    ]


@st.composite
def chunks(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], list[int]]:
    """Offsets, sizes, global shape and an order of axes."""
    shape = draw(st.lists(st.integers(1, 6), max_size=4))
    offsets = [draw(st.integers(0, size)) for size in shape]
    sizes = [draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True)]
    return offsets, sizes, shape, draw(st.permutations(range(len(shape))))


@given(chunks(), st.sampled_from([1, 2, 4, 8]), st.integers(0, 9), st.sampled_from([1, 3, 16, 1 << 14]))
def test_elem_digest_is_its_formula_in_pieces_and_in_any_order_of_storage(
    chunk: tuple[list[int], list[int], list[int], list[int]], item: int, piece: int, block: int
) -> None:
    offsets, sizes, shape, order = chunk
    values = bits(len(shape), prod(sizes), item).reshape(sizes)
    stored = values.transpose(order).reshape(-1)
    where = elements(offsets, sizes, shape, order)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "_BLOCK", block)
        cuts = range(0, len(stored), piece or max(len(stored), 1))
        pieces = [elem_digest(stored[at : at + (piece or len(stored))], where, at) for at in cuts]
    assert sum(pieces) & MASK == plain_elem_digest(values, offsets, shape)


def test_elem_digest_of_large_numbers_of_elements() -> None:
    values = bits(0, 3 * 20_000, 2).reshape(3, 20_000)
    shape, offsets = (2**20, 2**40), (2**20 - 3, 2**40 - 20_000)
    assert elem_digest(values.reshape(-1), elements(offsets, (3, 20_000), shape)) == plain_elem_digest(
        values, offsets, shape
    )


def test_elem_digest_of_complex_numbers_is_that_of_their_parts() -> None:
    values = bits(0, 4 * 3 * 2, 4).reshape(4, 3, 2)
    where = elements((2, 1), (4, 3), (8, 5))
    parts = values.reshape(-1)
    expected = plain_elem_digest(values, (2, 1, 0), (8, 5, 2))
    assert elem_digest(parts, where, parts=2) == expected
    assert (elem_digest(parts[:10], where, parts=2) + elem_digest(parts[10:], where, 5, parts=2)) & MASK == expected


CUTS: dict[str, list[list[int]]] = {
    "whole": [[24], [10], [6]],
    "rows": [[6, 6, 6, 6], [10], [6]],
    "uneven rows, one empty": [[10, 10, 4, 0], [10], [6]],
    "columns": [[24], [4, 4, 2], [6]],
    "grid": [[12, 12], [5, 5], [1, 2, 3]],
    "single elements of the last axis": [[24], [10], [1] * 6],
}


@pytest.mark.parametrize("item", [1, 2, 4, 8])
def test_elem_digest_is_the_same_in_every_sharding(item: int) -> None:
    values = bits(item, 24 * 10 * 6, item).reshape(24, 10, 6)
    sums = {name: sharded(values, cuts) for name, cuts in CUTS.items()}
    assert set(sums.values()) == {plain_elem_digest(values, (0, 0, 0), values.shape)}
    exchanged = np.concatenate([values[12:], values[:12]])
    assert sharded(exchanged, CUTS["rows"]) != sums["rows"]


def sharded(values: np.ndarray, cuts: list[list[int]]) -> int:
    """The sum over the chunks that cuts of each axis make."""
    total = 0
    for index in product(*(range(len(cut)) for cut in cuts)):
        offsets = [sum(cut[:i]) for cut, i in zip(cuts, index, strict=True)]
        sizes = [cut[i] for cut, i in zip(cuts, index, strict=True)]
        part = values[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        total += elem_digest(part.reshape(-1), elements(offsets, sizes, values.shape))
    return total & MASK


def test_elem_digest_sees_every_single_bit_and_every_exchange() -> None:
    values = bits(0, 125, 2).copy()
    where = elements((25,), (125,), (1000,))
    seen = {elem_digest(values, where)}
    for bit in range(2000):
        values[bit // 16] ^= 1 << bit % 16
        seen.add(elem_digest(values, where))
        values[bit // 16] ^= 1 << bit % 16
    assert len(seen) == 2001
    swapped = values.copy()
    swapped[[3, 9]] = swapped[[9, 3]]
    flipped = values.copy()
    flipped[[3, 9]] ^= 0x8000
    moved = elements((26,), (125,), (1000,))
    seen |= {elem_digest(swapped, where), elem_digest(flipped, where), elem_digest(values, moved)}
    assert len(seen) == 2004


# ---------------------------------------------------------------- objects


class Colour(Enum):
    RED = 1


class Shade(Enum):
    RED = 1


@dataclass
class Setting:
    lr: float
    betas: tuple[float, ...] = (0.9, 0.95)


DIFFERENT: list[Any] = [
    None, True, False, 0, 1, -1, 2**80, 10**6000, 0.0, -0.0, 1.0, float("nan"), float("inf"), 1j, "", "1", "None",
    b"", b"1", [], [1], [1, 2], [[1], 2], [1, [2]], (), (1, 2), {}, {1: 2}, {"1": 2}, {1: 2, 3: 4},
    set(), {1, 2}, frozenset(),
    np.zeros(2), np.zeros(2, "f4"), np.zeros((2, 1)), np.float64(1), np.int64(1), BytesIO(b"1"), Colour.RED, Shade.RED,
    Namespace(), Namespace(a=1), Setting(1.0), Setting(2.0), 0.1, 0.1 + 2**-56, "\ud800", ["a", "b"], ["ab"], ["a,b"],
]  # fmt: skip


def test_different_values_have_different_digests() -> None:
    found = [object_digest(value) for value in DIFFERENT]
    assert None not in found
    assert len(set(found)) == len(DIFFERENT)


def test_equal_values_have_equal_digests() -> None:
    first = OrderedDict(lr=0.1, states={"a": np.arange(3), "b": {1, 2, 3}}, args=Namespace(x=1, y=2))
    second = OrderedDict(args=Namespace(y=2, x=1), states={"b": {3, 2, 1}, "a": np.arange(6)[::2] // 2}, lr=0.1)
    assert object_digest(first) == object_digest(second) is not None
    assert object_digest(np.arange(6).reshape(2, 3).T) == object_digest(np.arange(6).reshape(2, 3).T.copy())
    assert object_digest(float("nan")) == object_digest(-float("nan"))


def test_what_nobody_knows_has_no_digest() -> None:
    endless: list[Any] = []
    endless.append(endless)
    for value in (
        object(), [object()], {"a": {"b": object()}}, {object()}, endless, np.array([None]), Namespace(a=len),
    ):  # fmt: skip
        assert object_digest(value) is None
    assert object_digest([object()], lambda value: b"known") is not None
