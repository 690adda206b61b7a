"""Digests of tensors on their own device (CPU, CUDA): those of `ckptlint.seals.digests` bit by bit, and of their bytes.

On a GPU by the kernels of `fused_digests`, if Triton is there. All else by eager torch operations on int64, whose
products and sums wrap, in bounded blocks, so that all scratch together stays below 64 MiB. Nothing draws random
numbers, records gradients or waits for the device before the results are fetched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ckptlint.live.collect import fused_digests
from ckptlint.live.collect.limit import Limit, OutOfTime, readable
from ckptlint.model.tiling import BoolArray, IntArray
from ckptlint.seals import digests
from ckptlint.seals.digests import GOLD, MASK
from ckptlint.vocabulary.dtypes import ITEM_BITS

AnyTensor = Any
"""A torch.Tensor; torch is imported by the functions that need it."""

_BLOCK = {"cpu": 1 << 15, "cuda": 1 << 20}
"""Words that are worked on at once: a core's own cache, or enough to fill a GPU; about five of them live at a time.

On the CPU it is also what torch 2.13 gives to one thread (`at::internal::GRAIN_SIZE`): more of them would fight over
the cores that data loaders use.
"""

_PACKED = "float4_e2m1fn_x2"  # two in a byte: ranks may compare the bytes, a seal has to count elements
_SMALL = 1 << 14  # elements up to which tensors are put together
_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST = 31


class Chunk(NamedTuple):
    """A chunk of a tensor on this rank.

    Attributes:
        data: the local tensor; axes of size 1 may be missing or more than in `sizes`.
        offsets, sizes: its place in the whole; shape: of the whole; in elements.
    """

    data: AnyTensor
    offsets: Sequence[int]
    sizes: Sequence[int]
    shape: Sequence[int]


def word_digests(tensors: Sequence[AnyTensor]) -> tuple[IntArray, BoolArray]:
    """The digest of the bytes of each tensor in row-major order: do two ranks hold the same?

    fin(number of bytes) + sum over the little-endian 8-byte words i of fin(word ^ i * GOLD); the tail is padded with
    zero bytes. Many small tensors share their kernels.

    Returns:
        int64 [n], digests; bool [n], whether there is one: not of quantised and sparse tensors, nor of those whose
        memory was freed. Of subclasses that wrap other tensors it is made of theirs, where they name them.

    Raises:
        torch.OutOfMemoryError: there is no room for the scratch.
    """
    readable = [_readable(tensor) for tensor in tensors]
    known = np.array([tensor is not None for tensor in readable], bool)
    devices = [tensor.device if tensor is not None and tensor.is_contiguous() else None for tensor in readable]
    sums, made = fused_digests.kernel_sums(fused_digests.word_sums, readable, devices)
    left = [_bits(tensor) if wanted else None for tensor, wanted in zip(readable, known & ~made, strict=True)]
    sums += _collect(left, _words_of, _words_of_many)
    sizes = np.array([0 if tensor is None else tensor.nbytes for tensor in readable], np.uint64)
    sums += digests.finalise(sizes).view(np.int64)
    for at, tensor in enumerate(tensors):
        kind: Any = type(tensor)
        if not known[at] and wraps_others(kind) and (digest := _flattened(tensor)) is not None:
            sums[at], known[at] = digest, True
    return sums, known


def _flattened(tensor: AnyTensor) -> int | None:
    """The digest of a tensor that keeps its elements in others, by those and all else that makes it up."""
    import torch

    if not hasattr(type(tensor), "__tensor_flatten__") or hasattr(tensor, "trigger_wait"):  # still on its way
        return None
    try:
        names, rest = tensor.__tensor_flatten__()
        if tensor.layout == torch.jagged:  # it remembers the longest and the shortest once somebody asked for them
            names = [name for name in names if not name.endswith("seqlen_tensor")]
        if isinstance(rest, dict):
            rest = {name: value for name, value in rest.items() if name != "requires_grad"}
        inner = {name: getattr(tensor, name) for name in names}
    except Exception:  # the code of the class
        return None
    digest = live_object_digest([type(tensor).__qualname__, inner, rest])
    return None if digest is None else _signed(digest)


def elem_digests(chunks: Sequence[Chunk]) -> tuple[IntArray, BoolArray]:
    """`digests.elem_digest` of each chunk, whatever the strides of its tensor.

    Returns, raises: as `word_digests`; there is no digest either where the tensor is not of the chunk's sizes.
    """
    runs = [_run(chunk) for chunk in chunks]
    devices = [run.data.device if run and len(run.strides) <= fused_digests.MOST_AXES else None for run in runs]
    sums, made = fused_digests.kernel_sums(fused_digests.element_sums, runs, devices)
    left = [None if done else run for run, done in zip(runs, made, strict=True)]
    sums += _collect(left, _elements_of, _elements_of_many)
    return sums, np.array([run is not None for run in runs], bool)


def live_object_digest(value: Any, limit: Limit | None = None) -> int | None:
    """`digests.object_digest` of a value that may hold tensors, dtypes and devices; raises OutOfTime."""
    import torch

    try:
        return digests.object_digest(value, _leaf, (limit or Limit()).look)
    except (OutOfTime, torch.OutOfMemoryError):
        raise
    except Exception:  # code of the value's own class
        return None


def _leaf(value: Any) -> bytes | None:
    import torch

    if isinstance(value, (torch.dtype, torch.device, torch.layout)):
        return str(value).encode()
    if not isinstance(value, torch.Tensor) or not readable([value]).all():
        return None
    (digest,), (known,) = word_digests([value])
    return f"{value.dtype} {tuple(value.shape)} {int(digest) & MASK:016x}".encode() if known else None


# ---------------------------------------------------------------- one by one, or together


def _collect(items: Sequence[Any], single: Any, many: Any) -> IntArray:
    """int64 [n], what `single` gives of each large item and `many` of the small ones; 0 for None.

    Results stay on their device until all were asked for: one copy to the host for each device.
    """
    import torch

    sums = np.zeros(len(items), np.int64)
    results: dict[Any, list[tuple[list[int], AnyTensor]]] = {}
    batches: dict[Any, list[int]] = {}
    with torch.no_grad():
        for number, item in enumerate(items):
            if item is None:
                continue
            data = item.data
            # the places of one run follow from the first one
            if data.numel() > _SMALL or (isinstance(item, _Run) and item.strides not in ((), (1,))):
                results.setdefault(data.device, []).append(([number], single(item).reshape(1)))
            elif data.numel():
                batches.setdefault((data.device, data.dtype), []).append(number)
        for (device, _), numbers in batches.items():
            for batch in _cut(numbers, [items[number].data.numel() for number in numbers], _BLOCK[device.type]):
                results.setdefault(device, []).append((batch, many([items[number] for number in batch])))
        for pairs in results.values():
            values = torch.cat([value for _, value in pairs]).cpu().numpy()
            sums[[number for numbers, _ in pairs for number in numbers]] = values
    return sums


def _cut(numbers: list[int], counts: list[int], limit: int) -> Iterator[list[int]]:
    """The numbers in parts of a bounded count."""
    batch, total = list[int](), 0
    for number, count in zip(numbers, counts, strict=True):
        if batch and total + count > limit:
            yield batch
            batch, total = [], 0
        batch.append(number)
        total += count
    yield batch


def _readable(tensor: AnyTensor) -> AnyTensor | None:
    """The tensor, its elements in memory as they read; None where there is no digest."""
    import torch

    kind: Any = type(tensor)
    if wraps_others(kind) or _integer(tensor.dtype) is None or tensor.layout != torch.strided or tensor.is_nested:
        return None
    if not (tensor.is_cpu or tensor.is_cuda):
        return None
    tensor = _plain(tensor)
    if _stored_and_needed(tensor):
        return None
    return tensor.detach().resolve_conj().resolve_neg() if tensor.is_complex() or tensor.is_neg() else tensor


def _bits(readable: AnyTensor) -> AnyTensor:
    """A tensor as integers of its element's size, a last axis of two for complex."""
    import torch

    tensor = readable.detach()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(_integer(tensor.dtype))


def freed_bytes(tensor: AnyTensor) -> tuple[int, int] | None:
    """The bytes of the storage and those that the elements need, where it has too few: to read them ends the process.

    `untyped_storage().resize_(0)` leaves such tensors, as FSDP1 does with parameters between two uses. None for all
    others, and for those that have no storage of their own.
    """
    import torch

    kind: Any = type(tensor)
    if tensor.layout != torch.strided or wraps_others(kind) or tensor.is_nested:
        return None
    return _stored_and_needed(_plain(tensor))  # a class may give the shape of the whole tensor as its own


def _stored_and_needed(tensor: AnyTensor) -> tuple[int, int] | None:
    """`freed_bytes` of a plain tensor: asked of each tensor at each check, so in a microsecond."""
    if not (reach := tensor.numel()):
        return None
    if not tensor.is_contiguous():
        reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + reach) * tensor.element_size()
    stored = tensor.untyped_storage().nbytes()
    return (stored, needed) if stored < needed else None


def _plain(tensor: AnyTensor) -> AnyTensor:
    """The tensor without what a subclass of it overrides; a parameter overrides nothing that is read."""
    import torch

    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return tensor if is_plain else tensor.detach().as_subclass(torch.Tensor)


@cache
def wraps_others(kind: type) -> bool:
    """Whether a class of tensors keeps its elements in other tensors."""
    import torch

    dispatch: Any = getattr(kind, "__torch_dispatch__", None)
    return kind is not torch.Tensor and dispatch is not torch.Tensor.__torch_dispatch__


@cache
def _integer(dtype: Any) -> Any:
    """The integers that a dtype is read as, of the size of its real numbers; None for quantised ones."""
    import torch

    if (name := str(dtype).removeprefix("torch.")) not in ITEM_BITS and name != _PACKED:
        return None
    size = dtype.itemsize // (2 if dtype.is_complex else 1)
    return (torch.uint8, torch.int16, torch.int32, torch.int64)[size.bit_length() - 1]


# ---------------------------------------------------------------- bytes in order


def _words_of(bits: AnyTensor) -> AnyTensor:
    """int64, the sum over the words of one tensor."""
    import torch

    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    block = _BLOCK[bits.device.type]
    for number, piece in enumerate(_row_major(bits, block * 8 // bits.element_size())):
        words = _as_words(piece.view(torch.uint8))
        keys = torch.arange(len(words), device=bits.device)
        keys.mul_(_signed(GOLD)).add_(_signed(number * block * GOLD))
        total += _fin(keys.bitwise_xor_(words)).sum()
    return total


def _words_of_many(tensors: list[AnyTensor]) -> AnyTensor:
    """int64 [n], the sums over the words of tensors of one dtype."""
    import torch

    device, item = tensors[0].device, tensors[0].element_size()
    per_word = 8 // item
    padding = torch.zeros(per_word, dtype=tensors[0].dtype, device=device)
    pieces: list[AnyTensor] = []
    for tensor in tensors:
        pieces.append(tensor.reshape(-1))
        if rest := -tensor.numel() % per_word:
            pieces.append(padding[:rest])
    words = torch.cat(pieces).view(torch.int64)
    counts = [-(-tensor.numel() // per_word) for tensor in tensors]
    keys = _keys([0] * len(counts), counts, device)
    return _sums(_fin(keys.bitwise_xor_(words)), counts)


def _row_major(tensor: AnyTensor, count: int) -> Iterator[AnyTensor]:
    """The elements in row-major order as contiguous runs of `count`, the last one shorter."""
    import torch

    if tensor.is_contiguous():
        yield from tensor.reshape(-1).split(count)
        return
    pieces, have = list[AnyTensor](), 0
    for piece in _pieces(tensor, count):
        flat = piece.reshape(-1)
        while len(flat):
            pieces.append(flat[: count - have])
            have += len(pieces[-1])
            flat = flat[len(pieces[-1]) :]
            if have == count:
                yield torch.cat(pieces)
                pieces, have = [], 0
    if pieces:
        yield torch.cat(pieces)


def _pieces(tensor: AnyTensor, count: int) -> Iterator[AnyTensor]:
    """Parts of at most `count` elements in row-major order."""
    if tensor.numel() <= count:
        yield tensor
        return
    rows = count * len(tensor) // tensor.numel()
    for piece in tensor.split(max(rows, 1)):
        yield from [piece] if rows else _pieces(piece[0], count)


def _as_words(data: AnyTensor) -> AnyTensor:
    """Bytes as little-endian int64, the tail padded with zeros."""
    import torch

    if rest := -len(data) % 8:
        data = torch.cat([data, data.new_zeros(rest)])
    return (data if data.storage_offset() % 8 == 0 else data.clone()).view(torch.int64)


# ---------------------------------------------------------------- elements with their places


class _Run(NamedTuple):
    """A chunk whose axes are joined where both its memory and the whole tensor run on.

    Attributes:
        data: integers, of the sizes that are left.
        start: number of the first element in the whole tensor, modulo 2^64.
        strides: in the whole tensor, of each axis, in elements, modulo 2^64.
    """

    data: AnyTensor
    start: int
    strides: tuple[int, ...]


def _run(chunk: Chunk) -> _Run | None:
    """The bits of a chunk with their places in the whole tensor; None where they cannot be read."""
    import torch

    offsets, sizes, shape = list(chunk.offsets), list(chunk.sizes), list(chunk.shape)
    readable = _readable(chunk.data)
    if readable is None or str(readable.dtype).endswith(_PACKED):
        return None
    bits = _bits(readable)
    if readable.is_complex():
        offsets, sizes, shape = [*offsets, 0], [*sizes, 2], [*shape, 2]
    if [size for size in bits.shape if size != 1] != [size for size in sizes if size != 1]:
        return None
    whole = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    start = sum(offset * stride for offset, stride in zip(offsets, whole, strict=True))
    memory = [stride for stride, size in zip(bits.stride(), bits.shape, strict=True) if size != 1]
    axes = [(size, stride) for size, stride in zip(sizes, whole, strict=True) if size != 1]
    joined: list[tuple[int, int, int]] = []
    for near, (size, far) in sorted(zip(memory, axes, strict=True), key=lambda pair: -pair[0]):
        if joined and joined[-1][1:] == (size * near, size * far):
            joined[-1] = joined[-1][0] * size, near, far
        else:
            joined.append((size, near, far))
    data = torch.as_strided(bits, [a[0] for a in joined], [a[1] for a in joined])
    return _Run(data, _signed(start), tuple(_signed(a[2]) for a in joined))


def _elements_of(run: _Run) -> AnyTensor:
    """int64, the digest of one chunk."""
    import torch

    device, shape = run.data.device, run.data.shape
    total = torch.zeros((), dtype=torch.int64, device=device)
    for starts, sizes in _boxes(shape, _BLOCK[device.type]):
        piece = run.data[tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))]
        first = run.start + 1 + sum(a * stride for a, stride in zip(starts, run.strides, strict=True))
        keys = torch.full((1,) * len(sizes), _signed(first * GOLD), dtype=torch.int64, device=device)
        for axis, (size, stride) in enumerate(zip(sizes, run.strides, strict=True)):
            ramp = torch.arange(size, device=device).mul_(_signed(stride * GOLD))
            keys = keys + ramp.reshape([-1 if axis == dim else 1 for dim in range(len(sizes))])
        total += _fin(_fin(keys).bitwise_xor_(_unsigned(piece))).sum()
    return total


def _elements_of_many(runs: list[_Run]) -> AnyTensor:
    """int64 [n], the digests of chunks of one dtype, each of which is one run of the whole tensor."""
    import torch

    counts = [run.data.numel() for run in runs]
    device = runs[0].data.device
    keys = _keys([_signed((run.start + 1) * GOLD) for run in runs], counts, device)
    bits = torch.cat([run.data.reshape(-1) for run in runs])
    return _sums(_fin(_fin(keys).bitwise_xor_(_unsigned(bits))), counts)


def _boxes(shape: Sequence[int], count: int) -> Iterator[tuple[list[int], list[int]]]:
    """Starts and sizes of boxes of at most `count` elements that tile a shape, the first axes cut first."""
    if prod(shape) <= count:
        yield [0] * len(shape), list(shape)
        return
    step = max(count // prod(shape[1:]), 1)
    for start in range(0, shape[0], step):
        size = min(step, shape[0] - start)
        for starts, sizes in _boxes(shape[1:], max(count // size, 1)):
            yield [start, *starts], [size, *sizes]


def _unsigned(bits: AnyTensor) -> AnyTensor:
    """Integers as int64, without their sign."""
    import torch

    wide = bits.to(torch.int64)
    size = bits.element_size()
    return wide if size in (1, 8) else wide.bitwise_and_((1 << 8 * size) - 1)  # one byte is uint8


# ---------------------------------------------------------------- arithmetic


def _fin(words: AnyTensor) -> AnyTensor:
    """`digests.finalise` in place; `>>` of int64 is arithmetic, so the copies of the sign are masked off."""
    for shift, factor in _STEPS:
        words ^= (words >> shift).bitwise_and_((1 << 64 - shift) - 1)
        words *= _signed(factor)
    words ^= (words >> _LAST).bitwise_and_((1 << 64 - _LAST) - 1)
    return words


def _signed(word: int) -> int:
    """A word modulo 2^64 as int64 has it."""
    return (word + 2**63 & MASK) - 2**63


def _keys(firsts: list[int], counts: list[int], device: Any) -> AnyTensor:
    """int64 [sum of counts], in each part first, first + GOLD, first + 2 * GOLD, ...: one running sum of the steps."""
    import torch

    first, count = np.array(firsts, np.int64).view(np.uint64), np.array(counts, np.int64)
    last = first + (count - 1).view(np.uint64) * np.uint64(GOLD)
    jumps = first - np.concatenate([np.zeros(1, np.uint64), last[:-1]])
    steps = torch.full((sum(counts),), _signed(GOLD), dtype=torch.int64, device=device)
    steps[_host(np.cumsum(count) - count, device)] = _host(jumps.view(np.int64), device)
    return torch.cumsum(steps, 0)


def _sums(words: AnyTensor, counts: list[int]) -> AnyTensor:
    """int64 [n], the sum of each part, by differences of one running sum."""
    import torch

    running = torch.cat([words.new_zeros(1), torch.cumsum(words, 0)])
    ends = running[_host(np.cumsum(counts), words.device)]
    return torch.diff(ends, prepend=words.new_zeros(1))


def _host(values: IntArray, device: Any) -> AnyTensor:
    import torch

    return torch.from_numpy(values).to(device, non_blocking=True)
