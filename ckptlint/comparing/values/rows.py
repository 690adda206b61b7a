"""Compares rows of a tensor with expected rows, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

_TILE = 2**20  # elements of a side that are compared at once

_Expected = TypeVar("_Expected")
_Actual = TypeVar("_Actual")


def tall(width: int) -> int:
    """Number of rows with this many columns that are compared at once."""
    return max(_TILE // max(width, 1), 1)


def row_ranges(first: int, last: int, width: int) -> Iterator[tuple[int, int]]:
    """The rows [first, last) of so many columns in runs that are compared at once."""
    for start in range(first, last, tall(width)):
        yield start, min(start + tall(width), last)


def compare_rows(
    rows: Iterable[tuple[int, int]],
    expected: Callable[[int, int], _Expected | None],
    actual: Callable[[int, int], _Actual | None],
    see: Callable[[int, _Expected, _Actual], None],
) -> bool:
    """Whether all rows could be read of both, or AccessError.

    Args:
        expected, actual: (first, last) -> what these rows should hold, and what they hold; None for unreadable ones.
        see: is called with the first row of each run and both.
    """
    for first, last in rows:
        wanted, stored = expected(first, last), actual(first, last)
        if wanted is None or stored is None:
            return False
        see(first, wanted, stored)
    return True
