"""Sizes and conditions of a table as text, `num_key_value_heads * head_dim`: evaluated here, never by Python.

Numbers, texts in single quotes, names of fields (with dots into sections), `+ - * // %`, comparisons, `in`, `and`,
`or`, `not`, `a if condition else b`, an item of a list `layer_types[layer]`, and `max`, `min`, `len`, `int`. Nothing
grows without bound: texts are short, nesting is shallow, and no result reaches 2**62.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

LONGEST = 2_000
"""Characters of an expression."""

DEEPEST = 40
"""Nested parts of an expression."""

LARGEST = 2**62
"""What no number reaches, in either direction."""

_LONGEST_LIST = 20_000  # what `in` looks through for every layer

Value = object
"""int, float, bool, str, None, or a list of these."""

_Node = Callable[[Mapping[str, Value]], Value]

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+)|(?P<text>'[^'\\]*')|(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)"
    r"|(?P<sign>==|!=|<=|>=|//|[-+*%<>()\[\],]))"
)
_WORDS = frozenset({"and", "or", "not", "in", "if", "else", "true", "false", "none", "max", "min", "len", "int"})


class ExpressionError(Exception):
    """Raised where a text is no expression, or has no value for these fields; the message is one clause."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed text.

    Attributes:
        text: as it was written.
        names: the fields that it may ask for, in the order of the text.
        value: fields -> the value. Raises ExpressionError.
    """

    text: str
    names: tuple[str, ...]
    value: _Node


@lru_cache(maxsize=4096)
def parse(text: str) -> Expression:
    """The expression that a text means.

    Raises:
        ExpressionError: it means none, or is longer or deeper than any table needs.
    """
    if len(text) > LONGEST:
        raise ExpressionError(f"an expression of {len(text):,} characters")
    parser = _Parser(_tokens(text), text)
    node = parser.choice()
    if parser.tokens:
        raise parser.unexpected()
    return Expression(text, tuple(dict.fromkeys(parser.names)), node)


def whole(expression: Expression, fields: Mapping[str, Value]) -> int:
    """The value as a size: an integer that is not negative.

    Raises:
        ExpressionError: it is something else.
    """
    value = expression.value(fields)
    if not isinstance(value, int) or not 0 <= value < LARGEST:
        raise ExpressionError(f"{expression.text} is {_shown(value)}, which is no size")
    return int(value)


def true(expression: Expression, fields: Mapping[str, Value]) -> bool:
    """Whether the condition holds: None, 0, an empty text and an empty list are false."""
    return bool(expression.value(fields))


def _tokens(text: str) -> list[tuple[str, str]]:
    """The parts of a text with their kinds, the first one last."""
    found = []
    at, end = 0, len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            raise ExpressionError(f"{text!r} is no expression")
        found.append((match.lastgroup, match[match.lastgroup]))
        at = match.end()
    return found[::-1]


class _Parser:
    """Recursive descent over one text; every method takes the tokens of what it is named after."""

    def __init__(self, tokens: list[tuple[str, str]], text: str) -> None:
        self.tokens = tokens
        self.text = text
        self.names: list[str] = []
        self.depth = 0

    def unexpected(self) -> ExpressionError:
        return ExpressionError(f"{self.text!r} is no expression")

    def take(self, *signs: str) -> str:
        """The next token, where it is one of these; "" otherwise."""
        if self.tokens and self.tokens[-1][0] != "text" and self.tokens[-1][1] in signs:
            return self.tokens.pop()[1]
        return ""

    def need(self, sign: str) -> None:
        if not self.take(sign):
            raise self.unexpected()

    def choice(self) -> _Node:
        self.depth += 1
        if self.depth > DEEPEST:
            raise ExpressionError(f"{self.text!r} is nested too deeply")
        then = self.either()
        if self.take("if"):
            condition = self.either()
            self.need("else")
            then = _choice(condition, then, self.choice())
        self.depth -= 1
        return then

    def either(self) -> _Node:
        parts = [self.both()]
        while self.take("or"):
            parts.append(self.both())
        return parts[0] if len(parts) == 1 else lambda fields: any(part(fields) for part in parts)

    def both(self) -> _Node:
        parts = [self.negation()]
        while self.take("and"):
            parts.append(self.negation())
        return parts[0] if len(parts) == 1 else lambda fields: all(part(fields) for part in parts)

    def negation(self) -> _Node:
        turned = False
        while self.take("not"):
            turned = not turned
        node = self.comparison()
        return (lambda fields: not node(fields)) if turned else node

    def comparison(self) -> _Node:
        left = self.sum()
        if sign := self.take(*_COMPARISONS):
            return _comparison(sign, left, self.sum())
        if self.take("in"):
            return _member(left, self.sum(), wanted=True)
        if self.take("not"):
            self.need("in")
            return _member(left, self.sum(), wanted=False)
        return left

    def sum(self) -> _Node:
        left = self.product()
        while sign := self.take("+", "-"):
            left = _arithmetic(sign, left, self.product())
        return left

    def product(self) -> _Node:
        left = self.item()
        while sign := self.take("*", "//", "%"):
            left = _arithmetic(sign, left, self.item())
        return left

    def item(self) -> _Node:
        node = self.atom()
        while self.take("["):
            node = _item(node, self.choice())
            self.need("]")
        return node

    def atom(self) -> _Node:
        if not self.tokens:
            raise self.unexpected()
        kind, word = self.tokens.pop()
        if kind == "number":
            if len(word) > len(str(LARGEST)) or int(word) >= LARGEST:
                raise ExpressionError(f"{self.text!r} holds a number of 2**62 or more")
            return _constant(int(word))
        if kind == "text":
            return _constant(word[1:-1])
        if word == "(":
            node = self.choice()
            self.need(")")
            return node
        if word == "-":
            return _arithmetic("-", _constant(0), self.item())
        if kind != "name":
            raise self.unexpected()
        if word in _CONSTANTS:
            return _constant(_CONSTANTS[word])
        if word in _FUNCTIONS:
            return self.call(word)
        if word in _WORDS:
            raise self.unexpected()
        self.names.append(word)
        return _field(word)

    def call(self, word: str) -> _Node:
        self.need("(")
        arguments = [self.choice()]
        while self.take(","):
            arguments.append(self.choice())
        self.need(")")
        function, one = _FUNCTIONS[word]
        if one != (len(arguments) == 1):
            raise self.unexpected()
        return lambda fields: function([argument(fields) for argument in arguments])


# ---------------------------------------------------------------- what the parts do


def _constant(value: Value) -> _Node:
    return lambda fields: value


def _field(name: str) -> _Node:
    def value(fields: Mapping[str, Value]) -> Value:
        try:
            return fields[name]
        except KeyError:
            raise ExpressionError(f"{name} is not given") from None

    return value


def _choice(condition: _Node, then: _Node, otherwise: _Node) -> _Node:
    return lambda fields: then(fields) if condition(fields) else otherwise(fields)


_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}


def _comparison(sign: str, left: _Node, right: _Node) -> _Node:
    compare = _COMPARISONS[sign]
    if sign in ("==", "!="):
        return lambda fields: compare(_plain(left(fields)), _plain(right(fields)))  # type: ignore[arg-type]
    return lambda fields: compare(_number(left(fields), sign), _number(right(fields), sign))


def _member(left: _Node, right: _Node, wanted: bool) -> _Node:
    def found(fields: Mapping[str, Value]) -> bool:
        item, values = left(fields), right(fields)
        if isinstance(values, str) and isinstance(item, str):
            return (item in values) is wanted
        if values is None:
            return not wanted
        if not isinstance(values, (list, tuple)) or len(values) > _LONGEST_LIST:
            raise ExpressionError(f"{_shown(values)} is no list to look in")
        return (_plain(item) in values) is wanted

    return found


def _arithmetic(sign: str, left: _Node, right: _Node) -> _Node:
    def value(fields: Mapping[str, Value]) -> Value:
        a, b = _number(left(fields), sign), _number(right(fields), sign)
        if sign in ("//", "%") and b == 0:
            raise ExpressionError(f"{_shown(a)} {sign} 0 has no value")
        if sign == "+":
            result = a + b
        elif sign == "-":
            result = a - b
        elif sign == "*":
            result = a * b
        elif sign == "//":
            result = a // b
        else:
            result = a % b
        return _number(result, sign)

    return value


def _item(values: _Node, at: _Node) -> _Node:
    def item(fields: Mapping[str, Value]) -> Value:
        found, index = values(fields), at(fields)
        if not isinstance(found, (list, tuple, str)) or not isinstance(index, int):
            raise ExpressionError(f"{_shown(found)} has no item {_shown(index)}")
        if not -len(found) <= index < len(found):
            raise ExpressionError(f"a list of {len(found):,} has no item {index}")
        return found[index]

    return item


def _length(values: list[Value]) -> int:
    if not isinstance(values[0], (list, tuple, dict, str)):
        raise ExpressionError(f"{_shown(values[0])} has no length")
    return len(values[0])


_CONSTANTS: Mapping[str, Value] = {"true": True, "false": False, "none": None}

_FUNCTIONS: Mapping[str, tuple[Callable[[list[Value]], Value], bool]] = {
    "max": (lambda values: max(_number(value, "max") for value in values), False),
    "min": (lambda values: min(_number(value, "min") for value in values), False),
    "len": (_length, True),
    "int": (lambda values: int(_number(values[0], "int")), True),
}
"""Name -> what it does, and whether it takes one argument instead of several."""


def _number(value: Value, sign: str) -> int | float:
    """The value, where it is a number of this side of 2**62."""
    if isinstance(value, (int, float)):
        if -LARGEST < value < LARGEST:
            return value
        if isinstance(value, int) or math.isfinite(value):
            raise ExpressionError("a number of 2**62 or more")
    raise ExpressionError(f"{_shown(value)} is no number for {sign}")


def _plain(value: Value) -> Value:
    """The value, where comparing it costs nothing."""
    if isinstance(value, (list, tuple, dict)):
        raise ExpressionError(f"{_shown(value)} is no number or text to compare")
    return value


def _shown(value: Value) -> str:
    if isinstance(value, (list, tuple, dict)):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value):,}"
    if isinstance(value, int) and not -LARGEST < value < LARGEST:
        return "a number of 2**62 or more"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
