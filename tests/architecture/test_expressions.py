"""The evaluator of sizes and conditions: what it means, what it refuses, and that nothing grows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import ends

from ckptlint.architecture.expressions import LARGEST, ExpressionError, parse_expression, whole

FIELDS = {
    "hidden_size": 48,
    "heads": 6,
    "tied": True,
    "none": None,
    "kinds": ["full", "linear", "full"],
    "dense": [0, 2],
    "pattern": "M*-",
    "text_config.depth": 5,
    "ratio": 2.5,
    "layer": 1,
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("hidden_size // heads", 8),
        ("2 * hidden_size + heads * 3", 114),
        ("hidden_size - heads - 2", 40),
        ("(hidden_size + 15) // 16 * 16", 48),
        ("hidden_size % 7", 6),
        ("-2 + heads", 4),
        ("text_config.depth", 5),
        ("int(hidden_size * ratio)", 120),
        ("max(heads, 9) + min(heads, 2, 1)", 10),
        ("len(kinds) + len(pattern)", 6),
        ("kinds[layer] == 'linear'", True),
        ("pattern[layer] == '*'", True),
        ("kinds[len(kinds) - 1]", "full"),
        ("layer in dense", False),
        ("layer not in dense", True),
        ("layer in none", False),
        ("'M' in pattern", True),
        ("not tied", False),
        ("not not tied", True),
        ("not none and heads > 5", True),
        ("tied and none or heads == 6", True),
        ("heads * (1 + tied)", 12),
        ("1 if tied else 2", 1),
        ("1 if none else 2 if not tied else 3", 3),
        ("false or none or 0", False),
        ("heads != 6", False),
        ("kinds == none", False),
        ("none == none", True),
        ("int(heads / 4) + ceil(heads / 4) + round(ratio)", 5),
        ("(hidden_size // heads) ** 2 + 1", 65),
        ("int(heads * 1.5)", 9),
    ],
)
def test_a_text_means_what_it_says(text: str, value: object) -> None:
    assert parse_expression(text).value(FIELDS) == value


def test_names_are_listed_once_in_their_order() -> None:
    assert parse_expression("b * a + text_config.depth if b else a").names == ("b", "a", "text_config.depth")


@pytest.mark.parametrize(
    "text",
    ["", " ", "1 +", "* 2", "a b", "a(1)", "max(1)", "len(a, b)", "(1", "1)", "a[1", "'open", "a.1", "a..b",
     "1 if a", "__import__('os')", "lambda: 1", "a = 1", "a; b", "a.b()", "[1]", "in", "1e99", "1j", "a < b < c",
     "a << 1", "a @ b", "-'a' if", "f'{a}'", "len(*a)", "a[1:2]", "\0"],
)  # fmt: skip
def test_what_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError):
        parse_expression(text)


@pytest.mark.parametrize(
    "text",
    ["hidden_size // 0", "heads % none", "'a' + 1", "kinds * 2", "kinds[7]", "kinds['a']", "heads[0]", "len(heads)",
     "absent", "none + 1", "heads ** -1", "heads ** 64", "2 ** ratio", "heads / 0", "kinds == kinds",
     "kinds < 2", "heads in heads", "pattern * 2", "ratio // 0"],
)  # fmt: skip
def test_what_has_no_value_is_one_clause(text: str) -> None:
    with pytest.raises(ExpressionError) as raised:
        parse_expression(text).value(FIELDS)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 200


@pytest.mark.parametrize("value", ["ratio", "-1", "'a'", "none", "kinds"])
def test_a_size_is_an_integer_of_at_least_0(value: str) -> None:
    with pytest.raises(ExpressionError):
        whole(parse_expression(value), FIELDS)


def test_nothing_reaches_2_62() -> None:
    assert whole(parse_expression("a * b"), {"a": 2**31, "b": 2**30}) == 2**61
    for fields in (
        {"a": 2**31, "b": 2**31},
        {"a": LARGEST, "b": 1},
        {"a": 10**5000, "b": 1},
        {"a": float("nan"), "b": 1},
    ):
        with pytest.raises(ExpressionError):
            whole(parse_expression("a * b"), fields)
    with pytest.raises(ExpressionError):
        parse_expression("1" * 30)


def test_texts_are_short_and_flat() -> None:
    for text in ("1 + " * 1000 + "1", "-(" * 60 + "1" + ")" * 60, "a[" * 60 + "0" + "]" * 60, "not " * 3000 + "a"):
        with pytest.raises(ExpressionError):
            parse_expression(text)
    assert whole(parse_expression("(" * 30 + "7" + ")" * 30), {}) == 7


def test_a_long_list_is_not_searched_for_every_layer() -> None:
    with pytest.raises(ExpressionError):
        parse_expression("layer in dense").value({"layer": 1, "dense": list(range(10**6))})


@given(st.text(alphabet="ab1 +-*/%()<>=![].,'if el s not in and or max len", max_size=60))
def test_any_text_is_a_value_or_one_error(text: str) -> None:
    try:
        with ends():
            parse_expression(text).value({"a": 3, "b": [1, 2], "e": "x"})
    except ExpressionError as error:
        assert str(error)


@given(st.integers(0, 2**20), st.integers(1, 2**20), st.integers(1, 2**10))
def test_arithmetic_is_that_of_python(a: int, b: int, c: int) -> None:
    fields = {"a": a, "b": b, "c": c}
    assert parse_expression("a * b + c - a // b % c").value(fields) == a * b + c - a // b % c
    assert parse_expression("a < b or not c == 1 and a >= c").value(fields) == (a < b or (c != 1 and a >= c))
