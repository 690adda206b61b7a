"""How far two tensors are apart, seen in pieces: norm, angle, whether one is the other times or plus a constant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, nan, sqrt

import numpy as np
import numpy.typing as npt

from ckptlint.numerics.decode import Numbers, decoded
from ckptlint.seals.row_hashes import Bits, canonical, rounded

ROUNDING = {"float64": 2**-52, "float32": 2**-23, "float16": 2**-11, "bfloat16": 2**-8}
"""By how much, relatively, a number may be off that was rounded to a dtype."""
_FEW = 64  # fewer elements fit a constant factor by chance


@dataclass(slots=True)
class Line:
    """Tests whether one tensor is the other times or plus a constant; some norms are stored minus 1."""

    fitting: list[tuple[str, float, Callable[[npt.NDArray[np.float64], float], npt.NDArray[np.float64]]]] | None = None

    def see(self, first: Numbers, second: Numbers, dtype: str) -> None:
        """Test some elements of both."""
        if self.fitting == [] or dtype not in ROUNDING:
            return
        with np.errstate(invalid="ignore"):  # of a NaN
            a, b = first.astype(np.float64), second.astype(np.float64)
        if self.fitting is None:
            # the largest element gives the most exact factor; a few dozen, or a constant tensor, fit any
            at = int(np.argmax(np.abs(a)))
            if len(a) < _FEW or not np.isfinite(b[at]) or not a[at] or a[at] == b[at] or b.min() == b.max():
                self.fitting = []
                return
            self.fitting = [
                ("scaled by", float(b[at] / a[at]), np.multiply),
                ("the old one plus", float(b[at] - a[at]), np.add),
            ]
        with np.errstate(invalid="ignore", over="ignore"):
            made = [apply(a, value) for _, value, apply in self.fitting]
            fits = [(np.abs(c - b) <= 4 * ROUNDING[dtype] * (np.abs(c) + np.abs(b))).all() for c in made]
            self.fitting = [way for way, is_fitting in zip(self.fitting, fits, strict=True) if way[1] and is_fitting]

    @property
    def text(self) -> str:
        """The relation in words, "" for none."""
        return f"{self.fitting[0][0]} {self.fitting[0][1]:.6g}" if self.fitting else ""


@dataclass(slots=True)
class Distance:
    """The distance between two tensors.

    Attributes:
        dtype: dtype of the comparison.
        is_off: bool [columns], columns with differing elements.
        count: number of differing elements.
        lost: number of elements that became NaN or infinite.
        largest: largest absolute difference; NaN for dtypes without numbers.
        is_rounded: whether new is old rounded to bfloat16 and stored as float32.
        squares: float64 [4], sums of squares of the difference, of old and of new, and of the product old * new.
    """

    dtype: str
    is_off: npt.NDArray[np.bool_]
    count: int = 0
    lost: int = 0
    largest: float = 0.0
    is_rounded: bool = True
    squares: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(4))
    line: Line = field(default_factory=Line)

    def see(self, _: int, old: Bits, new: Bits) -> None:
        """Add some rows of both, in canonical form."""
        is_off = old != new
        self.count += int(np.count_nonzero(is_off))
        self.is_off |= is_off.any(axis=0)
        narrow = rounded(old, "float32", "bfloat16") if self.is_rounded and self.dtype == "float32" else None
        wide = None if narrow is None else rounded(narrow, "bfloat16", "float32")
        self.is_rounded = wide is not None and np.array_equal(canonical(wide, "float32"), new)
        numbered = decoded(old, self.dtype), decoded(new, self.dtype)
        if numbered[0] is None or numbered[1] is None:
            self.largest = nan
            return
        with np.errstate(invalid="ignore", over="ignore"):
            first, second = numbered[0].reshape(-1), numbered[1].reshape(-1)
            distance = second - first
            self.lost += int(np.count_nonzero(is_off.reshape(-1) & ~np.isfinite(second)))
            self.largest = max(self.largest, float(np.abs(distance[np.isfinite(distance)]).max(initial=0.0)))
            pairs = (distance, distance), (first, first), (second, second), (first, second)
            self.squares += [float(np.dot(*pair)) for pair in pairs]
        self.line.see(first, second, self.dtype)

    @property
    def change(self) -> float:
        """Norm of the difference divided by the norm of the old tensor."""
        apart, old = map(sqrt, self.squares[:2])
        if self.largest != self.largest:
            return nan
        return apart / old if old else (inf if apart else nan)

    @property
    def cosine(self) -> float:
        """Cosine of the angle between both; NaN for a zero tensor."""
        _, old, new, both = map(float, self.squares)
        return both / (sqrt(old) * sqrt(new)) if old > 0 and new > 0 else nan
