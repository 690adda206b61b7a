"""The sums of `tensor_digest` on a GPU by Triton kernels: all tensors of a device in one launch of each kernel.

A table says which tile of which tensor each program reads. It is made on the host and never takes more than
TABLE_BYTES: the tiles of a larger state are larger. Where Triton is missing or fails, nothing is lost but speed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ckptlint.grouping import grouped
from ckptlint.model.tiling import BoolArray, IntArray

AnyTensor = Any
Sums = tuple[IntArray, BoolArray]
TABLE_BYTES = 1 << 18
"""Making a larger table takes longer than smaller tiles save."""
MOST_AXES = 6
"""Of a chunk, after those were joined where memory runs on; the kernels divide once for each."""

_FUSED_ON = "cuda"
_TILE, _WORDS, _ELEMENTS = 8192, 2048, 1024  # words or elements of a tile, and those that are read at once
_failed = False


def kernel_sums(make: Callable[[list[Any]], AnyTensor], items: Sequence[Any], devices: Sequence[Any]) -> Sums:
    """What `make` (`word_sums`, `element_sums`) gives of the items on GPUs.

    Args:
        devices: the torch.device of each item; None for what the kernels do not read.

    Returns:
        int64 [n], sums, 0 for others; bool [n], whether the sum was made. After a first error of Triton, which a
        warning names, none is made in this process.

    Raises:
        torch.OutOfMemoryError: there is no room for the table.
    """
    import torch

    global _failed
    sums, made = np.zeros(len(items), np.int64), np.zeros(len(items), bool)
    places = grouped((device, number) for number, device in enumerate(devices) if device is not None)
    try:
        for device, numbers in places.items():
            if device.type == _FUSED_ON and not _failed:
                sums[numbers] = make([items[number] for number in numbers]).cpu().numpy()
                made[numbers] = True
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # no compiler on the node, a GPU that Triton does not know: eager sums are the same
        _failed = True
        if not (isinstance(error, ModuleNotFoundError) and error.name == "triton"):
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            warnings.warn(f"ckptlint: digests are taken without Triton, more slowly: {text}", stacklevel=2)
    return sums, made


def word_sums(tensors: Sequence[AnyTensor]) -> AnyTensor:
    """int64 [n] on the device of all tensors: sums over the words of contiguous tensors, at any address."""
    import torch

    from ckptlint.live.collect.digest_kernels import word_tiles

    sums = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device)
    address = np.array([tensor.data_ptr() for tensor in tensors], np.int64)
    for aligned, spans in word_spans(address, np.array([tensor.nbytes for tensor in tensors], np.int64)):
        for rows in tables(spans, 8 * _TILE):
            _launch(word_tiles, rows, sums, aligned, _TILE, _WORDS)
    return sums


def element_sums(runs: Sequence[Any]) -> AnyTensor:
    """int64 [n] on the device of all runs (`tensor_digest._Run`): sums over the elements, of at most MOST_AXES axes."""
    import torch

    from ckptlint.live.collect.digest_kernels import INTEGERS, element_tiles

    sums = torch.zeros(len(runs), dtype=torch.int64, device=runs[0].data.device)
    kinds: dict[tuple[int, int], list[list[int]]] = {}
    for number, (data, start, strides) in enumerate(runs):
        axes = [n for axis in zip(data.shape, data.stride(), strides, strict=True) for n in axis] or [1, 0, 0]
        kind = data.element_size(), len(axes) // 3
        kinds.setdefault(kind, []).append([data.data_ptr(), 0, data.numel(), number, start, *axes])
    for (size, count), spans in kinds.items():
        for rows in tables(np.array(spans, np.int64), _TILE):
            _launch(element_tiles, rows, sums, INTEGERS[size], count, _ELEMENTS)
    return sums


def word_spans(address: IntArray, size: IntArray) -> Iterator[tuple[int, IntArray]]:
    """The alignment in bytes, and int64 [k, 4], what can be read so: address, first byte, end, number of the tensor."""
    number = np.arange(len(size))
    whole = np.where(address % 8, 0, size // 8 * 8)
    words = np.stack([address, np.zeros_like(size), whole, number], 1)
    yield 16, words[address % 16 == 0]
    yield 8, words[address % 16 == 8]
    yield 1, np.stack([address, whole, size, number], 1)[whole < size]  # odd addresses and tails


def tables(spans: IntArray, tile: int) -> Iterator[IntArray]:
    """Spans, int64 [n, c] of address, first, end, ..., cut into tiles: int64 [tiles, c], a table for each launch.

    A tile is `tile` long, or twice, four times, ... as long where the table would take more than TABLE_BYTES.
    """
    most = TABLE_BYTES // (8 * spans.shape[1])
    for begin in range(0, len(spans), most // 2):
        some = spans[begin : begin + most // 2]
        length, step = some[:, 2] - some[:, 1], tile
        while (count := -(-length // step)).sum() > most:
            step *= 2
        rows = some.repeat(count, 0)
        rows[:, 1] += (np.arange(len(rows)) - (np.cumsum(count) - count).repeat(count)) * step
        np.minimum(rows[:, 1] + step, rows[:, 2], out=rows[:, 2])
        if len(rows):
            yield rows


def _launch(kernel: Any, rows: IntArray, sums: AnyTensor, *constants: Any) -> None:
    import torch

    table = torch.from_numpy(rows)
    if sums.is_cuda:
        table = table.pin_memory().to(sums.device, non_blocking=True)
    with torch.cuda.device(sums.get_device()):  # Triton launches on the current one
        kernel[(len(rows),)](table, sums, *constants)
