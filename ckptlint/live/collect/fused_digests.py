"""The sums of `tensor_digest` on a GPU by Triton kernels: all tensors of a device in one launch of each kernel.

A table says which tile of which tensor each program reads. It is made here, on the host, and never takes more than
`TABLE_BYTES`: the tiles of a larger state are larger. Where Triton is missing or fails, nothing is lost but speed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ckptlint.model.layout import BoolArray, IntArray

AnyTensor = Any
TABLE_BYTES = 1 << 21
MOST_AXES = 6
"""Of a chunk, after those were joined where memory runs on; the kernels divide once for each."""

_FUSED_ON = "cuda"
_TILE, _WORDS, _ELEMENTS = 8192, 2048, 1024  # words or elements of a tile, and those that are read at once

_failed = False


def kernel_sums(
    make: Callable[[list[Any]], AnyTensor], items: Sequence[Any], devices: Sequence[Any]
) -> tuple[IntArray, BoolArray]:
    """What `make` (`word_sums`, `element_sums`) gives of the items on GPUs.

    Args:
        devices: the torch.device of each item; None for what the kernels do not read.

    Returns:
        int64 [n], sums, 0 for others; bool [n], whether the sum was made. After a first error of Triton no sums are
        made in this process; a warning says so once.

    Raises:
        torch.OutOfMemoryError: there is no room for the table.
    """
    import torch

    global _failed
    sums, made = np.zeros(len(items), np.int64), np.zeros(len(items), bool)
    places: dict[Any, list[int]] = {}
    for number, device in enumerate(devices):
        if device is not None:
            places.setdefault(device, []).append(number)
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
            text = f"{type(error).__name__}: {error}"
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

    from ckptlint.live.collect.digest_kernels import element_tiles

    sums = torch.zeros(len(runs), dtype=torch.int64, device=runs[0].data.device)
    kinds: dict[tuple[int, int], list[list[int]]] = {}
    for number, (data, start, strides) in enumerate(runs):
        axes = [n for axis in zip(data.shape, data.stride(), strides, strict=True) for n in axis] or [1, 0, 0]
        kind = 8 * data.element_size(), len(axes) // 3
        kinds.setdefault(kind, []).append([data.data_ptr(), 0, data.numel(), number, start, *axes])
    for (bits, count), spans in kinds.items():
        for rows in tables(np.array(spans, np.int64), _TILE):
            _launch(element_tiles, rows, sums, bits, count, _ELEMENTS)
    return sums


def word_spans(address: IntArray, size: IntArray) -> Iterator[tuple[int, IntArray]]:
    """What is read of tensors, by the alignment with which it can be read: 16, 8 or 1 byte.

    Returns:
        the alignment; int64 [k, 4], address, first byte, end, number of the tensor. Bytes after the last whole word
        are read one by one.
    """
    number, whole = np.arange(len(size)), size // 8 * 8
    every = np.stack([address, np.zeros_like(size), whole, number], 1)
    tails = np.stack([address, whole, size, number], 1)[(size > whole) & (address % 8 == 0)]
    every[address % 8 != 0, 2] = size[address % 8 != 0]
    yield 16, every[address % 16 == 0]
    yield 8, every[address % 16 == 8]
    yield 1, np.concatenate([every[address % 8 != 0], tails])


def tables(spans: IntArray, tile: int) -> Iterator[IntArray]:
    """Spans cut into tiles: one table for each launch.

    Args:
        spans: int64 [n, c], each row address, first, end, ...; tile: the least length of a tile.

    Returns:
        int64 [tiles, c], not empty, of at most TABLE_BYTES; its rows are those of `spans`, each with a first and an
        end of its own.
    """
    most = TABLE_BYTES // (8 * spans.shape[1])
    for begin in range(0, len(spans), most // 2):
        some = spans[begin : begin + most // 2]
        length, step = some[:, 2] - some[:, 1], tile
        while (count := -(-length // step)).sum() > most:
            step *= 2
        if not count.any():
            continue
        rows = some.repeat(count, 0)
        rows[:, 1] += (np.arange(len(rows)) - (np.cumsum(count) - count).repeat(count)) * step
        np.minimum(rows[:, 1] + step, rows[:, 2], out=rows[:, 2])
        yield rows


def _launch(kernel: Any, rows: IntArray, sums: AnyTensor, *constants: int) -> None:
    import torch

    table = torch.from_numpy(rows)
    if sums.is_cuda:
        table = table.pin_memory().to(sums.device, non_blocking=True)
    with torch.cuda.device(sums.get_device()):  # Triton launches on the current one
        kernel[(len(rows),)](table, sums, *constants)
