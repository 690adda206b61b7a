"""Numbers and texts of a configuration that know where they come from: what a constructor computes is read, not fitted.

A model is built on the meta device from a configuration whose fields are such values. Each is a plain number or text to
all code, and each operation on it writes down what its result is (`hidden_size // num_attention_heads`), what was
compared with it and what was divided by it. The shape of a parameter is looked up by value among all that was computed,
so code that turns a size into a plain number loses nothing. Sizes are drawn anew for each build, and only what holds in
all builds counts.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable
from typing import Any

LONGEST = 160
"""Characters of an expression; a longer one is no size of a tensor."""

KEPT = 200
"""Expressions kept for one value."""


class Log:
    """What one build computed.

    Attributes:
        texts: whole number -> the expressions that it is the value of.
        compared: expression -> what it was compared with, numbers, texts and other expressions.
        divided: pairs of expressions, the second of which divided the first.
        read: fields that the constructor asked its configuration for.
        asked: fields that it asked for and no configuration declares.
        keys: fields whose text it looked up in a mapping.
    """

    def __init__(self) -> None:
        self.texts: dict[int, dict[str, None]] = defaultdict(dict)
        self.compared: dict[str, set[Any]] = defaultdict(set)
        self.divided: set[tuple[str, str]] = set()
        self.read: set[str] = set()
        self.asked: set[str] = set()
        self.keys: set[str] = set()


LOG = Log()


def fresh() -> Log:
    """Begins a new log."""
    global LOG
    LOG = Log()
    return LOG


def made(value: Any, text: str) -> Any:
    """A number that an expression gave, which knows this."""
    if len(text) > LONGEST or isinstance(value, (bool, complex)):
        return value
    if isinstance(value, float):
        return Real(value, text)
    known = LOG.texts[value]
    if len(known) < KEPT:
        known[text] = None
    return Int(value, text)


def text_of(value: Any) -> str:
    """The expression of a value; a plain whole number that was computed before is taken for that, a small one not."""
    if isinstance(value, (Int, Real)):
        return value.text
    if type(value) is int and value > 100 and value in LOG.texts:
        return min(LOG.texts[value], key=lambda text: (len(text), text))
    return repr(value)


def _part(text: str) -> str:
    return text if text.replace("_", "").replace(".", "").replace("[", "").replace("]", "").isalnum() else f"({text})"


def _two(sign: str, function: Callable[[Any, Any], Any], turned: bool = False) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        a, b = (other, self) if turned else (self, other)
        result = function(_plain(a), _plain(b))
        left, right = text_of(a), text_of(b)
        if sign in ("//", "/", "%"):
            LOG.divided.add((left, right))
        if (sign, right) in (("*", "1"), ("//", "1"), ("+", "0"), ("-", "0"), ("**", "1")):
            return made(result, left)
        if (left, sign) in (("1", "*"), ("0", "+")):
            return made(result, right)
        return made(result, f"{_part(left)} {sign} {_part(right)}")

    return method


def _compare(function: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return function is operator.ne if function in (operator.eq, operator.ne) else NotImplemented
        LOG.compared[self.text].add(other.text if isinstance(other, (Int, Real)) else other)
        if isinstance(other, (Int, Real)):
            LOG.compared[other.text].add(self.text)
        return function(_plain(self), _plain(other))

    return method


def _plain(value: Any) -> Any:
    if isinstance(value, Int):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, Real) else value


def _one(name: str, function: Callable[[Any], Any]) -> Callable[..., Any]:
    def method(self: Any, *digits: Any) -> Any:
        return made(function(_plain(self)), f"{name}({self.text})") if not digits else function(_plain(self))

    return method


class _Tagged:
    text: str

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __copy__(self) -> Any:
        return self

    def __bool__(self) -> bool:
        LOG.compared[self.text].add(0)
        return _plain(self) != 0

    for _name, _sign, _function in (
        ("add", "+", operator.add),
        ("sub", "-", operator.sub),
        ("mul", "*", operator.mul),
        ("floordiv", "//", operator.floordiv),
        ("truediv", "/", operator.truediv),
        ("mod", "%", operator.mod),
        ("pow", "**", operator.pow),
    ):
        locals()[f"__{_name}__"] = _two(_sign, _function)
        locals()[f"__r{_name}__"] = _two(_sign, _function, turned=True)
    for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
        locals()[f"__{_name}__"] = _compare(getattr(operator, _name))


class Int(_Tagged, int):
    """A whole number of an expression."""

    def __new__(cls, value: int, text: str) -> Int:
        self = int.__new__(cls, value)
        self.text = text
        return self

    def __reduce__(self) -> Any:
        return int, (_plain(self),)

    __hash__ = int.__hash__


class Real(_Tagged, float):
    """A fraction of an expression."""

    def __new__(cls, value: float, text: str) -> Real:
        self = float.__new__(cls, value)
        self.text = text
        return self

    def __reduce__(self) -> Any:
        return float, (_plain(self),)

    def __int__(self) -> int:
        return _plain(made(int(_plain(self)), f"int({self.text})"))

    __hash__ = float.__hash__
    __ceil__ = _one("ceil", math.ceil)
    __floor__ = _one("int", math.floor)
    __trunc__ = _one("int", math.trunc)
    __round__ = _one("round", round)


class Text(str):
    """A text of a field, which knows what it was compared with."""

    field: str

    def __new__(cls, value: str, field: str) -> Text:
        self = str.__new__(cls, value)
        self.field = field
        return self

    def __eq__(self, other: object) -> bool:
        if type(other) is str:
            LOG.compared[self.field].add(other)
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce__(self) -> Any:
        return str, (str.__str__(self),)

    def __hash__(self) -> int:
        LOG.keys.add(self.field)
        return str.__hash__(self)


def tagged(value: Any, field: str) -> Any:
    """The value of a field, and the items of a list, with their names; what has one keeps it."""
    if isinstance(value, (Int, Real)):
        made(_plain(value), field)
    elif type(value) in (int, float):
        return made(value, field)
    elif type(value) is str:
        return Text(value, field)
    elif isinstance(value, (list, tuple)) and len(value) < 200:
        made(len(value), f"len({field})")
        return type(value)(tagged(item, f"{field}[{i}]") for i, item in enumerate(value))
    return value


class _Kept(type):
    def __call__(cls, value: Any = 0, *base: Any) -> Any:
        if isinstance(value, (Int, Real)) and not base:
            return value if isinstance(value, Int) else made(int(_plain(value)), f"int({value.text})")
        return int(value, *base)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, int)


class Whole(int, metaclass=_Kept):
    """`int` for the modules of a library: its result still knows where it comes from."""
