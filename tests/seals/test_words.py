"""Words of rows and columns: the same however a tensor is cut, stored, flattened; other ones for other values."""

from __future__ import annotations

import random
from math import prod

import numpy as np
import pytest
import torch
from support import examples

from ckptlint.seals.digests import elements
from ckptlint.seals.words import Placed, TensorWords, canonical, matrix, rounded

SHAPES = [(), (7,), (5, 3), (3, 5, 4), (2, 3, 2, 5), (1, 9), (9, 1), (64, 33)]
DTYPES = {"uint8": np.uint8, "bfloat16": np.uint16, "float32": np.uint32, "int64": np.uint64}


def slow(bits: np.ndarray, shape: tuple[int, ...]) -> tuple[list[int], list[list[int]]]:
    """The words by their definition."""
    from ckptlint.seals.words import _coefficients

    slices, rows, columns = matrix(shape)
    whole = bits.reshape(slices, rows, columns).astype(object)
    factors = [int(c) for c in _coefficients(0, max(rows, columns))]
    across = [sum(int(v) * factors[j] for j, v in enumerate(row)) % 2**64 for part in whole for row in part]
    down = [[sum(int(part[i][j]) * factors[i] for i in range(rows)) % 2**64 for j in range(columns)] for part in whole]
    return across, down


def random_bits(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    word = DTYPES[dtype]
    bits = rng.integers(0, np.iinfo(word).max, prod(shape), word, endpoint=True)
    return canonical(bits, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_words_are_their_definition(shape: tuple[int, ...], dtype: str) -> None:
    bits = random_bits(np.random.default_rng(0), dtype, shape)
    words = TensorWords(shape, dtype)
    whole = elements((0,) * len(shape), shape, shape)
    Placed((words,), dtype, whole).add(bits, 0)
    across, down = slow(bits, shape)
    assert words.rows.tolist() == across
    assert words.is_whole
    if len(shape) > 1:
        assert words.columns.tolist() == down


@pytest.mark.sweep
def test_any_cut_and_any_order_of_storage_gives_the_same_words() -> None:
    dice, rng = random.Random(3), np.random.default_rng(3)
    for _ in range(examples(60, 3000)):
        shape = tuple(dice.randrange(1, 9) for _ in range(dice.randrange(1, 5)))
        dtype = dice.choice([*DTYPES])
        bits = random_bits(rng, dtype, shape)
        wanted, found = TensorWords(shape, dtype), TensorWords(shape, dtype)
        Placed((wanted,), dtype, elements((0,) * len(shape), shape, shape)).add(bits, 0)
        for offsets, sizes in cuts(dice, shape):
            order = list(range(len(shape)))
            if dice.random() < 0.3:
                dice.shuffle(order)
            box = bits.reshape(shape)[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
            stored = np.ascontiguousarray(box.transpose(order)).reshape(-1)
            placed = Placed((found,), dtype, elements(offsets, sizes, shape, order))
            at = 0
            while at < len(stored):  # in pieces, as blocks of a file come
                some = dice.randrange(1, len(stored) - at + 1)
                placed.add(stored[at : at + some], at)
                at += some
        assert np.array_equal(found.rows, wanted.rows)
        assert np.array_equal(found.columns, wanted.columns)
        assert found.is_whole


def cuts(dice: random.Random, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes that tile a shape: each is cut in two until chance ends it."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(dice.randrange(6)):
        offsets, sizes = boxes.pop(dice.randrange(len(boxes)))
        axis = dice.randrange(len(shape))
        if sizes[axis] < 2:
            boxes.append((offsets, sizes))
            continue
        at = dice.randrange(1, sizes[axis])
        boxes.append((offsets, (*sizes[:axis], at, *sizes[axis + 1 :])))
        begin = (*offsets[:axis], offsets[axis] + at, *offsets[axis + 1 :])
        boxes.append((begin, (*sizes[:axis], sizes[axis] - at, *sizes[axis + 1 :])))
    return boxes


@pytest.mark.parametrize("length", [2**20, 2**20 + 1, 2**20 + 5000])
def test_long_vectors_and_the_shape_that_they_have_elsewhere(length: int) -> None:
    bits = random_bits(np.random.default_rng(1), "bfloat16", (length,))
    one, two = TensorWords((length,), "bfloat16"), TensorWords((length,), "bfloat16")
    Placed((one,), "bfloat16", elements((0,), (length,), (length,))).add(bits, 0)
    half = length // 3
    Placed((two,), "bfloat16", elements((half,), (length - half,), (length,))).add(bits[half:], 0)
    Placed((two,), "bfloat16", elements((0,), (half,), (length,))).add(bits[:half], 0)
    assert np.array_equal(one.rows, two.rows)
    flat, square = TensorWords((512, 128), "bfloat16"), TensorWords((512, 128), "bfloat16")
    Placed((flat,), "bfloat16", elements((0,), (512 * 128,), (512 * 128,))).add(bits[: 512 * 128], 0)
    Placed((square,), "bfloat16", elements((0, 0), (512, 128), (512, 128))).add(bits[: 512 * 128], 0)
    assert np.array_equal(flat.rows, square.rows)
    assert np.array_equal(flat.columns, square.columns)


def test_a_transpose_has_the_rows_of_the_others_columns() -> None:
    bits = random_bits(np.random.default_rng(2), "float32", (40, 24)).reshape(40, 24)
    one, two = TensorWords((40, 24), "float32"), TensorWords((24, 40), "float32")
    Placed((one,), "float32", elements((0, 0), (40, 24), (40, 24))).add(bits.reshape(-1), 0)
    turned = np.ascontiguousarray(bits.T).reshape(-1)
    Placed((two,), "float32", elements((0, 0), (24, 40), (24, 40))).add(turned, 0)
    assert np.array_equal(one.rows, two.columns[0])
    assert np.array_equal(one.columns[0], two.rows)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("to", ["float32", "float16", "bfloat16"])
def test_rounding_is_torch_s(dtype: str, to: str) -> None:
    rng = np.random.default_rng(4)
    word = {8: np.uint64, 4: np.uint32, 2: np.uint16}[getattr(torch, dtype).itemsize]
    bits = rng.integers(0, np.iinfo(word).max, 200_000, word, endpoint=True)
    number = torch.from_numpy(bits.view({8: np.int64, 4: np.int32, 2: np.int16}[word(0).itemsize])).view(
        getattr(torch, dtype)
    )
    out = number.to(getattr(torch, to))
    wanted = out.view({4: torch.int32, 2: torch.int16}[out.itemsize]).numpy()
    wanted = wanted.view({4: np.uint32, 2: np.uint16}[out.itemsize])
    found = rounded(bits, dtype, to)
    assert found is not None
    assert np.array_equal(canonical(found, to), canonical(wanted, to))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_zeros_and_nans_are_one_each(dtype: str) -> None:
    own = getattr(torch, dtype)
    number = torch.tensor([0.0, -0.0, 1.5, float("nan"), -float("nan"), -2.0], dtype=torch.float64).to(own)
    word = {8: np.uint64, 4: np.uint32, 2: np.uint16, 1: np.uint8}[own.itemsize]
    view = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[own.itemsize]
    bits = canonical(number.view(view).numpy().view(word), dtype)
    assert bits[0] == bits[1]
    assert bits[3] == bits[4]
    assert len({*bits.tolist()}) == 4
