"""What an optimizer's algebra, a maximum and a copy allow of one element beside another."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ckptlint.model import Pair
from ckptlint.vocabulary.dtypes import ENCODINGS

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

_LEAST_MOMENT = 1e-12  # a first moment that no underflow of its square explains


def moment_bound(betas: tuple[float, float]) -> float:
    """The largest m * m / v of Adam's moments, after any gradients: infinite where the second forgets faster.

    m is the sum of (1 - b1) * b1^k * g_k, v that of (1 - b2) * b2^k * g_k^2: by Cauchy-Schwarz m * m <= C * v.

    >>> round(moment_bound((0.9, 0.95)), 3), round(moment_bound((0.9, 0.999)), 1)
    (1.357, 52.9)
    """
    b1, b2 = betas
    return (1 - b1) ** 2 / ((1 - b2) * (1 - b1 * b1 / b2)) if b1 * b1 < b2 else np.inf


def odd_elements(pair: Pair, first: Floats, second: Floats, dtypes: tuple[str, str]) -> tuple[Flags, float]:
    """bool [k], the elements that break the law of a pair; and how far the worst goes beyond it, 0 for none.

    What is not finite breaks no law.

    Args:
        first, second: [k] of both tensors, in the order of the pair.
        dtypes: that they are stored in, whose rounding is allowed for.
    """
    with np.errstate(all="ignore"):
        if pair.law == "moments":
            there, allowed = first * first, _most_square(second, pair.betas, dtypes)
        elif pair.law == "maximum":
            there, allowed = second, first
        else:
            narrow = max(dtypes, key=rounding)
            there, allowed = np.abs(first - second), 2 * rounding(narrow) * np.maximum(np.abs(first), np.abs(second))
            allowed = allowed + _smallest(narrow)
        is_odd = (there > allowed) & np.isfinite(first) & np.isfinite(second)
        if pair.law == "moments":
            is_odd &= second >= 0
        ratio = there[is_odd] / allowed[is_odd]
    return is_odd, float(ratio.max(initial=0.0))


def rounding(dtype: str) -> float:
    """The largest relative error of a number that was rounded to a dtype."""
    return 2.0 ** -(ENCODINGS[dtype].mantissa + 1)


def _smallest(dtype: str) -> float:
    encoding = ENCODINGS[dtype]
    return 2.0 ** (1 - encoding.bias - encoding.mantissa)


def _most_square(second: Floats, betas: tuple[float, float] | None, dtypes: tuple[str, str]) -> Floats:
    """The largest square of a first moment beside each second moment.

    Each step rounds both moments once. The errors add up to 1 / (1 - beta) of one of them, and a second moment stays
    behind by as much: in 16 bits it stops to grow when a step adds less than half of its last place.
    """
    if betas is None:
        return np.where(second == 0, _LEAST_MOMENT**2, np.inf)
    b1, b2 = betas
    grown = second * (1 + rounding(dtypes[1]) / (1 - b2)) + _smallest(dtypes[1]) / (1 - b2)
    return np.asarray(moment_bound(betas) * grown * (1 + rounding(dtypes[0]) / (1 - b1)) ** 2)
