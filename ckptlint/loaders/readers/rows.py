"""Tensors of files that each describe themselves, one row for what one file holds of one, as a checkpoint's tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ckptlint.grouping import grouped
from ckptlint.model import ChunkTable, MalformedChunk, RecordTable, Tensor
from ckptlint.model.cover import Budget
from ckptlint.model.files import Names
from ckptlint.model.text import printable
from ckptlint.model.tiling import Tiling


class Row(NamedTuple):
    """What one file, by its number, holds of a tensor: raw key, torch's dtype, first byte and length in the file.

    Attributes:
        shape: of the whole tensor, None where its chunks say it.
        offsets: where the part is in that, None where that is not known or another file holds the same.
        sizes: of the part.
        is_flat: whether it is a piece of a tensor that was made one-dimensional.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...] | None
    offsets: tuple[int, ...] | None
    sizes: tuple[int, ...]
    file: int
    start: int
    length: int
    is_flat: bool = False


def tables(rows: Sequence[Row], owned: Any) -> tuple[dict[str, Tensor], RecordTable]:
    """Tensors by their printable keys, and their records; row i is record i, and a chunk where `owned` (bool [n])."""
    by_key = grouped((row.fqn, i) for i, row in enumerate(rows))
    number = {fqn: i for i, fqn in enumerate(by_key)}
    tilings: dict[tuple[Any, ...], Tiling] = {}
    budget = Budget()
    tensors = [_tensor(rows, of_key, owned, tilings, budget) for of_key in by_key.values()]
    count = len(rows)
    stray = np.flatnonzero(~owned).tolist()
    records = RecordTable(
        fqns=Names.of(map(printable, number)),
        fqn=np.fromiter((number[row.fqn] for row in rows), np.int32, count),
        file=np.fromiter((row.file for row in rows), np.int32, count),
        byte_offset=np.fromiter((row.start for row in rows), np.int64, count),
        byte_length=np.fromiter((row.length for row in rows), np.int64, count),
        transformed=np.zeros(count, bool),
        owned=owned,
        unreferenced={i: rows[i].offsets for i in stray},
        copies={i: (rows[i].dtype, rows[i].sizes) for i in stray},
    )
    return {tensor.fqn: tensor for tensor in tensors}, records


def _tensor(
    rows: Sequence[Row], of_key: list[int], owned: Any, tilings: dict[tuple[Any, ...], Tiling], budget: Budget
) -> Tensor:
    """The tensor of one key; one chunk without a record where nothing says where its parts lie."""
    chunks = [(i, rows[i].offsets or (), rows[i].sizes) for i in of_key if owned[i]]
    first = rows[chunks[0][0] if chunks else of_key[0]]
    shape = next((rows[i].shape for i in of_key if rows[i].shape is not None), None)
    axes = len(first.sizes if shape is None else shape)
    fitting = [chunk for chunk in chunks if len(chunk[1]) == len(chunk[2]) == axes]
    others = [chunk for chunk in chunks if not len(chunk[1]) == len(chunk[2]) == axes]
    if not chunks and shape is not None:
        fitting = [(-1, (0,) * axes, shape)]
    record = np.array([i for i, _, _ in fitting], np.int64)
    offsets = np.array([begin for _, begin, _ in fitting], np.int64).reshape(len(fitting), axes)
    sizes = np.array([size for _, _, size in fitting], np.int64).reshape(len(fitting), axes)
    if shape is None:
        shape = tuple((offsets + sizes).max(axis=0, initial=0).tolist())
    key = (shape, len(fitting), offsets.tobytes(), sizes.tobytes())  # a scalar's chunks have no bytes
    tiling = tilings.setdefault(key, Tiling(shape, offsets, sizes, budget))
    return Tensor(
        fqn=printable(first.fqn),
        dtype=first.dtype,
        global_shape=shape,
        chunks=ChunkTable(tiling, record),
        malformed=tuple(MalformedChunk(begin, size, i) for i, begin, size in others),
        is_flattened=first.is_flat,
    )
