"""The members of a payload file, and what to look at in each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from ckptlint.model import PayloadTable, RecordContent, Tensor
from ckptlint.model.layout import IntArray
from ckptlint.payload.record_headers import AlikeRecords, Record
from ckptlint.payload.stream import Members, Scan
from ckptlint.seals.digests import Elements, elements
from ckptlint.vocabulary.dtypes import ENCODINGS, ITEM_BITS


def members_of(records: Sequence[Record], alike: Sequence[AlikeRecords] = ()) -> Members:
    """The members of the records of one file, record by record in the order in which these lie there."""
    names: dict[str, int] = {}
    rows = [
        (record.row, part.start, part.size, part.crc, names.setdefault(part.name, len(names)), record.parts[0].start)
        for record in records
        for part in record.parts
    ]
    columns = [np.array(rows or np.zeros((0, 6)), np.int64).T]
    for group in alike:
        shape = len(group.rows), len(group.names)
        named = np.array([names.setdefault(name, len(names)) for name in group.names], np.int64)
        start = group.offset[:, None] + group.start
        parts = (group.rows[:, None], start, group.size, group.crc, named, start[:, :1])
        columns.append(np.stack([np.broadcast_to(part, shape).reshape(-1) for part in parts]))
    whole = np.concatenate(columns, axis=1)
    return _members(whole[:5, np.argsort(whole[5], kind="stable")], list(names))


def with_bare_tensors(first: Members | None, table: PayloadTable, rows: IntArray) -> Members:
    """The members of a file together with tensors that lie bare in it, and have no checksum."""
    first = first or members_of([])
    bare = [rows, table.start[rows], table.size[rows], np.zeros_like(rows), np.full_like(rows, len(first.names))]
    columns = np.stack([first.row, first.start, first.size, first.crc, first.name])
    both = np.concatenate([columns, np.stack(bare)], axis=1)
    return _members(both[:, np.argsort(both[1], kind="stable")], [*first.names, "tensor"])


def _members(columns: IntArray, names: list[str]) -> Members:
    row, start, size, crc, name = columns
    return Members(row, start, size, crc, name, names)


def scans_of(
    table: PayloadTable,
    members: Members,
    sealed: Mapping[int, tuple[Tensor, int]],
    raw: Mapping[int, tuple[Tensor, int]],
) -> dict[int, Scan]:
    """The members that hold a floating tensor, or one that was sealed, with the part of them that it covers.

    Args:
        sealed: record -> tensor and row of its chunk, where a digest is wanted.
        raw: the same of the records that hold the bare bytes of their chunk.
    """
    scans = {}
    is_storage = np.flatnonzero((members.start == table.start[members.row]) & (members.size == table.size[members.row]))
    for member in is_storage.tolist():
        record = int(members.row[member])
        tensor, row = sealed.get(record, (None, -1))
        content = table.of(record)
        if content is None and record in raw:
            content = _bare(*raw[record])
        if content is None or content.form != "tensor" or content.dtype not in ITEM_BITS:
            continue
        item = ITEM_BITS[content.dtype] // 8
        extent = content.extent
        where = None if tensor is None else _places(tensor, row, content)
        is_wanted = content.dtype in ENCODINGS or where is not None
        fits = extent == content.volume and (content.offset + extent) * item <= int(members.size[member])
        if is_wanted and extent and fits:
            scans[member] = Scan(content.dtype, content.offset, extent, item, where)
    return scans


def _bare(tensor: Tensor, row: int) -> RecordContent:
    sizes = tensor.layout.box(row).sizes
    return RecordContent("tensor", tensor.dtype, sizes, tuple(prod(sizes[axis + 1 :]) for axis in range(len(sizes))))


def _places(tensor: Tensor, row: int, content: RecordContent) -> Elements | None:
    """Where the elements of a record lie in the tensor; None when it holds another chunk, or a view with gaps."""
    box = tensor.layout.box(row)
    if content.dtype != tensor.dtype or content.shape != box.sizes:
        return None
    order = sorted(range(len(box.sizes)), key=lambda axis: -content.strides[axis])
    run = 1
    for axis in reversed(order):
        if box.sizes[axis] > 1:
            if content.strides[axis] != run:
                return None
            run *= box.sizes[axis]
    return elements(box.offsets, box.sizes, tensor.global_shape, order)
