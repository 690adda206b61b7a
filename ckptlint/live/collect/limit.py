"""How long a rank may collect what it holds: the other ranks wait for it meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeVar

import numpy as np

from ckptlint.model.tiling import BoolArray

_T = TypeVar("_T")

_MOST_VALUES = 8_000_000  # an endless mapping fills the memory long before the time is over
_LARGE = 2**22  # elements
_MOST_EXPANDED = 2**30  # bytes


class OutOfTime(Exception):  # noqa: N818  what is the case
    """A rank did not collect what it holds within its limit; the text says so."""


@dataclass(slots=True)
class Limit:
    """How long a rank may collect, from now on.

    Attributes:
        seconds: for all of it; what the job's own code takes is not counted.
    """

    seconds: float = inf
    _until: float = field(init=False)
    _left: int = field(init=False)

    def __post_init__(self) -> None:
        self._until = time.monotonic() + self.seconds
        self._left = _MOST_VALUES

    def look(self) -> None:
        """Look at the clock; raises OutOfTime where no time is left."""
        if time.monotonic() > self._until:
            raise OutOfTime(f"its state could not be collected within {self.seconds:.3g} s")

    def within(self, values: Iterable[_T]) -> Iterator[_T]:
        """The values, as long as there is time; raises OutOfTime, also when there are too many."""
        for value in values:
            self._left -= 1
            if self._left < 0:
                raise OutOfTime(f"its state could not be collected: it has more than {_MOST_VALUES:,} values")
            self.look()
            yield value

    def extend(self, seconds: float) -> None:
        """Do not count these seconds."""
        self._until += seconds


def readable(tensors: Sequence[Any]) -> BoolArray:
    """bool [n], the tensors to read: not those expanded far beyond their memory, once they make up 1 GiB."""
    import torch

    left, is_readable = _MOST_EXPANDED, np.ones(len(tensors), bool)
    for number, tensor in enumerate(tensors):
        if tensor.numel() > _LARGE and tensor.layout == torch.strided and 0 in tensor.stride():
            left -= tensor.numel() * tensor.element_size()
            is_readable[number] = left >= 0
    return is_readable
