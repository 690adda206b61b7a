"""What the bits of an element stand for."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptlint.vocabulary.dtypes import ENCODINGS, ITEM_BITS

Numbers = npt.NDArray[np.float32] | npt.NDArray[np.float64]

_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def decoded(bits: npt.NDArray[np.unsignedinteger[Any]], dtype: str) -> Numbers | None:
    """Values of unsigned words, as float64 for wide dtypes, else float32; None for an unknown dtype.

    The words of a complex dtype are those of its two parts.
    """
    dtype = _PARTS.get(dtype, dtype)
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype in ("float32", "float64"):
        return bits.view(dtype)
    if dtype == "float16" or (dtype.startswith(("int", "uint")) and ITEM_BITS[dtype] in (8, 16)):
        return bits.view(dtype).astype(np.float32)
    if dtype in ("int32", "int64", "uint32", "uint64"):
        return bits.view(dtype).astype(np.float64)
    if dtype in ENCODINGS and bits.itemsize == 1:
        narrow: npt.NDArray[np.float32] = _numbers_of_bytes(dtype)[bits]
        return narrow
    return None


@cache
def _numbers_of_bytes(dtype: str) -> npt.NDArray[np.float32]:
    """float32 [256]: what each byte stands for in a float of 8 bits."""
    encoding, word = ENCODINGS[dtype], np.arange(256)
    magnitude = word if encoding.unsigned else word & 0x7F
    exponent, fraction = magnitude >> encoding.mantissa, magnitude & (1 << encoding.mantissa) - 1
    is_normal = (exponent > 0) | encoding.unsigned
    power = np.where(is_normal, exponent, 1) - encoding.bias - encoding.mantissa
    number = np.ldexp(fraction + np.where(is_normal, 1 << encoding.mantissa, 0).astype(np.float64), power)
    number[word == encoding.bad if encoding.single else magnitude >= encoding.bad] = np.nan
    if encoding.has_infinity:
        number[magnitude == encoding.bad] = np.inf
    return np.asarray(np.where(word != magnitude, -number, number), np.float32)
