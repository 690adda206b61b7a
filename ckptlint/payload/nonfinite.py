"""NaN and infinities in raw tensor bytes, for every floating dtype, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a dtype writes values that are not finite.

    Attributes:
        word: numpy dtype of one real number, little-endian.
        bad: least bits, without the sign, of a value that is not finite; with `single` the bits of the only one.
        has_infinity: whether `bad` is infinity and what lies above it NaN; otherwise all of them are NaN.
        single: whether exactly one pattern of bits, its sign included, is NaN.
        parts: numbers per element, 2 for complex.
    """

    word: str
    bad: int
    has_infinity: bool = True
    single: bool = False
    parts: int = 1


ENCODINGS: Mapping[str, Encoding] = {
    "float16": Encoding("<u2", 0x7C00),
    "bfloat16": Encoding("<u2", 0x7F80),
    "float32": Encoding("<u4", 0x7F800000),
    "float64": Encoding("<u8", 0x7FF0000000000000),
    "complex32": Encoding("<u2", 0x7C00, parts=2),
    "complex64": Encoding("<u4", 0x7F800000, parts=2),
    "complex128": Encoding("<u8", 0x7FF0000000000000, parts=2),
    "float8_e5m2": Encoding("u1", 0x7C),
    "float8_e4m3fn": Encoding("u1", 0x7F, has_infinity=False),
    "float8_e4m3fnuz": Encoding("u1", 0x80, has_infinity=False, single=True),
    "float8_e5m2fnuz": Encoding("u1", 0x80, has_infinity=False, single=True),
    "float8_e8m0fnu": Encoding("u1", 0xFF, has_infinity=False, single=True),
}
"""By torch's name.

Source:
    OCP 8-bit Floating Point Specification (e4m3, e5m2), c10/util/Float8_*.h of torch 2.13 (fnuz, e8m0fnu)
"""


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
