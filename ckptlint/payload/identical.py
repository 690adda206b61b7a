"""Finds records with equal bytes that should differ: chunks of a tensor, layers, experts, gate and up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint, PayloadTable
from ckptlint.model.tiling import IntArray
from ckptlint.payload.records import path_of
from ckptlint.storage.folder import Folder
from ckptlint.vocabulary.dtypes import ITEM_BITS
from ckptlint.vocabulary.keys import gated_role, parse

LEAST_ELEMENTS = 64  # fewer elements may be equal by chance or by construction

_POSITIONS = 16
_SAMPLE = 64
_BATCH = 1024
_NORMS = 512
_ROWS, _PLACES = 16, 4


def find_same(folder: Folder, ckpt: Checkpoint, table: PayloadTable) -> None:
    """Fill `equal_group`, `rows_alike` and `constant`; raises AccessError where a read is refused.

    Records with equal length and CRC-32 are suspects, and up to 1 KiB of each is read. With any suspect the norms are
    sampled too: constant norms show an untrained model, whose chunks may be equal (PAY010: "norms of one value, so
    nothing was trained: info"). One record of each equal group is compared row by row, in up to 4 KiB.
    """
    suspects = _alike(ckpt, table)
    if not suspects:
        return
    samples = _Samples(folder, ckpt, table)
    first = samples.of([int(rows[0]) for rows in suspects])
    open_ones = []
    for rows in suspects:
        if _is_constant(first[int(rows[0])], table, int(rows[0])):
            table.constant[rows] = True
        else:
            open_ones.append(rows)
    if not open_ones:
        return
    taken = first | samples.of([int(row) for rows in open_ones for row in rows[1:]])
    number = 0
    for rows in open_ones:
        for equal in grouped((taken[row], row) for row in rows.tolist()).values():
            if len(equal) > 1:
                table.equal_group[equal] = number
                table.rows_alike[equal] = samples.has_equal_rows(equal[0])
                number += 1
    norms = _norms(ckpt, table)
    for row, sample in samples.of(norms).items():
        table.constant[row] = _is_constant(sample, table, row)


def _alike(ckpt: Checkpoint, table: PayloadTable) -> list[IntArray]:
    """Rows of records with equal length and checksum among tensors of one role, in any layer, or of one gated unit."""
    family = np.full(len(ckpt.records), -1, np.int64)
    numbers: dict[str, int] = {}
    for tensor in ckpt.tensors.values():
        rows = tensor.chunks.record[tensor.chunks.record >= 0]
        key = parse(tensor.fqn)
        gated = gated_role(key) if len(rows) == 1 and ckpt.is_safetensors else ""
        is_layered = key.expert is not None or key.layer is not None
        if not tensor.dtype.startswith(("float", "bfloat", "complex")) or (len(rows) < 2 and not is_layered):
            continue
        name = f"{key.scope} {gated or key.role} {tensor.dtype}" if is_layered else tensor.fqn
        family[rows] = numbers.setdefault(name, len(numbers))
    least = np.array([LEAST_ELEMENTS * ITEM_BITS.get(content.dtype, 0) // 8 for content in table.contents] or [0])
    is_whole = np.array([content.volume * ITEM_BITS.get(content.dtype, 0) // 8 for content in table.contents] or [0])
    good = (table.start >= 0) & (family >= 0) & (table.crc > 0) & (table.storages == 1)
    rows = np.flatnonzero(good)
    content = table.content[rows]
    # A view saved with its whole storage repeats that storage in each record (PAY010: "views of one bucket repeat the
    # whole bucket"), so only records that are exactly their tensor count.
    rows = rows[(table.size[rows] == is_whole[content]) & (least[content] > 0) & (table.size[rows] >= least[content])]
    columns = np.stack([family[rows], table.size[rows], table.crc[rows]], axis=1)
    order = np.lexsort(columns.T[::-1])
    rows, columns = rows[order], columns[order]
    cuts = np.flatnonzero((columns[1:] != columns[:-1]).any(axis=1)) + 1
    return [group for group in np.split(rows, cuts) if len(group) > 1] if len(rows) else []


def _norms(ckpt: Checkpoint, table: PayloadTable) -> list[int]:
    rows: list[int] = []
    for tensor in ckpt.tensors.values():
        if len(rows) >= _NORMS:
            break
        key = parse(tensor.fqn)
        if key.kind == "model" and key.function == "norm" and tensor.fqn.endswith("weight"):
            rows += [row for row in tensor.chunks.record.tolist() if row >= 0 and table.start[row] >= 0]
    return [row for row in rows if table.size[row] > 0]


def _is_constant(sample: bytes, table: PayloadTable, row: int) -> bool:
    item = max(ITEM_BITS.get(table.contents[int(table.content[row])].dtype, 8) // 8, 1)
    return sample[: len(sample) - len(sample) % item] == sample[:item] * (len(sample) // item)


class _Samples:
    """Samples of records: 64 bytes at 16 evenly spaced positions, or all bytes of a small record."""

    def __init__(self, folder: Folder, ckpt: Checkpoint, table: PayloadTable) -> None:
        self.folder, self.ckpt, self.table = folder, ckpt, table

    def of(self, rows: Sequence[int]) -> dict[int, bytes]:
        samples: dict[int, bytes] = {}
        for file, mine in grouped((int(self.ckpt.records.file[row]), row) for row in rows).items():
            for at in range(0, len(mine), _BATCH):
                batch = mine[at : at + _BATCH]
                spans = [self._spans(row) for row in batch]
                data = iter(self.folder.ranges(path_of(self.ckpt, file), [span for of_row in spans for span in of_row]))
                for row, of_row in zip(batch, spans, strict=True):
                    samples[row] = b"".join(next(data) for _ in of_row)
        return samples

    def has_equal_rows(self, row: int) -> bool:
        """Whether samples of all rows (axis 0) of a record are equal, and not constant."""
        content = self.table.contents[int(self.table.content[row])]
        start, size = int(self.table.start[row]), int(self.table.size[row])
        count = content.shape[0] if len(content.shape) > 1 and content.dtype != "unknown" else 0
        if count < 2 or content.strides[0] * count != content.volume:
            return False
        length = size // count
        width = min(_SAMPLE, length)
        item = size // content.volume
        places = [place * ((length - width) // (_PLACES - 1)) // item * item for place in range(_PLACES)]
        rows = np.linspace(0, count - 1, min(count, _ROWS)).astype(int).tolist()
        spans = [(start + i * length + place, width) for i in rows for place in places]
        samples = self.folder.ranges(path_of(self.ckpt, int(self.ckpt.records.file[row])), spans)
        first = samples[:_PLACES]
        is_equal = all(samples[i : i + _PLACES] == first for i in range(0, len(samples), _PLACES))
        return is_equal and not _is_constant(b"".join(first), self.table, row)

    def _spans(self, row: int) -> list[tuple[int, int]]:
        start, size = int(self.table.start[row]), int(self.table.size[row])
        if size <= _POSITIONS * _SAMPLE:
            return [(start, size)]
        step = (size - _SAMPLE) // (_POSITIONS - 1)
        step -= step % 16  # whole elements of every dtype
        return [(start + i * step, _SAMPLE) for i in range(_POSITIONS)]
