"""Where two copies differ first: their holders narrow it down by digests of parts, and name the two values.

Collective: all ranks take part in every broadcast, and what comes next depends on what was broadcast alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import ceil
from typing import Any

import numpy as np

from ckptlint.live.compare.group import RankGroup
from ckptlint.model.text import printable, shape_text
from ckptlint.model.tiling import Box, IntArray

_PARTS = 256
_TEXT_WORDS = 16
_PLAIN = (bool, int, float, complex, str, type(None))


def first_difference(group: RankGroup, holders: tuple[int, int], mine: Any, box: Box | None) -> str:
    """Where the copies of two ranks differ first in row-major order, and their values; "" when unknown.

    Args:
        mine: what this rank holds, a torch.Tensor or the value of an object; read on the holders alone.
        box: the chunk, None for an object.
    """
    held = mine if group.rank in holders else None
    at = ""
    if box is not None:
        held = _shaped(held, box.sizes)
        place = _narrowed(group, holders, held, box.sizes)
        if place is None:
            return ""
        index = [start + i for start, i in zip(box.offsets, place, strict=True)]
        at = f"first difference at {shape_text(index)}" if index else ""  # of a scalar there is one value
        held = None if held is None else held[tuple(place)]
    words = _value(held)
    first, second = (text_in(group.broadcast(words, rank)) for rank in holders)
    values = f"{first} against {second}" if first and second else ""
    return ": ".join(filter(None, [at, values]))


def _shaped(data: Any, sizes: Sequence[int]) -> Any:
    """The tensor with the axes of its chunk (a save adds axes of size 1); None where it has other elements."""
    import torch

    from ckptlint.live.collect.tensor_digest import freed_bytes, wraps_others

    if not isinstance(data, torch.Tensor) or wraps_others(type(data)) or freed_bytes(data):
        return None
    data = data.detach().as_subclass(torch.Tensor)
    return data.reshape(tuple(sizes)) if data.numel() == int(np.prod(sizes, dtype=object)) else None


def _narrowed(group: RankGroup, holders: tuple[int, int], held: Any, sizes: Sequence[int]) -> list[int] | None:
    """The place in the chunk of the first element that differs; None when a holder could not look."""
    place: list[int] = []
    left = held
    for axis, size in enumerate(sizes):
        start, count = 0, size
        while count > 1:
            step = ceil(count / _PARTS)
            words = _digests(left, axis, range(start, start + count, step), start + count)
            first, second = (group.broadcast(words, rank) for rank in holders)
            differing = np.flatnonzero(first[1:] != second[1:])
            if not (first[0] and second[0] and len(differing)):
                return None
            at = start + int(differing[0]) * step
            start, count = at, min(step, start + count - at)
        place.append(start)
        left = None if left is None else left.narrow(axis, start, 1)
    return place


def _digests(held: Any, axis: int, starts: range, stop: int) -> IntArray:
    """int64 [1 + n], whether there are digests, and those of the parts of an axis."""
    from ckptlint.live.collect.tensor_digest import word_digests

    words = np.zeros(1 + len(starts), np.int64)
    if held is not None:
        with suppress(Exception):  # out of memory, say: the other ranks wait for this one
            digests, known = word_digests([held.narrow(axis, at, min(starts.step, stop - at)) for at in starts])
            words[0], words[1:] = known.all(), digests
    return words


def _value(held: Any) -> IntArray:
    """int64 [16], an element or a plain value as text; zeros where it takes more than 128 bytes, or has no text."""
    import torch

    text = ""
    with suppress(Exception):  # no values, or too many digits: the other ranks wait for this one
        if isinstance(held, torch.Tensor):
            value = held.cpu()
            # numpy prints a float as shortly as its dtype allows; it does not know the small ones
            text = str(value.numpy()[()] if value.dtype in (torch.float16, torch.float32) else value.item())
        elif type(held) in _PLAIN:
            text = repr(held)
    data, size = text.encode("utf-8", "backslashreplace"), 8 * _TEXT_WORDS
    return np.frombuffer(data.ljust(size, b"\0") if len(data) <= size else bytes(size), np.int64)


def text_in(words: IntArray) -> str:
    """The text that fills the first of these words."""
    return printable(words.tobytes().rstrip(b"\0").decode("utf-8", "ignore"))
