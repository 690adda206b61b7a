"""NaN and infinities in raw tensor bytes, for every floating dtype, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptlint.vocabulary.dtypes import ENCODINGS, Encoding

Words = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(slots=True)
class Count:
    """What was seen of one record so far.

    Attributes:
        nan, plus_inf, minus_inf: numbers of each.
        first: position of the first of them among the record's elements, -1 while there is none.
        masks: whether everything seen is 0 or -Inf, as in an attention mask.
    """

    nan: int = 0
    plus_inf: int = 0
    minus_inf: int = 0
    first: int = -1
    masks: bool = True

    def add(self, data: memoryview, dtype: str, position: int) -> None:
        """Look at whole elements.

        Args:
            data: their bytes, of any alignment.
            dtype: torch's name, one of `ENCODINGS`.
            position: number of the first element among the record's.
        """
        encoding = ENCODINGS[dtype]
        words = np.frombuffer(data, encoding.word)
        if not words.flags.aligned:
            words = words.copy()
        if not len(words):
            return
        if self.masks:
            self.masks = _is_mask(words[:1024], encoding) and _is_mask(words, encoding)
        if _has_bad(words, encoding):
            self._count(words, encoding, position)

    def join(self, later: Count) -> None:
        """Add what was seen in elements that come behind these."""
        self.nan += later.nan
        self.plus_inf += later.plus_inf
        self.minus_inf += later.minus_inf
        self.first = later.first if self.first < 0 else self.first
        self.masks &= later.masks

    def _count(self, words: Words, encoding: Encoding, position: int) -> None:
        sign = words.dtype.type(1 << (words.dtype.itemsize * 8 - 1))
        bad = words == encoding.bad if encoding.single else words & ~sign >= encoding.bad
        infinite = words & ~sign == encoding.bad if encoding.has_infinity else np.zeros_like(bad)
        minus = int((infinite & (words >= sign)).sum())
        self.minus_inf += minus
        self.plus_inf += int(infinite.sum()) - minus
        self.nan += int(bad.sum()) - int(infinite.sum())
        if self.first < 0:
            self.first = position + int(bad.argmax()) // encoding.parts


def _has_bad(words: Words, encoding: Encoding) -> bool:
    """Whether some word is not finite: doubling shifts the sign out, and one maximum is faster than comparing each."""
    if encoding.single:
        return bool((words == encoding.bad).any())
    return bool((words + words).max() >= 2 * encoding.bad)


def _is_mask(words: Words, encoding: Encoding) -> bool:
    if not encoding.has_infinity or encoding.parts > 1:
        return False
    sign = 1 << (words.dtype.itemsize * 8 - 1)
    return bool(((words == 0) | (words == sign) | (words == (sign | encoding.bad))).all())
