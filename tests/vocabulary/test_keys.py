"""Names of tensors: roles, numbers, ranges, and names folded into braces."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import ends

from ckptlint.model.text import fold_names, ranges
from ckptlint.vocabulary.keys import numbers_in, role


@pytest.mark.parametrize(
    ("fqn", "expected", "found"),
    [
        ("model.layers.3.mlp.experts.12.w1.weight", "model.layers.*.mlp.experts.*.w1.weight", (3, 12)),
        ("layers.10.weight", "layers.*.weight", (10,)), ("0.weight", "*.weight", (0,)), ("blocks.7", "blocks.*", (7,)),
        ("mlp.experts.linear_fc1.weight3", "mlp.experts.linear_fc1.weight*", (3,)),
        ("mlp.experts.linear_fc1.bias12", "mlp.experts.linear_fc1.bias*", (12,)),
        ("decoder.layers._extra_state/shard_0_4", "decoder.layers._extra_state/shard_*_*", (0, 4)),
        ("rng_state/shard_0.1_2.2", "rng_state/shard_*.*_*.*", (0, 1, 2, 2)),
        ("optimizer.dp_group_idx_0.optimizer", "optimizer.dp_group_idx_*.optimizer", (0,)),
        ("conv2d.w1.weight", "conv2d.w1.weight", ()), ("mlp.up.weight", "mlp.up.weight", ()),
        ("layers.3b.weight", "layers.3b.weight", ()), ("weight2bias.x", "weight2bias.x", ()), ("", "", ()),
    ],
)  # fmt: skip
def test_role_and_numbers(fqn: str, expected: str, found: tuple[int, ...]) -> None:
    assert role(fqn) == expected
    assert numbers_in(fqn) == found


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1], "0-1"),
        ([0, 1, 2, 4, 5, 9], "0-2,4-5,9"),
        ([9, 0, 1, 1, 0], "0-1,9"),
        ([31, *range(30)], "0-29,31"),
    ],
)
def test_ranges(values: list[int], expected: str) -> None:
    assert ranges(values) == expected


@pytest.mark.parametrize(
    ("fqns", "expected"),
    [
        (["layers.0.w", "layers.1.w", "layers.3.w"], ["layers.{0-1,3}.w"]),
        (["layers.5.w"], ["layers.5.w"]),
        (["a.w", "b.w"], ["a.w", "b.w"]),
        ([f"l.{i}.e.{j}.w" for i in range(3) for j in range(4)], ["l.{0-2}.e.{0-3}.w"]),
        (["l.0.e.0.w", "l.0.e.1.w", "l.1.e.1.w"], ["l.0.e.{0-1}.w", "l.1.e.1.w"]),
        (["l.2.e.0.w", "l.2.e.7.w"], ["l.2.e.{0,7}.w"]),
        (["layers.1.w", "layers.1.b", "layers.0.w"], ["layers.{0-1}.w", "layers.1.b"]),
        ([], []),
    ],
    ids=["gap", "one", "no numbers", "product", "no product", "one varies", "two roles", "none"],
)
def test_braces(fqns: list[str], expected: list[str]) -> None:
    assert fold_names(fqns) == expected


def spelled_out(pattern: str) -> list[str]:
    """The names that a pattern with braces stands for."""
    parts = re.split(r"\{([^}]*)\}", pattern)
    choices = [[part] for part in parts]
    for i in range(1, len(parts), 2):
        bounds = [part.partition("-")[::2] for part in parts[i].split(",")]
        choices[i] = [str(n) for low, high in bounds for n in range(int(low), int(high or low) + 1)]
    return ["".join(choice) for choice in product(*choices)]


@given(st.sets(st.tuples(st.integers(0, 9), st.integers(0, 12), st.sampled_from(["w", "bias", "e.w"])), min_size=1))
def test_braces_stand_for_the_names_and_no_others(rows: set[tuple[int, int, str]]) -> None:
    fqns = [f"model.layers.{a}.experts.{b}.{name}" for a, b, name in rows]
    listed = [name for pattern in fold_names(fqns) for name in spelled_out(pattern)]
    assert sorted(listed) == sorted(fqns)


def test_names_whose_numbers_are_permuted_are_not_compared_with_each_other() -> None:
    names = [f"a.{number}.b.{number * 7919 % 50_000}.w" for number in range(50_000)]
    with ends():
        assert len(fold_names(names)) == len(names)


def test_names_of_many_numbers_stay_as_they_are() -> None:
    rows = [[*[0] * i, *[1] * (1500 - i)] for i in range(1500)]
    fqns = [".".join(map(str, ["a", *row, "w"])) for row in rows]
    assert fold_names(fqns) == fqns
    assert fold_names([f"a.1.2.3.4.5.6.7.{n}.w" for n in range(3)]) == ["a.1.2.3.4.5.6.7.{0-2}.w"]


@pytest.mark.parametrize("fqn", ["layers.007.w", "block_00.w", "a*.3.w", "*", "layers.٣.w"])
def test_one_name_alone_stays_as_it_is(fqn: str) -> None:
    assert fold_names([fqn]) == [fqn]


def test_names_that_differ_only_in_leading_zeros_do_not_merge() -> None:
    assert len({name for pattern in fold_names(["layers.01.w", "layers.1.w"]) for name in [pattern]}) == 2


def test_a_number_of_any_length_is_no_error() -> None:
    digits = "9" * 5000
    assert role(f"layers.{digits}.w") == "layers.*.w"
    assert fold_names([f"layers.{digits}.w"]) == [f"layers.{digits}.w"]
