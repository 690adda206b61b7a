"""Statistics of raw tensor bytes without torch: NaN, zeros, magnitudes, squares, signs, bits in use."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, ldexp

import numpy as np
import numpy.typing as npt

from ckptlint.numerics.decode import decoded
from ckptlint.seals.row_hashes import Bits
from ckptlint.vocabulary.dtypes import ENCODINGS, ITEM_BITS, Encoding

_TINY = 1e-12
_WIDE = 127  # exponent bias of bfloat16 and float32
_MANY, _RUN, _EVERY = 2**18, 2**10, 64  # numbers of which a sample is taken; how many together, and of how many runs
_FEW = 0.1  # share of negative numbers up to which they are counted one by one
_PLAUSIBLE = 1e4  # square of the largest number over the mean of the squares, as of weights and moments
_PIECE = 2**16  # numbers that are worked on at once: what is made of them stays in the cache of a processor


VALUE_COLUMNS = (
    "nan", "plus_inf", "minus_inf", "first", "masks", "zeros", "edge_zeros", "denormals", "least", "most", "one_value",
    "squares", "negatives", "used_bits",
)  # fmt: skip
"""The columns of a `PayloadTable` that are attributes of `RecordValues`."""


@dataclass(slots=True)
class RecordValues:
    """Statistics of one record so far; a complex element counts as two numbers.

    Attributes:
        nan, plus_inf, minus_inf: numbers of each.
        first: position of the first of them among the record's elements, -1 while there is none.
        zeros: numbers that are 0, of either sign.
        leading, trailing: how many of them come before the first number that is not, and after the last.
        denormals: numbers other than 0 that are less than the smallest normal one (1e-38 in bfloat16); not counted in
            float16 and fp8, whose denormals are everyday numbers.
        least, most: magnitudes of the finite numbers; inf and -inf while there is none. Whole numbers are codes, whose
            bits are taken as they are: -1 in int8 is 255.
        one_value: whether everything seen is one finite value.
        bits: those of the first number seen, -1 before; 0 for a zero of either sign.
        squares: sum of the squares of the finite numbers, one of magnitude `most` left out; of floats alone. Of many
            numbers an estimate, unless the largest is far above the others.
        negatives: finite numbers below 0; of floats alone. Of many numbers an estimate where a tenth of them are.
        used_bits: the bits that at least one finite number has, as its dtype writes it; of floats of more than 16 bits
            alone. Of many numbers those of a sample, if that has all bits of the fraction.
    """

    nan: int = 0
    plus_inf: int = 0
    minus_inf: int = 0
    first: int = -1
    zeros: int = 0
    leading: int = 0
    trailing: int = 0
    denormals: int = 0
    least: float = inf
    most: float = -inf
    one_value: bool = True
    bits: int = -1
    squares: float = 0.0
    negatives: int = 0
    used_bits: int = 0

    @property
    def masks(self) -> bool:
        """Whether everything seen is 0 or -Inf, as in an attention mask."""
        return self.most <= 0 and not self.nan and not self.plus_inf

    @property
    def edge_zeros(self) -> int:
        """The longer run of zeros of those at the beginning and at the end."""
        return max(self.leading, self.trailing)

    @property
    def _is_zero(self) -> bool:
        return self.masks and not self.minus_inf

    def join(self, later: RecordValues) -> None:
        """Add what was seen in elements that come after these."""
        self.leading += later.leading if self._is_zero else 0
        self.trailing = later.trailing + (self.trailing if later._is_zero else 0)
        self.nan += later.nan
        self.plus_inf += later.plus_inf
        self.minus_inf += later.minus_inf
        self.first = later.first if self.first < 0 else self.first
        self.zeros += later.zeros
        self.denormals += later.denormals
        smaller = max(min(self.most, later.most), 0.0)
        self.squares += later.squares + smaller * smaller
        self.negatives += later.negatives
        self.used_bits |= later.used_bits
        self.least, self.most = min(self.least, later.least), max(self.most, later.most)
        self.one_value &= later.one_value and (self.bits == later.bits or -1 in (self.bits, later.bits))
        self.bits = later.bits if self.bits < 0 else self.bits


_rooms = threading.local()


def _room(words: Bits) -> Bits:
    """An array of this thread as long as the words: new memory for each block costs more than the statistics."""
    room: Bits | None = getattr(_rooms, words.dtype.char, None)
    if room is None or len(room) < len(words):
        room = np.empty(len(words), words.dtype)
        setattr(_rooms, words.dtype.char, room)
    return room[: len(words)]


def values_of(data: memoryview, dtype: str, position: int) -> RecordValues:
    """Statistics of complete elements in bytes of any alignment; the first has this number among the record's.

    `dtype` is torch's name, one of `ENCODINGS` or `INTEGERS`.
    """
    encoding = ENCODINGS.get(dtype)
    words = np.frombuffer(data, f"<u{ITEM_BITS[dtype] // 8}" if encoding is None else encoding.word)
    if not words.flags.aligned:
        words = words.copy()
    values = RecordValues()
    if not len(words):
        return values
    # twice the bits, which shifts the sign out, are ordered as the magnitudes are
    sizes = words if encoding is None or encoding.unsigned else np.add(words, words, out=_room(words))
    top = int(sizes.argmax())
    low, high = int(sizes.min()), int(sizes[top])
    if encoding is not None and _has_bad(words, low, high, encoding):
        is_bad = _count_bad(values, words, encoding, position)
        values.one_value = False
        words, sizes = words[~is_bad], sizes[~is_bad]
        if not len(sizes):
            return values
        top = int(sizes.argmax())
        low, high = int(sizes.min()), int(sizes[top])
    values.one_value &= low == high and (high == 0 or bool((words == words[0]).all()))
    values.bits = int(words[0]) if high else 0
    values.least, values.most = _magnitude(low, encoding), _magnitude(high, encoding)
    if encoding is not None:
        sample = words  # or every 64th run of many
        if len(words) > _MANY:
            starts = range(0, len(words) - _RUN, _EVERY * _RUN)
            sample = np.concatenate([words[start : start + _RUN] for start in starts])
        if words.itemsize > 2:  # narrower ones hold no narrower numbers
            fraction = (1 << encoding.mantissa) - 1
            values.used_bits = int(np.bitwise_or.reduce(sample))
            if values.used_bits & fraction != fraction:
                values.used_bits = int(np.bitwise_or.reduce(words))
        if not encoding.unsigned:
            values.negatives = _negatives(words, sample)
        if high or encoding.unsigned:
            values.squares = _squares(words, sample, dtype, top, values.most)
    if values.most == 0:
        values.zeros = values.leading = values.trailing = len(sizes)
    elif values.least == 0:
        is_other = sizes != 0
        values.zeros = len(sizes) - int(np.count_nonzero(is_other))
        values.leading, values.trailing = int(is_other.argmax()), int(is_other[::-1].argmax())
    if encoding is not None and encoding.bias >= _WIDE and not encoding.unsigned:
        normal = 2 << encoding.mantissa
        values.denormals = int(np.count_nonzero(sizes < normal)) - values.zeros if low < normal and high else 0
    return values


def _negatives(words: Bits, sample: Bits) -> int:
    """How many are below 0: estimated where many of the sample are, as of weights; of second moments none is."""
    sign = words.dtype.type(1 << (8 * words.itemsize - 1))
    share = int(np.count_nonzero(sample > sign)) / len(sample)
    if share > _FEW or sample is words:
        return round(share * len(words))
    return sum(int(np.count_nonzero(piece > sign)) for piece in _pieces(words)) if words.max() > sign else 0


def _squares(words: Bits, sample: Bits, dtype: str, top: int, most: float) -> float:
    """Sum of the squares of finite numbers, that of the number at `top` left out: beside 1e30 no other one counts."""
    if sample is not words:
        squares = _sum_of_squares(sample, dtype, most) * (len(words) / len(sample))
        if most * most * len(words) < _PLAUSIBLE * squares:
            return squares
    return sum(_sum_of_squares(piece, dtype, most) for piece in (*_pieces(words[:top]), *_pieces(words[top + 1 :])))


def _sum_of_squares(words: Bits, dtype: str, most: float) -> float:
    numbers = decoded(words, dtype)
    assert numbers is not None
    if _TINY < most < 1 / _TINY:
        return float(np.dot(numbers, numbers))
    numbers = numbers.astype(np.float64)  # float32 holds no such squares
    with np.errstate(over="ignore"):
        return float(np.dot(numbers, numbers))


def _pieces(words: Bits) -> Iterator[Bits]:
    return (words[start : start + _PIECE] for start in range(0, len(words), _PIECE))


def _has_bad(words: Bits, low: int, high: int, encoding: Encoding) -> bool:
    """Whether some number is not finite; the only NaN of the fnuz dtypes has the bits of a negative zero."""
    if encoding.single and not encoding.unsigned:
        return low == 0 and bool((words == encoding.bad).any())
    return high >= (encoding.bad if encoding.unsigned else 2 * encoding.bad)


def _magnitude(size: int, encoding: Encoding | None) -> float:
    if encoding is None:
        return float(size)
    if encoding.unsigned:
        return ldexp(1.0, size - encoding.bias)
    exponent, fraction = divmod(size >> 1, 1 << encoding.mantissa)
    if exponent:
        fraction += 1 << encoding.mantissa
    return ldexp(fraction, max(exponent, 1) - encoding.bias - encoding.mantissa)


def _count_bad(seen: RecordValues, words: Bits, encoding: Encoding, position: int) -> npt.NDArray[np.bool_]:
    """Count the numbers that are not finite; returns which they are."""
    sign = words.dtype.type(1 << (words.dtype.itemsize * 8 - 1))
    bad = words == encoding.bad if encoding.single else words & ~sign >= encoding.bad
    infinite = words & ~sign == encoding.bad if encoding.has_infinity else np.zeros_like(bad)
    minus = int((infinite & (words >= sign)).sum())
    seen.minus_inf = minus
    seen.plus_inf = int(infinite.sum()) - minus
    seen.nan = int(bad.sum()) - int(infinite.sum())
    seen.first = position + int(bad.argmax()) // encoding.parts
    return np.asarray(bad)
