"""What a pickle may name and call: `calls.toml`, exact names with the shape of the arguments that real files give them.

A name that is not in the table is unknown, or refused where it is known to do more than make data or may be.
"""

from __future__ import annotations

import _compat_pickle
import ast
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ckptlint.patterns import lazy_pattern
from ckptlint.vocabulary.strict_toml import own_file

CALLS_FILE = "calls.toml"

Pair = tuple[str, str]
Standing = Literal["unknown", "refused"]
Fits = Callable[[Any], bool]
"""Whether a value, or a tuple of arguments, has the shape that it must have."""


class CallRow(NamedTuple):
    """An entry of the table, for one name; `calls.toml` says what each field means.

    `call` and `new` tell whether arguments fit a call, and an object that is made without one; `state` what BUILD may
    be given; `touches` whether the object may look at what its state holds.
    """

    call: Fits
    new: Fits
    state: Fits
    touches: bool
    items: bool
    gives: str
    sort: str
    members: bool


class CallTable(NamedTuple):
    """`calls.toml` as it was read."""

    rows: Mapping[Pair, CallRow]  # by module and name
    storage: Fits  # the shape of the persistent id of a storage
    closed: frozenset[str]  # packages whose other names are refused
    open: tuple[str, ...]  # beginnings of classes in closed packages that may be made and filled with data
    refused: tuple[str, ...]  # beginnings of names with dots that are refused
    tensor: frozenset[str]  # what a tensor has beside the attributes that a program gives it


def never(_: Any) -> bool:
    """The shape that nothing has."""
    return False


def always(_: Any) -> bool:
    """The shape that everything has."""
    return True


def is_nothing(args: Any) -> bool:
    """The shape of no arguments."""
    return not args


@cache
def call_table() -> CallTable:
    """The table that comes with ckptlint.

    Raises:
        OwnFileError: the file is missing, or has a mistake in an entry.
    """
    return own_file(Path(__file__).with_name(CALLS_FILE), parse_calls)


_LISTS = ("closed", "open", "refused", "tensor")
_FIELDS: dict[str, Callable[[Any], bool]] = {
    "names": lambda value: isinstance(value, str) or _is_texts(value),
    "source": lambda value: isinstance(value, str) and bool(value),
    "call": lambda value: _is_texts(value),
    "new": lambda value: _is_texts(value),
    "state": lambda value: isinstance(value, str),
    "items": lambda value: value is True,
    "gives": lambda value: isinstance(value, str) and value.isidentifier(),
    "as": lambda value: isinstance(value, str) and value.isidentifier(),
    "members": lambda value: value is True,
}
"""The fields of an entry, and what each may hold."""


def parse_calls(text: str) -> CallTable:
    """The table that a text says; every field is checked.

    Raises:
        ValueError: a field is missing, unknown, of another type or says nothing that can be understood.
    """
    data = tomllib.loads(text)
    entries = data.get("calls")
    if data.keys() != {"storage", *_LISTS, "calls"} or not isinstance(entries, list):
        raise ValueError(f"{CALLS_FILE} needs storage, {', '.join(_LISTS)} and calls, and nothing else")
    words = {str(entry["gives"]): _gives(entry["gives"]) for entry in entries if "gives" in entry}
    words |= {str(entry["as"]): _named(entry["as"]) for entry in entries if "as" in entry}
    words |= {"stranger": _named("stranger")} | _PRIMITIVE
    rows: dict[Pair, CallRow] = {}
    for number, entry in enumerate(entries, 1):
        try:
            row = _row(entry, words)
            for pair in _pairs(entry["names"]):
                if rows.setdefault(pair, row) is not row:
                    raise ValueError(f"{'.'.join(pair)} stands in the table twice")
        except ValueError as error:
            raise ValueError(f"{CALLS_FILE}, entry {number} ({str(entry.get('names'))[:60]}): {error}") from None
    storage = _arguments(data["storage"], words)
    closed, opened, refused, tensor = (data[name].split() for name in _LISTS)
    return CallTable(rows, storage, frozenset(closed), tuple(opened), tuple(refused), frozenset(tensor))


def _row(entry: dict[str, Any], words: Mapping[str, Fits]) -> CallRow:
    """A row of the table of names, from its entry in `calls.toml`."""
    for field in entry.keys() | {"names", "source"}:
        if field not in _FIELDS or not _FIELDS[field](entry.get(field)):
            raise ValueError(f"the field {field} is missing, unknown or of a wrong kind")
    state = entry.get("state", "")
    fits = _arguments(state, words) if state else never  # BUILD has one argument
    return CallRow(
        call=_any_of([_arguments(shape, words) for shape in entry.get("call", ())]),
        new=_any_of([_arguments(shape, words) for shape in entry.get("new", ())]),
        state=lambda value: fits((value,)),
        touches=state != "kept",
        items="items" in entry,
        gives=entry.get("gives", ""),
        sort=entry.get("as", ""),
        members="members" in entry,
    )


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)


def _pairs(names: str | list[str]) -> Iterator[Pair]:
    """The names of `"module, module: name name"`."""
    for line in [names] if isinstance(names, str) else names:
        modules, _, listed = line.partition(":")
        pairs = [(module.strip(), name) for module in modules.split(",") for name in listed.split()]
        if not pairs or not all(is_importable(module, name.replace(".", "_")) for module, name in pairs):
            raise ValueError(f"{line[:60]!r} is not 'modules: names'")
        yield from pairs


# ---------------------------------------------------------------- shapes


def _is(kind: type) -> Fits:
    return lambda value: type(value) is kind


def _gives(word: str) -> Fits:
    return lambda value: getattr(type(value), "gives", "") == word


def _named(word: str) -> Fits:
    """One of these names, or a refused one, which is reported anyway."""
    return lambda value: isinstance(value, type) and getattr(value, "sort", "") in (word, "refused")


def _is_attributes(value: Any) -> bool:
    """A dict by text, or that and one for slots, which `setattr` sets: no name there may be one of Python's own."""
    if type(value) is dict:
        return all(type(name) is str for name in value)
    if type(value) is not tuple or len(value) != 2 or not all(item is None or type(item) is dict for item in value):
        return False
    slots = value[1] or {}
    return all(map(_is_attributes, filter(None, value))) and not any(name.startswith("__") for name in slots)


def is_plain_data(value: Any) -> bool:
    """Whether a value is data to the bottom: numbers, texts, bytes, containers, and objects that are data."""
    stack, seen = [value], set()
    while stack:
        item = stack.pop()
        kind = type(item)
        if kind in (list, tuple, dict, set, frozenset):
            if id(item) not in seen:
                seen.add(id(item))
                stack += [*item.keys(), *item.values()] if kind is dict else item
        elif isinstance(item, str) or item is None:
            continue
        elif kind not in (bool, int, float, bytes) and not getattr(kind, "gives", ""):
            return False
    return True


def _matches(pattern: str) -> Fits:
    regex = lazy_pattern(pattern)
    return lambda value: type(value) is str and regex.fullmatch(value) is not None


def _is_apart(value: Any) -> bool:
    """Attributes none of which is one of those that a tensor has by itself, so that setting them changes no value."""
    dicts = value if type(value) is tuple else (value,)
    return _is_attributes(value) and not any(name in call_table().tensor for item in dicts if item for name in item)


_PRIMITIVE: dict[str, Fits] = {
    "any": always,
    "none": lambda value: value is None,
    "flag": _is(bool),
    "int": _is(int),
    "float": _is(float),
    "number": lambda value: type(value) in (int, float),
    "text": lambda value: isinstance(value, str),
    "bytes": lambda value: type(value) is bytes or getattr(type(value), "gives", "") == "bytes",
    "buffer": lambda value: type(value) is bytearray or getattr(type(value), "gives", "") == "buffer",
    "list": _is(list),
    "tuple": _is(tuple),
    "dict": _is(dict),
    "mapping": lambda value: isinstance(value, dict),
    "ints": lambda value: type(value) is tuple and all(type(item) is int for item in value),
    "pairs": lambda value: (
        type(value) is list and all(type(item) in (tuple, list) and len(item) == 2 for item in value)
    ),
    "plain": is_plain_data,
    "ratio": _matches(r"-?\d{1,4000}(/\d{1,4000})?"),
    "decimal": _matches(r"-?(\d{1,4000}(\.\d{1,4000})?(E[+-]?\d{1,6})?|s?NaN\d{0,4000}|Infinity)"),
    "numpy_code": _matches(r"[biufcOSUVMm]\d{1,9}"),
    "attributes": _is_attributes,
    "apart": _is_apart,
    "kept": _is_attributes,
}


def _arguments(text: str, words: Mapping[str, Fits]) -> Fits:
    """The shape of the arguments that a text says, which Python's own parser reads: `A, B | C, [D]`."""
    if not text:
        return is_nothing
    try:
        made = ast.parse(f"({text},)", mode="eval").body
    except SyntaxError:
        raise ValueError(f"{text!r} is no shape") from None
    return _sequence(made.elts if isinstance(made, ast.Tuple) else [made], words)


def _sequence(nodes: list[ast.expr], words: Mapping[str, Fits]) -> Fits:
    """Whether values fit a list of shapes: needed ones, then optional ones, then one that repeats."""
    kinds = [1 if isinstance(node, ast.List) else 2 if isinstance(node, ast.Starred) else 0 for node in nodes]
    if kinds != sorted(kinds) or kinds.count(2) > 1:
        raise ValueError("what may be left out, and then what may repeat, must stand at the end")
    least, most = kinds.count(0), len(nodes) - kinds.count(2)
    shapes = [_shape(node.elts[0] if isinstance(node, ast.List) else node, words) for node in nodes[:most]]
    rest = _shape(node.value, words) if nodes and isinstance(node := nodes[-1], ast.Starred) else never

    def fits(values: Any) -> bool:
        if not least <= len(values) <= most:
            return len(values) > most and rest is not never and fits(values[:most]) and all(map(rest, values[most:]))
        for shape, value in zip(shapes, values):  # noqa: B905, SIM110  what may be left out is; a loop is faster
            if not shape(value):
                return False
        return True

    return fits


def _shape(node: ast.expr, words: Mapping[str, Fits]) -> Fits:
    match node:
        case ast.Name(word) if word in words:
            return words[word]
        case ast.Constant(str(text)):
            return lambda value: type(value) is str and value == text
        case ast.BinOp(left, ast.BitOr(), right):
            first, second = _shape(left, words), _shape(right, words)
            return lambda value: first(value) or second(value)
        case ast.Tuple(parts):
            inner = _sequence(parts, words)
            return lambda value: type(value) is tuple and inner(value)
    raise ValueError(f"{ast.unparse(node)} is no shape or word of the table")


def _any_of(shapes: list[Fits]) -> Fits:
    return shapes[0] if len(shapes) == 1 else lambda value: any(shape(value) for shape in shapes)


# ---------------------------------------------------------------- names that are not in the table

_WORD = lazy_pattern(r"[\w-]{0,64}")


def of_python_3(module: str, name: str) -> Pair:
    """The name that `pickle` looks up for one of Python 2."""
    module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
    return _compat_pickle.IMPORT_MAPPING.get(module, module), name


def standing(module: str, name: str) -> Standing:
    """What a name is that is not in the table.

    From protocol 4 on pickle takes a name with dots apart and reads attributes of what it finds, so that
    `("numpy.dtypes", "__loader__.set_data")` is a function: such names are refused before anything else.
    """
    package = module.partition(".")[0]
    if not is_importable(module, name) or "__main__" in module.split("."):
        return "refused"
    whole = f"{module}.{name}"
    if package in sys.stdlib_module_names or package in call_table().closed:
        return "unknown" if whole.startswith(call_table().open) and is_class(name) else "refused"
    return "refused" if whole.startswith(call_table().refused) else "unknown"


def is_importable(module: str, name: str) -> bool:
    """Whether module and name are made of identifiers, and the name is one."""
    return name.isidentifier() and all(word.isidentifier() for word in module.split("."))


def is_class(name: str) -> bool:
    """Whether an unknown name is that of a class; one in lower case is taken for a function."""
    return name.rpartition(".")[2].lstrip("_")[:1].isupper()


def is_own_class(module: str, name: str) -> bool:
    """Whether an unknown name is a class of a package that is not closed: of a job, say."""
    return is_class(name) and module.partition(".")[0] not in call_table().closed


def may_call(module: str, name: str, args: tuple[Any, ...]) -> bool:
    """Whether a call of an unknown name with these arguments can be no more than that of an enum or an empty object."""
    return (
        is_own_class(module, name)
        and len(args) <= 1
        and all(type(arg) in (int, float, bool) or (isinstance(arg, str) and _WORD.fullmatch(arg)) for arg in args)
    )
