"""What a dtype is in every format: one row of `DTYPES` per dtype of torch, from which the other tables are made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ckptlint.patterns import lazy_pattern


class Encoding(NamedTuple):
    """How a dtype writes numbers: the sign, the exponent with its bias, the fraction; and those that are not finite.

    Attributes:
        word: numpy dtype of one real number, little-endian.
        bad: least bits, without the sign, of a value that is not finite; with `single` the bits of the only one.
        mantissa: bits of the fraction.
        bias: of the exponent.
        has_infinity: whether `bad` is infinity and what is above it NaN; otherwise all of them are NaN.
        single: whether exactly one pattern of bits, its sign included, is NaN.
        unsigned: whether the bits are an exponent alone: no sign, no zero.
        parts: numbers per element, 2 for complex.
    """

    word: str
    bad: int
    mantissa: int
    bias: int
    has_infinity: bool = True
    single: bool = False
    unsigned: bool = False
    parts: int = 1


class Dtype(NamedTuple):
    """A dtype whose payload size is certain.

    Attributes:
        bits: bits per element.
        safetensors: its name in a safetensors header, "" for none.
        storage: torch's storage class, "" where its elements lie in an UntypedStorage.
        encoding: how it writes numbers, of the floating dtypes.
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
    "float8_e4m3fn": Dtype(8, "F8_E4M3", encoding=Encoding("u1", 0x7F, 3, 7, has_infinity=False)),
    "float8_e5m2": Dtype(8, "F8_E5M2", encoding=Encoding("u1", 0x7C, 2, 15)),
    "float8_e4m3fnuz": Dtype(8, "F8_E4M3FNUZ", encoding=Encoding("u1", 0x80, 3, 8, has_infinity=False, single=True)),
    "float8_e5m2fnuz": Dtype(8, "F8_E5M2FNUZ", encoding=Encoding("u1", 0x80, 2, 16, has_infinity=False, single=True)),
    "float8_e8m0fnu": Dtype(
        8, "F8_E8M0", encoding=Encoding("u1", 0xFF, 0, 127, has_infinity=False, single=True, unsigned=True)
    ),
    "float16": Dtype(16, "F16", "HalfStorage", Encoding("<u2", 0x7C00, 10, 15)),
    "bfloat16": Dtype(16, "BF16", "BFloat16Storage", Encoding("<u2", 0x7F80, 7, 127)),
    "float32": Dtype(32, "F32", "FloatStorage", Encoding("<u4", 0x7F800000, 23, 127)),
    "float64": Dtype(64, "F64", "DoubleStorage", Encoding("<u8", 0x7FF0000000000000, 52, 1023)),
    "complex32": Dtype(32, encoding=Encoding("<u2", 0x7C00, 10, 15, parts=2)),
    "complex64": Dtype(64, "C64", "ComplexFloatStorage", Encoding("<u4", 0x7F800000, 23, 127, parts=2)),
    "complex128": Dtype(128, "", "ComplexDoubleStorage", Encoding("<u8", 0x7FF0000000000000, 52, 1023, parts=2)),
}
"""By torch's name without the module.

Packed and quantised dtypes (float4_e2m1fn_x2, int1-7, quint4x2; F4 and F6_* of safetensors) are left out on purpose:
their shapes count other things, and no size check is made for them; `SAFETENSORS_BITS` has those of safetensors.

Source: torch 2.13 `torch.dtype.itemsize` and its storage classes; safetensors 0.8 `Dtype`; OCP 8-bit Floating Point
Specification (e4m3, e5m2), c10/util/Float8_*.h of torch 2.13 (fnuz, e8m0fnu)
"""

ITEM_BITS: Mapping[str, int] = {name: dtype.bits for name, dtype in DTYPES.items()}
"""Bits per element."""

STORAGES: Mapping[str, str] = {dtype.storage: name for name, dtype in DTYPES.items() if dtype.storage}
"""Storage classes of torch -> dtypes; the others lie in an UntypedStorage."""

SAFETENSORS: Mapping[str, str] = {dtype.safetensors: name for name, dtype in DTYPES.items() if dtype.safetensors}
"""Names in a safetensors header -> dtypes."""

SAFETENSORS_BITS: Mapping[str, int] = {
    **{name: ITEM_BITS[dtype] for name, dtype in SAFETENSORS.items()},
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
"""Names in a safetensors header -> bits per element: all that the format has, those that torch has no dtype for too.

Source: safetensors 0.8 `Dtype`, `TensorInfo`
"""

ENCODINGS: Mapping[str, Encoding] = {name: dtype.encoding for name, dtype in DTYPES.items() if dtype.encoding}
"""How the floating dtypes write numbers."""

INTEGERS = frozenset(dtype for dtype in DTYPES if "int" in dtype)
"""Dtypes of whole numbers, in which the codes of quantised weights are stored."""


def nbytes(dtype: str, elements: int) -> int | None:
    """Payload bytes of so many elements; None for dtypes of uncertain size.

    >>> nbytes("bfloat16", 3), nbytes("quint4x2", 3)
    (6, None)
    """
    bits = ITEM_BITS.get(dtype)
    return None if bits is None else elements * bits // 8


_EXACT: Mapping[str, tuple[int, int]] = {
    "float8_e4m3fn": (4, 4),
    "float8_e5m2": (3, 5),
    "float8_e4m3fnuz": (4, 4),
    "float8_e5m2fnuz": (3, 5),
    "float8_e8m0fnu": (1, 8),
    "bfloat16": (8, 8),
    "float16": (11, 5),
    "float32": (24, 8),
    "float64": (53, 11),
}
"""Bits of precision and of the exponent."""


def loses(stored: str, target: str) -> bool:
    """Whether values of one dtype change when they are converted to another; False where a dtype is not known.

    >>> loses("bfloat16", "float32"), loses("float32", "bfloat16"), loses("float32", "int64"), loses("int8", "int64")
    (False, True, True, False)
    """
    if stored == target or stored not in ITEM_BITS or target not in ITEM_BITS:
        return False
    if stored.startswith("complex") or target.startswith("complex"):
        return stored.startswith("complex") and ITEM_BITS[target] < ITEM_BITS[stored]
    if stored in _EXACT and target in _EXACT:
        return any(
            stored_bits > target_bits for stored_bits, target_bits in zip(_EXACT[stored], _EXACT[target], strict=True)
        )
    if stored in _EXACT or target == "bool":
        return True
    bits = {"bool": 1}.get(stored, ITEM_BITS[stored] - (not stored.startswith("uint")))
    if target in _EXACT:
        return bits > _EXACT[target][0]
    is_signed = stored != "bool" and not stored.startswith("uint")
    return bits > ITEM_BITS[target] - (not target.startswith("uint")) or (is_signed and target.startswith("uint"))


FLOATS = frozenset(dtype for dtype in ITEM_BITS if "float" in dtype)
"""Dtypes whose tensors have the shape of the weight; packed and quantised ones have another."""

FORMS: Mapping[str, str] = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}
"""dtype -> how `struct` packs one value of it, for those in which optimizers count their steps."""

TORCH_NAME = lazy_pattern(
    r"(b?float|complex|u?int|bits|q?u?int)\d[\w]*|bool|half|float|double|short|int|long|cfloat|cdouble"
)
"""What dtypes are called in the module torch."""

ALIASES: Mapping[str, str] = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "cfloat": "complex64",
    "cdouble": "complex128",
    "chalf": "complex32",
}
"""Other names of some of them there."""
