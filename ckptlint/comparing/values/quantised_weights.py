"""Finds quantised weights among stored tensors, and decodes their rows to floats.

Source: transformers 5.23 (integrations.finegrained_fp8, mxfp4); compressed-tensors 0.20 (compressors.naive_quantized,
pack_quantized, nvfp4, mxfp4); gptqmodel 7.7 (nn_modules.qlinear.pack_original, gemm_awq); bitsandbytes 0.49 (SCB); OCP
Microscaling Formats v1.0 (E2M1, E8M0)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckptlint.model.cover import Shape
from ckptlint.numerics.decode import decoded
from ckptlint.payload.tensor_bytes import BytesByKey, Matrix, TensorBytes
from ckptlint.seals.row_hashes import matrix
from ckptlint.vocabulary.dtypes import ENCODINGS

Codes = npt.NDArray[np.int64]

_LARGEST = 2**26  # most elements of a part (scales, zero points) that is read at once
_BLOCK = 128  # rows and columns of a block, assumed where several sizes fit, as in the FP8 of DeepSeek
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_HALF_FP4 = np.array([0.25, 0.25, 0.25, 0.25, 0.5, 0.5, 1, 1], np.float32)
_ROUNDING = np.float32(2**-8)  # of a code that a quantiser shifts by its zero point in bfloat16
_AWQ = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])  # where each of eight columns is in a word


class Rows(NamedTuple):
    """Some rows of a quantised weight.

    Attributes:
        values: float32 [rows, columns], dequantised values.
        half: float32 [rows, columns], half of the distance to the nearest other value.
        is_end: bool [rows, columns], whether the code is the last on its side, to which larger weights are clipped.
    """

    values: Matrix
    half: Matrix
    is_end: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Quantised:
    """A weight that is stored quantised.

    Attributes:
        fqn: its key without quantisation.
        keys: keys of the tensors that store it.
        shape: shape without quantisation; () where unknown.
        scheme: quantisation in words.
        group: columns of a row that share a scale.
        rows: (first, last) -> these rows; None where they cannot be read.
    """

    fqn: str
    keys: tuple[str, ...]
    shape: Shape
    scheme: str
    group: int
    rows: Callable[[int, int], Rows | None]


def quantised_of(places: BytesByKey) -> Iterator[Quantised]:
    """The quantised weights among tensors, or AccessError."""
    readers = (_scaled, _packed, _blocks, _transposed, _of_library)
    for key, place in places.items():
        if quantised := next(filter(None, (read(key, place, places) for read in readers)), None):
            yield quantised


def _whole(place: TensorBytes | None) -> Matrix | None:
    """A tensor as float32; None where it is unreadable or larger than `_LARGEST`."""
    return None if place is None or prod(place.shape) > _LARGEST else place.whole()


def _words(place: TensorBytes | None) -> npt.NDArray[np.uint32] | None:
    """A whole matrix of int32 as unsigned words."""
    if place is None or place.tensor.dtype not in ("int32", "uint32"):
        return None
    bits = place.rows(0, place.shape[0]) if len(place.shape) == 2 and prod(place.shape) <= _LARGEST else None
    return None if bits is None else bits.view(np.uint32)


def _option(place: TensorBytes, name: str) -> Any:
    values = place.ckpt.config.values if place.ckpt.config is not None else {}
    config = values.get("quantization_config")
    return config.get(name) if isinstance(config, dict) else None


# ---------------------------------------------------------------- scales


def _spread(scale: Matrix, shape: Shape, blocks: Any) -> Callable[[int, int], Matrix] | None:
    """A function (first, last) -> scale of each element in these rows; None where the shapes do not fit.

    Args:
        scale: one number, one per row, or one per block of rows and columns, for each slice.
        blocks: [rows, columns] of a block from the configuration.
    """
    slices, per, width = matrix(shape)
    if scale.size == 1:
        grid = scale.reshape(1, 1, 1)
    elif scale.ndim == 1 and scale.size in (per, slices):
        grid = scale.reshape(1, per, 1) if scale.size == per else scale.reshape(slices, 1, 1)
    elif scale.ndim > 1 and prod(scale.shape[:-2]) in (1, slices):
        grid = scale.reshape(-1, *scale.shape[-2:])
    else:
        return None
    given = blocks if isinstance(blocks, list) and len(blocks) == 2 else (None, None)
    tall, wide = _edge(per, grid.shape[1], given[0]), _edge(width, grid.shape[2], given[1])
    if not tall or not wide:
        return None

    def rows(first: int, last: int) -> Matrix:
        number, inside = np.divmod(np.arange(first, last), per)
        scales = grid[np.minimum(number, len(grid) - 1), inside // tall]
        return scales if scales.shape[1] == 1 else np.repeat(scales, wide, axis=1)[:, :width]

    return rows


def _edge(size: int, count: int, given: Any) -> int:
    """Edge length of `count` blocks that cover `size` elements; 0 where none fits."""
    likely = [given] if isinstance(given, int) and not isinstance(given, bool) and given > 0 else []
    # The last block may be short, so several edges fit one count. The declared edge is tried first, then the usual 128,
    # then the shortest that fits.
    for edge in (*likely, _BLOCK, -(-size // count) if count else 0):
        if edge and -(-size // edge) == count:
            return edge
    return 0


def _group(scale: Matrix, shape: Shape) -> int:
    """Columns of a row that share a scale."""
    width = shape[-1]
    return width if scale.ndim < 2 else max(_edge(width, scale.shape[-1], None), 1)


def _in_words(scale: Matrix, shape: Shape) -> str:
    """The elements that share a scale, in words."""
    if scale.size == 1:
        return "one scale"
    height, width = scale.shape[-2:] if scale.ndim > 1 else (scale.size, 1)
    per = matrix(shape)[1]
    if width == 1:
        return "a scale a row" if height == per else "a scale an expert"
    if height == per:
        return f"groups of {_group(scale, shape)}"
    return f"blocks of {_edge(per, height, None)}x{_group(scale, shape)}"


def _scaled(key: str, place: TensorBytes, places: BytesByKey) -> Quantised | None:
    """A weight in 8-bit floats or int8, with scales in a separate tensor."""
    dtype, shape = place.tensor.dtype, place.shape
    is_float = dtype in ENCODINGS and dtype.startswith("float8")
    if not (is_float or dtype == "int8") or len(shape) < 2:
        return None
    home = key.rpartition(".")[0]
    weight = _weight_of_library(key)
    base = _beside(key) if weight else f"{key}_"
    name = next((name for name in (f"{base}scale_inv", f"{base}scale", f"{home}.SCB") if name in places), "")
    scale = _whole(places.get(name))
    if scale is None:
        return None
    if name.endswith("SCB"):
        scale = scale / np.float32(127)
    zero_key = f"{base}zero_point"
    zero = _whole(places.get(zero_key))
    scales = _spread(scale, shape, _option(place, "weight_block_size"))
    shift = None if zero is None else _spread(zero, shape, None)
    if scales is None:
        return None
    last_code = float(np.nanmax(np.where(np.isfinite(table := _floats(dtype)), table, 0))) if is_float else 127.0

    def rows(first: int, last: int) -> Rows | None:
        bits = place.rows(first, last)
        codes = None if bits is None else decoded(bits, dtype)
        if codes is None or bits is None:
            return None
        values = np.asarray(codes, np.float32)
        half = _half_floats(dtype)[bits] if is_float else np.full(values.shape, 0.5, np.float32)
        is_end = (np.abs(values) >= last_code) | (values == -128)
        return _shifted(values, half, is_end, scales(first, last), shift and shift(first, last))

    keys = tuple(tensor_key for tensor_key in (key, name, zero_key) if tensor_key in places)
    return Quantised(weight or key, keys, shape, f"{dtype}, {_in_words(scale, shape)}", _group(scale, shape), rows)


def _weight_of_library(key: str) -> str:
    """The weight whose codes a key of torchao or quanto holds; "" for others.

    >>> _weight_of_library("layers.0._weight_qdata"), _weight_of_library("layers.0.weight._data")
    ('layers.0.weight', 'layers.0.weight')
    """
    home, _, name = key.rpartition(".")
    if name.startswith("_") and name.endswith("_qdata"):
        return f"{home}.{name[1:-6]}"
    return home.removesuffix("._data") if name == "_data" else ""


def _beside(key: str) -> str:
    """Common prefix of the scale and zero point of such codes: `layers.0._weight_`, `layers.0.weight._`."""
    return key.removesuffix("qdata").removesuffix("data").removesuffix("data._")


def _of_library(key: str, place: TensorBytes, places: BytesByKey) -> Quantised | None:
    """A weight of torchao or quanto in an unsupported packing (int4): its rows are unreadable, and reported so."""
    if not (weight := _weight_of_library(key)):
        return None
    keys = tuple(name for name in places if name.startswith(_beside(key)))
    return Quantised(weight, keys, (), f"packed {place.tensor.dtype}", 1, lambda _first, _last: None)


def _shifted(codes: Matrix, half: Matrix, is_end: npt.NDArray[np.bool_], scale: Matrix, zero: Matrix | None) -> Rows:
    """Codes less their zero points, which quantisers add in bfloat16, so that it rounds once more, by their scales."""
    if zero is not None:
        codes, half = codes - zero, np.asarray(half + _ROUNDING * np.abs(codes), np.float32)
    return Rows(codes * scale, half * np.abs(scale), is_end)


def _floats(dtype: str) -> Matrix:
    values = decoded(np.arange(256, dtype=np.uint8), dtype)
    assert values is not None
    return np.asarray(values, np.float32)


def _half_floats(dtype: str) -> Matrix:
    """float32 [256], half of the distance between neighbouring values at each byte."""
    encoding = ENCODINGS[dtype]
    with np.errstate(divide="ignore"):
        power = np.floor(np.log2(np.abs(np.nan_to_num(_floats(dtype)))))
    return np.asarray(np.exp2(np.maximum(power, 1 - encoding.bias) - encoding.mantissa - 1), np.float32)


# ---------------------------------------------------------------- packed codes


def unpacked(words: npt.NDArray[np.uint32], bits: int) -> Codes:
    """int64 [rows, codes]: codes of so many bits, the first in the lowest bits, which may run on into the next word.

    >>> unpacked(np.array([[0x21, 0]], np.uint32), 4)[0, :3].tolist()
    [1, 2, 0]
    """
    start = np.arange(words.shape[1] * 32 // bits) * bits
    wide = np.concatenate([words, np.zeros((len(words), 1), np.uint32)], axis=1).astype(np.uint64)
    pair = wide[:, :-1] | wide[:, 1:] << np.uint64(32)
    codes = pair[:, start // 32] >> (start % 32).astype(np.uint64) & np.uint64((1 << bits) - 1)
    return np.asarray(codes, np.int64)


def _packed(key: str, place: TensorBytes, places: BytesByKey) -> Quantised | None:
    """Codes in words (`weight_packed`) with `weight_scale`: int1-8 of compressed-tensors, or FP4 in bytes."""
    if not key.endswith("_packed"):
        is_modelopt = place.tensor.dtype == "uint8" and f"{key}_scale_2" in places
        return _fp4(key, place, places, key, f"{key}_scale_2") if is_modelopt else None
    weight = key.removesuffix("_packed")
    if place.tensor.dtype == "uint8":
        return _fp4(key, place, places, weight, f"{weight}_global_scale")
    sizes, scale = _whole(places.get(f"{weight}_shape")), _whole(places.get(f"{weight}_scale"))
    if sizes is None or scale is None or sizes.shape != (2,) or place.tensor.dtype != "int32":
        return None
    shape = int(sizes[0]), int(sizes[1])
    height, width = (*place.shape, 0, 0)[:2]
    bits = width * 32 // max(shape[1], 1)
    if height != shape[0] or not 1 <= bits <= 8 or -(-shape[1] * bits // 32) != width:
        return None
    scheme, group = f"int{bits}, {_in_words(scale, shape)}", _group(scale, shape)
    groups = _whole(places.get(f"{weight}_g_idx"))
    zero = _packed_zeros(places.get(f"{weight}_zero_point"), shape[0], bits)
    if groups is not None and groups.shape == (shape[1],) and groups.min() >= 0:
        scale = scale.reshape(shape[0], -1)[:, groups.astype(np.int64)]
        zero = None if zero is None else zero.reshape(shape[0], -1)[:, groups.astype(np.int64)]
    scales, shift = _spread(scale, shape, None), None if zero is None else _spread(zero, shape, None)
    if scales is None:
        return None

    def rows(first: int, last: int) -> Rows | None:
        words = place.rows(first, last)
        if words is None:
            return None
        codes = unpacked(words.view(np.uint32), bits)[:, : shape[1]]
        values = (codes - (1 << bits - 1)).astype(np.float32)
        half = np.full(values.shape, 0.5, np.float32)
        return _shifted(values, half, _is_end(codes, bits), scales(first, last), shift and shift(first, last))

    endings = ("_packed", "_scale", "_zero_point", "_g_idx", "_shape")
    keys = tuple(name for ending in endings if (name := weight + ending) in places)
    return Quantised(weight, keys, shape, scheme, group, rows)


def _is_end(codes: Codes, bits: int) -> npt.NDArray[np.bool_]:
    return np.asarray((codes == 0) | (codes == (1 << bits) - 1))


def _packed_zeros(place: TensorBytes | None, rows: int, bits: int) -> Matrix | None:
    """float32 [rows, groups]: zero points, packed along the rows."""
    if (words := _words(place)) is None:
        return None
    codes = unpacked(np.ascontiguousarray(words.T), bits)[:, :rows].T
    return np.asarray(codes - (1 << bits - 1), np.float32)


def _fp4(key: str, place: TensorBytes, places: BytesByKey, weight: str, global_key: str) -> Quantised | None:
    """Two FP4 numbers in a byte, the first in the lower half; scales of 32 (MXFP4) or 16 (NVFP4) of them."""
    scale_place = places.get(f"{weight}_scale")
    scale, shape = _whole(scale_place), place.shape
    if scale_place is None or scale is None or len(shape) < 2:
        return None
    is_power = scale_place.tensor.dtype == "uint8"
    if is_power:
        scale = np.exp2(scale - np.float32(127))
    whole = _whole(places.get(global_key))
    if whole is not None and whole.size == 1:
        by = whole.reshape(()).item()
        scale = scale * np.float32(by) if global_key.endswith("_2") else scale / np.float32(by or 1)
    keys = tuple(name for name in (key, f"{weight}_scale", global_key) if name in places)
    return _of_fp4(place, shape, scale, weight, keys, "MXFP4" if is_power else "NVFP4")


def _of_fp4(
    place: TensorBytes, shape: Shape, scale: Matrix, weight: str, keys: tuple[str, ...], scheme: str
) -> Quantised | None:
    """The weight of which each byte holds two FP4 numbers; None where the scales do not fit."""
    real = (*shape[:-1], shape[-1] * 2)
    scales = _spread(scale, real, None)
    if scales is None:
        return None

    def rows(first: int, last: int) -> Rows | None:
        pairs = place.rows(first, last, shape)
        if pairs is None:
            return None
        codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(pairs), -1)
        by, size = scales(first, last), codes & 7
        values = np.where(codes > 7, -_FP4[size], _FP4[size])
        return Rows(values * by, _HALF_FP4[size] * np.abs(by), size == 7)

    return Quantised(weight, keys, real, scheme, _group(scale, real), rows)


def _blocks(key: str, place: TensorBytes, places: BytesByKey) -> Quantised | None:
    """MXFP4 as gpt-oss stores it: `_blocks` [..., groups, 16] and `_scales` [..., groups]."""
    weight = key.removesuffix("_blocks")
    shape = place.shape
    scale = _whole(places.get(f"{weight}_scales"))
    if weight == key or scale is None or len(shape) < 3 or scale.shape != shape[:-1]:
        return None
    joined = *shape[:-2], shape[-2] * shape[-1]
    return _of_fp4(place, joined, np.exp2(scale - np.float32(127)), weight, (key, f"{weight}_scales"), "MXFP4")


def _transposed(key: str, place: TensorBytes, places: BytesByKey) -> Quantised | None:
    """`qweight` of GPTQ, packed along its rows, or of AWQ, packed along its columns: both are [in, out]."""
    if not key.endswith(".qweight"):
        return None
    home = key.removesuffix("qweight")
    scales, words, zeros = _whole(places.get(f"{home}scales")), _words(place), _words(places.get(f"{home}qzeros"))
    if scales is None or scales.ndim != 2 or words is None or zeros is None or not scales.size:
        return None
    groups, out = scales.shape
    bits = zeros.shape[1] * 32 // out
    if not 1 <= bits <= 8 or len(zeros) != groups:
        return None
    # No file of either format names it. GPTQ packs rows of codes (full width, fewer rows), AWQ columns: equal widths of
    # codes and zero points show AWQ, since zero points are packed along columns in both.
    is_awq = words.shape[1] == zeros.shape[1] and bits < 32 and words.shape[1] != out
    width = len(words) if is_awq else len(words) * 32 // bits
    kept = unpacked(zeros, bits)
    if is_awq:
        shift = _in_order(kept, bits)
    else:  # gptqmodel 7.7: the older format holds the zero point less one
        is_second = _option(place, "checkpoint_format") == "gptq_v2"
        shift = kept if is_second else (kept + 1) & (1 << bits) - 1
    size = -(-width // groups)
    index = _whole(places.get(f"{home}g_idx"))
    group = np.arange(width) // size
    if index is not None and index.shape == (width,) and index.min() >= 0 and index.max() < groups:
        group = index.astype(np.int64)

    def rows(first: int, last: int) -> Rows | None:
        if is_awq:
            codes_per_word = 32 // bits
            begin = first // codes_per_word
            codes = _in_order(unpacked(words[:, begin : -(-last // codes_per_word)], bits), bits)
            codes = codes[:, first - begin * codes_per_word : last - begin * codes_per_word].T
        else:
            codes = unpacked(np.ascontiguousarray(words[:, first:last].T), bits)[:, :width]
        by = scales[group, first:last].T
        values = (codes - shift[group, first:last].T).astype(np.float32)
        return Rows(values * by, np.abs(by) * np.float32(0.5), _is_end(codes, bits))

    keys = tuple(name for end in ("qweight", "qzeros", "scales", "g_idx") if (name := home + end) in places)
    scheme = f"{'AWQ' if is_awq else 'GPTQ'}, {bits} bits, groups of {size}"
    return Quantised(f"{home}weight", keys, (out, width), scheme, size, rows)


def _in_order(codes: Codes, bits: int) -> Codes:
    """The columns of AWQ in their order: eight of four bits share a word, the even ones first."""
    if bits != 4:
        return codes
    return codes.reshape(len(codes), -1, 8)[:, :, _AWQ].reshape(len(codes), -1)
