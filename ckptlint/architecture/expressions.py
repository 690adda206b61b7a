"""Sizes and conditions of a table as text, `num_key_value_heads * head_dim`: Python's grammar, evaluated here.

Numbers, texts, names of fields (with dots into sections), `true`, `false`, `none`, `+ - * / // % **`,
comparisons, `in`, `and`, `or`, `not`, `a if condition else b`, an item of a list `layer_types[layer]`, and `max`,
`min`, `len`, `int`, `ceil`, `round`. Nothing else of the grammar means anything, and nothing grows without bound: texts
are short, nesting is shallow, and no result reaches 2**62.
"""

from __future__ import annotations

import ast
import math
import operator
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


class ExpressionError(Exception):
    """Raised where a text is no expression, or has no value for these fields; the message is one clause."""


class SizeError(ExpressionError):
    """A field whose number is no size."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed text; as a condition it holds where its value is true, as Python has it."""

    text: str
    names: tuple[str, ...]  # the fields that it may ask for, in the order of the text
    value: _Node  # fields -> the value; raises ExpressionError


@lru_cache(maxsize=4096)
def parse_expression(text: str) -> Expression:
    """The expression that a text means.

    Raises:
        ExpressionError: it means none, or is longer or deeper than any table needs.
    """
    if len(text) > LONGEST:
        raise ExpressionError(f"an expression of {len(text):,} characters")
    names: dict[str, None] = {}
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        node = _node(tree, names, DEEPEST)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise ExpressionError(f"{text!r} is no expression") from None
    return Expression(text, tuple(names), node)


def whole(expression: Expression, fields: Mapping[str, Value]) -> int:
    """The value as a size: an integer that is not negative.

    Raises:
        ExpressionError: it is something else.
    """
    value = expression.value(fields)
    if not isinstance(value, int) or not 0 <= value < LARGEST:
        # a null is often a word for "as that other field"; for a vocabulary there is no other
        is_null = value is None and expression.text.rpartition(".")[2] == "vocab_size"
        is_field = is_null or (type(value) is int and expression.text.isidentifier())
        shown = "null" if value is None else _shown(value)
        raise (SizeError if is_field else ExpressionError)(f"{expression.text} is {shown}, which is no size")
    return int(value)


def _node(tree: ast.expr, names: dict[str, None], depth: int) -> _Node:
    """What a part of an expression does. Raises ValueError where it is none."""
    if not depth:
        raise ExpressionError("an expression that is nested too deeply")

    def inner(expr: ast.expr) -> _Node:
        return _node(expr, names, depth - 1)

    match tree:
        case ast.Constant(value=int() | float() | str() as value) if not isinstance(value, bool):
            if not isinstance(value, str) and value >= LARGEST:
                raise ExpressionError("an expression that holds a number of 2**62 or more")
            return lambda fields: value
        case ast.Name(id=name) if name in CONSTANTS:
            constant = CONSTANTS[name]
            return lambda fields: constant
        case ast.Name() | ast.Attribute():
            field = _dotted(tree)
            names[field] = None
            return lambda fields: _value(fields, field)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            return _arithmetic(*_ARITHMETIC[type(op)], inner(left), inner(right))
        case ast.UnaryOp(op=ast.USub(), operand=part):
            return _arithmetic(*_ARITHMETIC[ast.Sub], lambda fields: 0, inner(part))
        case ast.UnaryOp(op=ast.Not(), operand=part):
            node = inner(part)
            return lambda fields: not node(fields)
        case ast.BoolOp(op=op, values=values):
            terms = [inner(expr) for expr in values]
            every = all if isinstance(op, ast.And) else any
            return lambda fields: every(term(fields) for term in terms)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            condition, then, otherwise = inner(test), inner(body), inner(orelse)
            return lambda fields: then(fields) if condition(fields) else otherwise(fields)
        case ast.Compare(left=left, ops=[ast.In() | ast.NotIn() as op], comparators=[right]):
            return _member(inner(left), inner(right), wanted=isinstance(op, ast.In))
        case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq() as op], comparators=[right]):
            return _equal(inner(left), inner(right), wanted=isinstance(op, ast.Eq))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
            sign, compare = _COMPARISONS[type(op)]
            low, high = inner(left), inner(right)
            return lambda fields: compare(_number(low(fields), sign), _number(high(fields), sign))
        case ast.Subscript(value=values, slice=at):
            return _item(inner(values), inner(at))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            function, takes_one = FUNCTIONS[name]
            if takes_one == (len(arguments) == 1):
                given = [inner(argument) for argument in arguments]
                return lambda fields: function([argument(fields) for argument in given])
    raise ValueError


def _dotted(tree: ast.expr) -> str:
    match tree:
        case ast.Name(id=name) if name not in CONSTANTS and name not in FUNCTIONS:
            return name
        case ast.Attribute(value=section, attr=name):
            return f"{_dotted(section)}.{name}"
    raise ValueError


def _value(fields: Mapping[str, Value], name: str) -> Value:
    try:
        return fields[name]
    except KeyError:
        raise ExpressionError(f"{name} is not given") from None


_COMPARISONS: Mapping[type[ast.cmpop], tuple[str, Callable[[float, float], bool]]] = {
    ast.LtE: ("<=", operator.le),
    ast.GtE: (">=", operator.ge),
    ast.Lt: ("<", operator.lt),
    ast.Gt: (">", operator.gt),
}


def _equal(left: _Node, right: _Node, wanted: bool) -> _Node:
    def equal(fields: Mapping[str, Value]) -> bool:
        a, b = left(fields), right(fields)
        return (a is b if a is None or b is None else _plain(a) == _plain(b)) is wanted

    return equal


def _member(left: _Node, right: _Node, wanted: bool) -> _Node:
    def member(fields: Mapping[str, Value]) -> bool:
        item, values = left(fields), right(fields)
        if isinstance(values, str) and isinstance(item, str):
            return (item in values) is wanted
        if values is None:
            return not wanted
        if not isinstance(values, (list, tuple)) or len(values) > _LONGEST_LIST:
            raise ExpressionError(f"{_shown(values)} is no list to look in")
        return (_plain(item) in values) is wanted

    return member


def _power(a: float, b: float) -> float:
    if isinstance(a, int) and isinstance(b, int) and 0 <= b < 64 and abs(a) < 2**32:
        return a**b  # type: ignore[no-any-return]
    raise ExpressionError(f"{_shown(a)} ** {_shown(b)} is no size")


_ARITHMETIC: Mapping[type[ast.operator], tuple[str, Callable[[float, float], float]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.FloorDiv: ("//", operator.floordiv),
    ast.Mod: ("%", operator.mod),
    ast.Pow: ("**", _power),
}


def _arithmetic(sign: str, function: Callable[[float, float], float], left: _Node, right: _Node) -> _Node:
    def value(fields: Mapping[str, Value]) -> Value:
        a, b = _number(left(fields), sign), _number(right(fields), sign)
        if sign in ("//", "%", "/") and b == 0:
            raise ExpressionError(f"{_shown(a)} {sign} 0 has no value")
        return _number(function(a, b), sign)

    return value


def _item(values: _Node, at: _Node) -> _Node:
    def item(fields: Mapping[str, Value]) -> Value:
        container, index = values(fields), at(fields)
        if not isinstance(container, (list, tuple, str)) or not isinstance(index, int):
            raise ExpressionError(f"{_shown(container)} has no item {_shown(index)}")
        if not -len(container) <= index < len(container):
            raise ExpressionError(f"a list of {len(container):,} has no item {index}")
        return container[index]

    return item


def _length(values: list[Value]) -> int:
    if not isinstance(values[0], (list, tuple, dict, str)):
        raise ExpressionError(f"{_shown(values[0])} has no length")
    return len(values[0])


CONSTANTS: Mapping[str, Value] = {"true": True, "false": False, "none": None}

FUNCTIONS: Mapping[str, tuple[Callable[[list[Value]], Value], bool]] = {
    "max": (lambda values: max(_number(value, "max") for value in values), False),
    "min": (lambda values: min(_number(value, "min") for value in values), False),
    "len": (_length, True),
    "int": (lambda values: int(_number(values[0], "int")), True),
    "ceil": (lambda values: math.ceil(_number(values[0], "ceil")), True),
    "round": (lambda values: round(_number(values[0], "round")), True),
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


def large(value: Value) -> str:
    """What a value is that is too large to be shown; "" for others."""
    if isinstance(value, (list, tuple, dict)):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value):,}"
    return "a number of 2**62 or more" if isinstance(value, int) and not -LARGEST < value < LARGEST else ""


def _shown(value: Value) -> str:
    text = large(value) or repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
