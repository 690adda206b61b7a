"""How far a long reading is, for whoever listens, across the fork too."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Listener = Callable[[str, int, int], None]
"""Called now and then with the unit (`records`, `bytes`), how many are done, and of how many."""

COUNTED = ("steps", "checkpoints")
"""Units of `counted`; what is read of one of them is told in the units of `UNITS` meanwhile."""

UNITS = ("", "chunks and records", "files", "records", "bytes")

_PLACE = struct.Struct("3q")
_listener: Listener | None = None
_T = TypeVar("_T")


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Have `tell` call the listener."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


def is_listened_to() -> bool:
    """Whether anybody wants to know."""
    return _listener is not None


def advance(unit: str, done: int, total: int) -> None:
    """Say how far the reading is; cheap, and nothing when nobody listens."""
    if _listener is not None:
        _listener(unit, done, total)


def counted(unit: str, things: Iterable[_T], total: int, before: int = 0) -> Iterator[_T]:
    """The things, while it is told how many of the total are done; `before` of them were before these."""
    advance(unit, before, total)
    for done, thing in enumerate(things, before + 1):
        yield thing
        advance(unit, done, total)


@contextmanager
def telling_ctrl_c(so_far: Callable[[], str]) -> Iterator[None]:
    """Have Ctrl-C say how far the whole work is, whatever it says of the piece of work that it stops.

    Raises:
        KeyboardInterrupt: Ctrl-C, with that sentence.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted: {so_far()}") from None


class Shared:
    """Three numbers that a forked child writes and its parent reads."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _PLACE.size)

    def write(self, unit: str, done: int, total: int) -> None:
        """The child's listener."""
        _PLACE.pack_into(self._memory, 0, UNITS.index(unit), done, total)

    def pass_on(self) -> None:
        """Pass on in the parent what the child said last."""
        unit, done, total = _PLACE.unpack_from(self._memory)
        if unit:
            advance(UNITS[unit], done, total)
