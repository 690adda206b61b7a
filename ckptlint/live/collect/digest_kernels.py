"""The sums of `tensor_digest` as Triton kernels, each of which reads many tensors in one launch.

A program works on one row of a table: where a tensor lies, which range of it to read, and where to add the sum. Rows
are made by `fused_digests`; Triton is needed to import this module.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# ruff: noqa: N803 -- Triton's constants are in capitals

import triton
import triton.language as tl

from ckptlint.seals.digests import GOLD

INTEGERS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}
"""Without sign, by their size in bytes."""

_GOLD = tl.constexpr(GOLD)


@triton.jit
def _fin(words):
    """`digests.finalise` of uint64."""
    words = (words ^ (words >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    words = (words ^ (words >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return words ^ (words >> 31)


@triton.jit
def _keyed(words, at):
    return _fin(words ^ (at.to(tl.uint64) * tl.full((), _GOLD, tl.uint64)))


@triton.jit
def word_tiles(rows, sums, ALIGNED: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr):
    """Adds the sums over words to `sums`, int64 [n].

    Args:
        rows: int64 [programs, 4], address of a tensor, first byte (a multiple of 8), end byte, place in `sums`.
        ALIGNED: 16 or 8, of which all addresses are multiples and 8 all ends; or 1, where bytes are read one by one.
        TILE: words that need no mask; STEP: words that are read at once.
    """
    row = rows + tl.program_id(0) * 4
    data, single = tl.load(row).to(tl.pointer_type(tl.int64)), tl.load(row).to(tl.pointer_type(tl.uint8))
    begin, stop = tl.load(row + 1) // 8, tl.load(row + 2)
    end = (stop + 7) // 8
    total = tl.zeros((STEP,), tl.uint64)
    if ALIGNED > 1:
        whole = begin + (end - begin) // TILE * TILE
        for tile in range(begin, whole, TILE):  # without a mask a thread loads 16 bytes at once
            for step in tl.static_range(0, TILE, STEP):
                at = tile + step + tl.arange(0, STEP)
                here = data + at
                if ALIGNED == 16:
                    here = tl.max_contiguous(tl.multiple_of(here, 16), STEP)
                total += _keyed(tl.load(here, eviction_policy="evict_first").to(tl.uint64), at)
        begin = whole
    for step in range(begin, end, STEP):
        at = step + tl.arange(0, STEP)
        if ALIGNED > 1:
            words = tl.load(data + at, mask=at < end, other=0).to(tl.uint64)
        else:
            words = tl.zeros((STEP,), tl.uint64)
            for byte in tl.static_range(8):
                here = at * 8 + byte
                words |= tl.load(single + here, mask=here < stop, other=0).to(tl.uint64) << (8 * byte)
        total += tl.where(at < end, _keyed(words, at), 0)
    tl.atomic_add(sums + tl.load(row + 3), tl.sum(total.to(tl.int64), 0))


@triton.jit
def element_tiles(rows, sums, INTEGER: tl.constexpr, AXES: tl.constexpr, STEP: tl.constexpr):
    """Adds the sums over elements to `sums`, int64 [n].

    Args:
        rows: int64 [programs, 5 + 3 * AXES], address of a tensor, first element, end, place in `sums`, number of the
            tensor's first element in the whole; of each axis, the fastest last: size, stride in memory, in the whole.
        INTEGER: dtype that an element is read as, of `INTEGERS`; STEP: elements that are read at once.
    """
    row = rows + tl.program_id(0) * (5 + 3 * AXES)
    first, end, start = tl.load(row + 1), tl.load(row + 2), tl.load(row + 4)
    data = tl.load(row).to(tl.pointer_type(INTEGER))
    total = tl.zeros((STEP,), tl.uint64)
    for begin in range(first, end, STEP):
        at = begin + tl.arange(0, STEP)
        rest = at
        near = tl.zeros((STEP,), tl.int64)
        far = tl.zeros((STEP,), tl.int64) + start + 1
        for axis in tl.static_range(AXES - 1, -1, -1):
            size = tl.load(row + 5 + 3 * axis)
            index = rest
            if axis > 0:
                index = rest % size
                rest = rest // size
            near += index * tl.load(row + 6 + 3 * axis)
            far += index * tl.load(row + 7 + 3 * axis)
        bits = tl.load(data + near, mask=at < end, other=0).to(tl.uint64)
        keys = _keyed(tl.zeros((STEP,), tl.uint64), far)
        total += tl.where(at < end, _fin(keys ^ bits), 0)
    tl.atomic_add(sums + tl.load(row + 3), tl.sum(total.to(tl.int64), 0))
