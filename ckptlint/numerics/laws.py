"""What an optimizer's algebra, a maximum and a copy allow of one element beside another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import numpy as np
import numpy.typing as npt

from ckptlint.model import Follow, Pair
from ckptlint.vocabulary.dtypes import ENCODINGS

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Beside = Sequence[Floats | None]

_LEAST = 16  # numbers: of fewer the low bits may be zero by chance
_IDLE = 64  # updates in which a parameter may not have taken part
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

    What is not finite breaks no law, nor does the rounding to the dtypes that both are stored in.
    """
    with np.errstate(all="ignore"):
        if pair.law == "moments":
            there, allowed = first * first, _most_square(second, pair.betas, dtypes)
        elif pair.law == "maximum":
            there, allowed = second, first
        elif pair.law == "copy":
            narrow = max(dtypes, key=rounding)
            there, allowed = np.abs(first - second), 2 * rounding(narrow) * np.maximum(np.abs(first), np.abs(second))
            allowed = allowed + _smallest(narrow)
        else:
            assert_never(pair.law)
        is_odd = (there > allowed) & np.isfinite(first) & np.isfinite(second)
        if pair.law == "moments":
            is_odd &= second >= 0
        ratio = there[is_odd] / allowed[is_odd]
    return is_odd, float(ratio.max(initial=0.0))


def changed(follow: Follow, now: Floats, was: Floats, beside: Beside, dtypes: tuple[str, str]) -> tuple[float, ...]:
    """The columns of a `ChangeTable` after `chunk`, of elements [k] at the same places of two steps.

    Beside a first moment, `beside` has the elements of the second, now and before; `dtypes` are those of the two.
    """
    with np.errstate(all="ignore"):
        apart, ratio = now - was, np.zeros(len(now))
        if follow.kind == "weight":
            room = follow.updates * rounding(dtypes[0]) * np.maximum(np.abs(now), np.abs(was))
            allowed = 1.05 * follow.reach + follow.decay * np.abs(was) + room
            ratio = np.abs(apart) / allowed
        elif follow.betas is not None and follow.updates:
            ratio = _moved(follow, now, was, beside, dtypes)
        is_odd = (ratio > 1) & np.isfinite(now) & np.isfinite(was)
        squares = [
            np.float64(np.dot(left, right)) for left, right in ((now, now), (was, was), (now, was), (apart, apart))
        ]
        count = max(len(now), 1)
        cosine = squares[2] / np.sqrt(squares[0] * squares[1])
        change = np.sqrt(squares[3] / squares[1])
        worst = float(ratio[is_odd].max(initial=0.0))
    rms = [float(np.sqrt(square / count)) for square in squares[:2]]
    same = int(np.count_nonzero(apart == 0))
    words = was.astype(np.float32).view(np.uint32)
    is_short = len(words) >= _LEAST and bool((words & np.uint32(0xFFFF) == 0).all() and (words != words[0]).any())
    return (len(now), same, int(is_odd.sum()), *rms, float(cosine), float(change), worst, is_short)


def _moved(follow: Follow, now: Floats, was: Floats, beside: Beside, dtypes: tuple[str, str]) -> Floats:
    """float64 [k], how far each moment is beyond what n updates leave of it: above 1 no gradients lead there.

    v keeps b2^n of what it was, and only grows from there. What m gained, m - b1^n * m_was, comes of the same gradients
    as what v gained, so its square is at most C * (v - b2^n * v_was). Some parameters take part in fewer updates, such
    as experts that no token reached: the number that leaves the fewest elements beyond it counts.
    """
    assert follow.betas is not None
    steps = follow.updates
    if follow.kind == "second":
        kept = follow.betas[1] ** steps * (1 - min(steps * rounding(dtypes[0]), 1.0))
        least = kept * was - steps * _smallest(dtypes[0])
        return np.where(least > 0, least / np.maximum(now, 1e-300), 0.0)
    second_now, second_was = beside
    if second_now is None or second_was is None:
        return np.zeros(len(now))
    best, fewest = np.zeros(len(now)), len(now) + 1
    is_still = (now == was) & (second_now == second_was)
    for taken in range(steps, max(steps - _IDLE, -1), -1):
        b1, b2 = (beta**taken for beta in follow.betas)
        gained = second_now - b2 * (1 - min(taken * rounding(dtypes[1]), 1.0)) * second_was
        most = np.sqrt(_most_square(np.maximum(gained, 0.0), follow.betas, dtypes))
        moved = np.abs(now - b1 * was) / (most + taken * rounding(dtypes[0]) * np.abs(was))
        ratio = np.where(is_still, 0.0, moved)
        if (beyond := int(np.count_nonzero(ratio > 1))) < fewest:
            best, fewest = ratio, beyond
        if not fewest:
            break
    return best


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
