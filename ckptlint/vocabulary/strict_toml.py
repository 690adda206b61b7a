"""Files of data that come with ckptlint: TOML that has the entries of a class, each of its type, and no others."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args, get_type_hints

from ckptlint.errors import OwnFileError
from ckptlint.patterns import lazy_pattern

Made = TypeVar("Made")


def own_file(path: Path, read: Callable[[str], Made]) -> Made:
    """What `read` makes of a file of ckptlint itself; raises OwnFileError where it is missing, or broken."""
    try:
        return read(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OwnFileError(f"ckptlint's own file {path} is missing: install ckptlint again") from None
    except (OSError, ValueError) as error:
        raise OwnFileError(f"ckptlint's own file {path} is broken: install ckptlint again ({error})") from error


def toml_table(file: str, text: str) -> dict[str, Any]:
    """The entries of a file; raises ValueError, with its name, where this is no TOML."""
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def made_of(kind: type[Made], file: str, table: Mapping[str, Any], **given: Any) -> Made:
    """The dataclass or named tuple of a file, each entry of its annotated type: lists as tuples, strings as patterns.

    The file may not state what is `given`. Raises ValueError, with file and place, for an entry that nobody knows, one
    that is missing, or a value of another form.
    """
    try:
        return cast(Made, _made(kind, table, "", given))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from None


def _made(kind: Any, table: Any, place: str, given: Mapping[str, Any]) -> Any:
    if not isinstance(table, dict):
        raise ValueError(f"{place} is no table")
    known = {name: entry for name, entry in _entries(kind).items() if name not in given}
    place += "." * bool(place)
    if unknown := table.keys() - known.keys():
        raise ValueError(f"{place}{sorted(unknown)[0]} is no entry that is known")
    if missing := {name for name, (_, is_needed) in known.items() if is_needed} - table.keys():
        raise ValueError(f"{place}{sorted(missing)[0]} is missing")
    return kind(**given, **{name: _value(known[name][0], value, f"{place}{name}") for name, value in table.items()})


@cache
def _entries(kind: Any) -> dict[str, tuple[Any, bool]]:
    """The annotation of each field of a dataclass or a named tuple, and whether the field has no default."""
    if issubclass(kind, tuple):
        needed = set(kind._fields) - kind._field_defaults.keys()
    else:
        needed = {item.name for item in fields(kind) if item.default is MISSING and item.default_factory is MISSING}
    return {name: (hint, name in needed) for name, hint in get_type_hints(kind).items()}


def _value(kind: Any, value: Any, place: str) -> Any:
    """A TOML value as the annotated kind of its field; any other is an error that names the place."""
    arguments, origin = get_args(kind), getattr(kind, "__origin__", None)
    if type(None) in arguments:
        return _value(arguments[0], value, place)
    if origin is tuple and isinstance(value, list):
        return tuple(_value(arguments[0], item, f"{place}[{number}]") for number, item in enumerate(value))
    if origin is Mapping and isinstance(value, dict):
        return {key: _value(arguments[1], item, f"{place}.{key}") for key, item in value.items()}
    if origin is re.Pattern and isinstance(value, str):
        return lazy_pattern(value)
    if origin is Literal and value in arguments:
        return value
    if isinstance(kind, type) and (hasattr(kind, "__dataclass_fields__") or hasattr(kind, "_fields")):
        return _made(kind, value, place, {})
    if isinstance(kind, type) and type(value) is kind:
        return value
    raise ValueError(f"{place} is {value!r}, which is not what belongs there")
