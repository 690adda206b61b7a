"""What a dtype is in every format: one row of `DTYPES` per dtype of torch, from which the other tables are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype whose payload size is certain.

    Attributes:
        bits: bits per element.
        safetensors: its name in a safetensors header, "" for none.
        storage: torch's storage class, "" where its elements lie in an UntypedStorage.
        encoding: how it writes values that are not finite; None where all are.
    """

    bits: int
    safetensors: str = ""
    storage: str = ""
    encoding: Encoding | None = None


DTYPES: Mapping[str, Dtype] = {
    "bool": Dtype(8, "BOOL", "BoolStorage"),
    "uint8": Dtype(8, "U8", "ByteStorage"),
    "int8": Dtype(8, "I8", "CharStorage"),
    "int16": Dtype(16, "I16", "ShortStorage"),
    "uint16": Dtype(16, "U16"),
    "int32": Dtype(32, "I32", "IntStorage"),
    "uint32": Dtype(32, "U32"),
    "int64": Dtype(64, "I64", "LongStorage"),
    "uint64": Dtype(64, "U64"),
    "float8_e4m3fn": Dtype(8, "F8_E4M3", encoding=Encoding("u1", 0x7F, has_infinity=False)),
    "float8_e5m2": Dtype(8, "F8_E5M2", encoding=Encoding("u1", 0x7C)),
    "float8_e4m3fnuz": Dtype(8, "F8_E4M3FNUZ", encoding=Encoding("u1", 0x80, has_infinity=False, single=True)),
    "float8_e5m2fnuz": Dtype(8, "F8_E5M2FNUZ", encoding=Encoding("u1", 0x80, has_infinity=False, single=True)),
    "float8_e8m0fnu": Dtype(8, "F8_E8M0", encoding=Encoding("u1", 0xFF, has_infinity=False, single=True)),
    "float16": Dtype(16, "F16", "HalfStorage", Encoding("<u2", 0x7C00)),
    "bfloat16": Dtype(16, "BF16", "BFloat16Storage", Encoding("<u2", 0x7F80)),
    "float32": Dtype(32, "F32", "FloatStorage", Encoding("<u4", 0x7F800000)),
    "float64": Dtype(64, "F64", "DoubleStorage", Encoding("<u8", 0x7FF0000000000000)),
    "complex32": Dtype(32, encoding=Encoding("<u2", 0x7C00, parts=2)),
    "complex64": Dtype(64, "C64", "ComplexFloatStorage", Encoding("<u4", 0x7F800000, parts=2)),
    "complex128": Dtype(128, "", "ComplexDoubleStorage", Encoding("<u8", 0x7FF0000000000000, parts=2)),
}
"""By torch's name without the module.

Packed and quantised dtypes (float4_e2m1fn_x2, int1-7, quint4x2; F4 and F6_* of safetensors) are left out on purpose:
their shapes count other things, and no size check is made for them.

Source:
    torch 2.13 `torch.dtype.itemsize` and its storage classes; safetensors 0.8 `Dtype`; OCP 8-bit Floating Point
    Specification (e4m3, e5m2), c10/util/Float8_*.h of torch 2.13 (fnuz, e8m0fnu)
"""

ITEM_BITS: Mapping[str, int] = {name: dtype.bits for name, dtype in DTYPES.items()}
"""Bits per element."""

STORAGES: Mapping[str, str] = {dtype.storage: name for name, dtype in DTYPES.items() if dtype.storage}
"""Storage classes of torch -> dtypes; the others lie in an UntypedStorage."""

SAFETENSORS: Mapping[str, str] = {dtype.safetensors: name for name, dtype in DTYPES.items() if dtype.safetensors}
"""Names in a safetensors header -> dtypes."""

ENCODINGS: Mapping[str, Encoding] = {name: dtype.encoding for name, dtype in DTYPES.items() if dtype.encoding}
"""How the floating dtypes write values that are not finite."""


def nbytes(dtype: str, elements: int) -> int | None:
    """Payload bytes of so many elements; None for dtypes of uncertain size.

    >>> nbytes("bfloat16", 3), nbytes("quint4x2", 3)
    (6, None)
    """
    bits = ITEM_BITS.get(dtype)
    return None if bits is None else elements * bits // 8


FLOATS = frozenset(dtype for dtype in ITEM_BITS if "float" in dtype)
"""Dtypes whose tensors have the shape of the weight; packed and quantised ones have another."""

FORMS: Mapping[str, str] = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}
"""dtype -> how `struct` packs one value of it, for those in which optimizers count their steps."""
