"""JSON from untrusted files: no name twice, no number that is none, sizes and names within limits."""

from __future__ import annotations

import json
from math import prod
from typing import Any

from ckptlint.errors import LimitError, UnreadableError
from ckptlint.formats.pointers import pointer_in
from ckptlint.model import KEY_LIMIT, RANK_LIMIT
from ckptlint.model.text import printable
from ckptlint.model.tiling import COORDINATE_LIMIT


def json_object(text: bytes) -> dict[str, Any]:
    """A JSON object, in which no name stands twice.

    Raises:
        UnreadableError: the text is anything else; the message goes behind the name of what it was read from.
    """
    try:
        document = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(pointer_in(text) or why_no_json(error), 8) from None
    if not isinstance(document, dict):
        raise UnreadableError("holds no JSON object", 8)
    return document


def why_no_json(error: ValueError | RecursionError) -> str:
    """Why a text is not read as JSON, as the end of a sentence."""
    if isinstance(error, RecursionError):
        return "is nested too deeply to be read"
    if "set_int_max_str_digits" in str(error):
        return "holds a number of too many digits to be read"
    return f"is not valid JSON ({printable(str(error))[:120]})"


def checked_shape(name: str, value: Any) -> tuple[int, ...]:
    """The shape of a key, from JSON.

    Raises:
        UnreadableError: it is no list of sizes.
        LimitError: the key or the list is too long, or the elements do not fit 64 bits.
    """
    shown = printable(checked_key(name))
    if not isinstance(value, list) or not all(is_size(size) for size in value):
        raise UnreadableError(f"has a shape of {shown} that is not a list of sizes", 8)
    if len(value) > RANK_LIMIT or prod(value) >= 2**63:
        raise LimitError(f"has a shape of {shown} with {len(value)} dims whose elements do not fit 64 bits")
    return tuple(value)


def checked_key(name: str) -> str:
    """The key itself.

    Raises:
        LimitError: it has more than `KEY_LIMIT` characters.
    """
    if len(name) > KEY_LIMIT:
        raise LimitError(f"has a key of {len(name):,} characters, the limit is {KEY_LIMIT:,}")
    return name


def is_size(value: Any) -> bool:
    """Whether a value is a number of elements or bytes."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < COORDINATE_LIMIT


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        raise ValueError("one object repeats a name")
    for name in document:
        if not name.isascii():
            name.encode()  # a lone surrogate is a ValueError: no other reader takes it
    return document


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a number")
