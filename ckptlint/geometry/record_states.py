"""Whether the bytes of each record are there: what every picture of a checkpoint shows of what is lost."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt

from ckptlint.model import Checkpoint, RecordState, RecordTable, Tensor
from ckptlint.model.facts import fact
from ckptlint.model.tiling import IntArray
from ckptlint.storage.folder import READABLE
from ckptlint.vocabulary.dtypes import nbytes

STATES = ("there", "not checked", "failed", "cut", "missing")
"""What is known of the bytes of a record, from the best to the worst.

`there`: as far as it was looked at, they are; `not checked`: nobody looked at the file; `failed`: they differ from a
checksum, or are no readable record (depths `headers` and `data`); `cut`: the file ends before the record does, or the
record is shorter than its chunk; `missing`: the file is not there or must not be opened, or no place names the bytes.
"""
THERE, NOT_CHECKED, FAILED, CUT, MISSING = range(len(STATES))
_HEADER = 10
"""Least bytes of a safetensors header: its length and an empty object."""

StateArray = npt.NDArray[np.uint8]


@fact
def record_states(ckpt: Checkpoint) -> StateArray:
    """uint8 [m], for each of `Checkpoint.records` the position of its state in `STATES`."""
    table, files = ckpt.records, ckpt.files
    states = np.zeros(len(table), np.uint8)
    if not len(table) or ckpt.ranks is not None:  # a running job has stored nothing yet
        return states
    size = files.size[table.file]
    states[size < 0] = NOT_CHECKED
    if ckpt.payload is not None:  # unreadable, or its bytes or file differ from a checksum
        states[ckpt.payload.state == RecordState.UNREADABLE] = FAILED
        damages = [damage for damage in ckpt.payload.damages if damage.record >= 0 or not damage.member]
        states[[damage.record for damage in damages if damage.record >= 0]] = FAILED
        whole = {damage.file for damage in damages if damage.record < 0}
        states[np.fromiter((name in whole for name in files.names), bool, len(files))[table.file]] = FAILED
    if ckpt.locates_bytes:
        states[(size >= 0) & (table.byte_length > size - table.byte_offset)] = CUT
    else:
        for rows in rows_by_file(table, ~table.transformed):
            if 0 <= size[rows[0]] < least_container(table, rows)[1]:
                states[rows] = CUT
    if ckpt.storages is None:  # of torch files the pickle says how long a storage is
        states[~table.transformed & (table.byte_length < needed_bytes(ckpt)[0])] = CUT
    states[(table.byte_offset < 0) | (table.byte_length < 0)] = MISSING
    states[~files.are(*READABLE, "unchecked")[table.file]] = MISSING
    return states


def chunk_states(ckpt: Checkpoint, tensor: Tensor) -> StateArray:
    """uint8 [n], for each chunk of a tensor the position of its record's state in `STATES`.

    A chunk without a record is `missing`, unless it is empty, or a rank of a running job holds it.
    """
    record = tensor.chunks.record
    states = np.full(len(record), THERE if ckpt.ranks is not None else MISSING, np.uint8)
    states[~tensor.tiling.live] = THERE
    states[record >= 0] = record_states(ckpt)[record[record >= 0]]
    return states


def rows_by_file(table: RecordTable, chosen: npt.NDArray[np.bool_]) -> list[IntArray]:
    """The chosen rows, those of one file together."""
    rows = np.flatnonzero(chosen)
    rows = rows[np.argsort(table.file[rows], kind="stable")]
    return np.split(rows, np.flatnonzero(np.diff(table.file[rows])) + 1) if len(rows) else []


def least_container(table: RecordTable, rows: IntArray) -> tuple[IntArray, int]:
    """Of the rows of one file those in its last safetensors container, and how many bytes the file has at least."""
    start = int(table.byte_offset[rows].max())
    rows = rows[table.byte_offset[rows] == start]
    longest: dict[int, int] = {}  # a header has one entry for each key
    for fqn, length in zip(table.fqn[rows].tolist(), table.byte_length[rows].tolist(), strict=True):
        longest[fqn] = max(longest.get(fqn, 0), length)
    return rows, start + _HEADER + sum(longest.values()) if start >= 0 else 0


def needed_bytes(ckpt: Checkpoint) -> tuple[IntArray, np.ndarray]:
    """For each record the bytes of its chunk, -1 where they are not known; and whether it holds a chunk at all."""
    needed = np.full(len(ckpt.records), -1, np.int64)
    is_tensor = np.zeros(len(ckpt.records), bool)
    by_rank = defaultdict[int, list[Tensor]](list)
    for tensor in ckpt.tensors.values():
        by_rank[tensor.tiling.sizes.shape[1]].append(tensor)
        if tensor.malformed:
            is_tensor[[chunk.record for chunk in tensor.malformed if chunk.record >= 0]] = True
    for tensors in by_rank.values():
        record = np.concatenate([tensor.chunks.record for tensor in tensors])
        sizes = np.concatenate([tensor.tiling.sizes for tensor in tensors])
        known = [nbytes(tensor.dtype, 1) if tensor.is_sound else None for tensor in tensors]
        counts = [len(tensor.chunks) for tensor in tensors]
        item = np.repeat(np.array([-1 if size is None else size for size in known], np.int64), counts)
        volume = sizes.astype(float).prod(axis=1)
        fits = (record >= 0) & (item >= 0) & (sizes >= 0).all(axis=1) & (volume < 2**55)
        is_tensor[record[record >= 0]] = True
        needed[record[fits]] = sizes[fits].prod(axis=1) * item[fits]
    return needed, is_tensor
