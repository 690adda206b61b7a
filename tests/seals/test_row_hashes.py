"""Words of rows and columns: the same however a tensor is cut, stored, flattened; other ones for other values."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import prod

import numpy as np
import pytest
import torch
from support import examples

from ckptlint.seals.digests import GOLD, elements
from ckptlint.seals.row_hashes import Placed, RowHashes, _weights, canonical, matrix, new_salt, rounded

SHAPES = [(), (7,), (5, 3), (3, 5, 4), (2, 3, 2, 5), (1, 9), (9, 1), (64, 33)]
SALT = 0x5EED
DTYPES = {"uint8": np.uint8, "bfloat16": np.uint16, "float32": np.uint32, "int64": np.uint64}


def slow(bits: np.ndarray, shape: tuple[int, ...]) -> tuple[list[int], list[list[int]]]:
    """The words by their definition."""
    slices, rows, columns = matrix(shape)
    key = fin64(SALT + GOLD)
    mixed = [fin64(int(v) * (fin64(-GOLD + key) | 1)) for v in bits]
    whole = np.array(mixed, object).reshape(slices, rows, columns)
    factors = [fin64((n + 1) * GOLD + key) | 1 for n in range(max(rows, columns))]
    across = [sum(v * factors[j] for j, v in enumerate(row)) % 2**64 for part in whole for row in part]
    down = [[sum(part[i][j] * factors[i] for i in range(rows)) % 2**64 for j in range(columns)] for part in whole]
    return across, down


def fin64(word: int) -> int:
    word %= 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = (word ^ word >> shift) * factor % 2**64
    return word ^ word >> 31


def random_bits(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    word = DTYPES[dtype]
    bits = rng.integers(0, np.iinfo(word).max, prod(shape), word, endpoint=True)
    return canonical(bits, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_words_are_their_definition(shape: tuple[int, ...], dtype: str) -> None:
    bits = random_bits(np.random.default_rng(0), dtype, shape)
    words = RowHashes(shape, dtype, SALT)
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
        dtype, salt = dice.choice([*DTYPES]), dice.randrange(2**64)
        bits = random_bits(rng, dtype, shape)
        wanted, found = RowHashes(shape, dtype, salt), RowHashes(shape, dtype, salt)
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
    one, two = RowHashes((length,), "bfloat16", SALT), RowHashes((length,), "bfloat16", SALT)
    Placed((one,), "bfloat16", elements((0,), (length,), (length,))).add(bits, 0)
    half = length // 3
    Placed((two,), "bfloat16", elements((half,), (length - half,), (length,))).add(bits[half:], 0)
    Placed((two,), "bfloat16", elements((0,), (half,), (length,))).add(bits[:half], 0)
    assert np.array_equal(one.rows, two.rows)
    flat, square = RowHashes((512, 128), "bfloat16", SALT), RowHashes((512, 128), "bfloat16", SALT)
    Placed((flat,), "bfloat16", elements((0,), (512 * 128,), (512 * 128,))).add(bits[: 512 * 128], 0)
    Placed((square,), "bfloat16", elements((0, 0), (512, 128), (512, 128))).add(bits[: 512 * 128], 0)
    assert np.array_equal(flat.rows, square.rows)
    assert np.array_equal(flat.columns, square.columns)


def test_a_transpose_has_the_rows_of_the_others_columns() -> None:
    bits = random_bits(np.random.default_rng(2), "float32", (40, 24)).reshape(40, 24)
    one, two = RowHashes((40, 24), "float32", SALT), RowHashes((24, 40), "float32", SALT)
    Placed((one,), "float32", elements((0, 0), (40, 24), (40, 24))).add(bits.reshape(-1), 0)
    turned = np.ascontiguousarray(bits.T).reshape(-1)
    Placed((two,), "float32", elements((0, 0), (24, 40), (24, 40))).add(turned, 0)
    assert np.array_equal(one.rows, two.columns[0])
    assert np.array_equal(one.columns[0], two.rows)


# ---------------------------------------------------------------- other values have other words


def words_of(number: torch.Tensor, salt: int = SALT) -> RowHashes:
    """The words of a whole tensor."""
    dtype, shape = str(number.dtype).removeprefix("torch."), tuple(number.shape)
    own = number.itemsize // (2 if number.is_complex() else 1)
    bits = number.contiguous().view(torch.uint8).numpy().reshape(-1).view(f"<u{own}")
    made = RowHashes(shape, dtype, salt)
    Placed((made,), dtype, elements((0,) * len(shape), shape, shape)).add(bits, 0)
    return made


def times(number: torch.Tensor, *factors: tuple[int, int]) -> torch.Tensor:
    """With some elements of a row times a number."""
    for column, factor in factors:
        number[1, column] *= factor
    return number


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negated": torch.neg,
    "doubled": lambda number: number * 2,
    "two signs": lambda number: times(number, (3, -1), (4, -1)),
    "far signs": lambda number: times(number, (0, -1), (-1, -1)),
    "exchanged": lambda number: number.index_copy(1, torch.tensor([2, 5]), number[:, [5, 2]]),
}


@pytest.mark.parametrize("width", [8, 4096])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "complex64", "complex128"])
@pytest.mark.parametrize("change", CHANGES)
def test_signs_doublings_and_exchanges_have_other_words(change: str, dtype: str, width: int) -> None:
    number = torch.randn(16, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    number = torch.complex(number, number.flip(0)) if dtype.startswith("complex") else number
    number = number.to(getattr(torch, dtype))
    one, two = words_of(number), words_of(CHANGES[change](number.clone()))
    alike = (one.rows == two.rows).tolist()
    assert alike == [row != 1 and "signs" in change for row in range(16)]


def test_the_parts_of_a_complex_element_are_not_each_other() -> None:
    number = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.complex64)
    turned = torch.view_as_complex(torch.view_as_real(number)[..., [1, 0]].contiguous())
    assert not (words_of(number).rows == words_of(turned).rows).any()


def test_every_salt_has_words_of_its_own() -> None:
    number = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    rows = np.concatenate([words_of(number, salt).rows for salt in (0, 1, SALT, 2**64 - 1, new_salt(), new_salt())])
    assert len(np.unique(rows)) == len(rows)


def test_zeros_have_the_word_zero_and_a_one_among_them_has_not() -> None:
    number = torch.zeros(4, 8)
    assert not words_of(number).rows.any()
    number[2, 5] = 1
    assert words_of(number).rows.astype(bool).tolist() == [False, False, True, False]


def test_values_that_balance_a_linear_sum_have_other_words() -> None:
    """Words were sums of bits times public numbers: one element more of the other's number, and the other way round."""
    public = [fin64((n + 1) * GOLD) | 1 for n in range(8)]
    weights = [int(c) for c in _weights(SALT, 0, 8)]
    number = torch.randint(-(2**62), 2**62, (1, 8), generator=torch.Generator().manual_seed(0))
    for c in (public, weights):  # even to who knows the weights
        other = [int(value) for value in number[0]]
        other[2] += c[5] * 3
        other[5] -= c[2] * 3
        sums = [sum(value * c[n] for n, value in enumerate(row)) % 2**64 for row in (number[0].tolist(), other)]
        assert sums[0] == sums[1]
        wrapped = [(value + 2**63) % 2**64 - 2**63 for value in other]
        assert words_of(number).rows[0] != words_of(torch.tensor([wrapped])).rows[0]


# ---------------------------------------------------------------- rounding


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
