"""The members of a payload file, and what to look at in each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ckptlint.errors import UnreadableError
from ckptlint.formats.torch_archive import LOCAL_SIZE, Member, data_start
from ckptlint.model import Checkpoint, PayloadTable, RecordContent, RecordState, StorageTable, Tensor
from ckptlint.model.payload import plain_content
from ckptlint.model.tiling import IntArray
from ckptlint.payload.archives.record_headers import AlikeRecords, Record
from ckptlint.payload.records import path_of
from ckptlint.payload.stream import Members, Meter, Scan
from ckptlint.seals.digests import Elements, elements
from ckptlint.seals.row_hashes import Placed, RowHashes
from ckptlint.storage.folder import Folder
from ckptlint.vocabulary.dtypes import ENCODINGS, INTEGERS, ITEM_BITS


def members_of(records: Sequence[Record], alike: Sequence[AlikeRecords] = ()) -> Members:
    """The members of the records of one file, in file order."""
    names: dict[str, int] = {}
    rows = [
        (record.row, item.start, item.size, item.crc, names.setdefault(item.name, len(names)), record.parts[0].start)
        for record in records
        for item in record.parts
    ]
    columns = [np.array(rows or np.zeros((0, 6)), np.int64).T]
    for group in alike:
        shape = len(group.rows), len(group.names)
        named = np.array([names.setdefault(name, len(names)) for name in group.names], np.int64)
        start = group.offset[:, None] + group.start
        values = (group.rows[:, None], start, group.size, group.crc, named, start[:, :1])
        columns.append(np.stack([np.broadcast_to(value, shape).reshape(-1) for value in values]))
    whole = np.concatenate(columns, axis=1)
    row, start, size, crc, name = whole[:5, np.argsort(whole[5], kind="stable")]
    return Members(row, start, size, crc, name, list(names))


def with_bare_tensors(first: Members, table: PayloadTable, rows: IntArray) -> Members:
    """The members of a file plus its raw tensors, which have no checksum."""
    bare = [rows, table.start[rows], table.size[rows], np.zeros_like(rows), np.full_like(rows, len(first.names))]
    both = np.concatenate([np.stack(first[:5]), np.stack(bare)], axis=1)
    row, start, size, crc, name = both[:, np.argsort(both[1], kind="stable")]
    return Members(row, start, size, crc, name, [*first.names, "tensor"])


def member_starts(
    folder: Folder, ckpt: Checkpoint, file: int, rows: IntArray, stored: StorageTable, meter: Meter
) -> tuple[dict[int, int], list[tuple[int, UnreadableError]]]:
    """Record -> first byte of the data of its member; and the records whose member's header is damaged.

    Raises AccessError where a read is refused.
    """
    starts_by_row = {row: int(stored.start[row]) for row in rows.tolist() if stored.header[row] < 0}
    wanted = {int(stored.header[row]): row for row in rows.tolist() if row not in starts_by_row}
    spans = [(header, LOCAL_SIZE + len(stored.names[row])) for header, row in wanted.items()]
    starts: dict[int, int | UnreadableError] = {}
    for (header, row), data in zip(wanted.items(), folder.ranges(path_of(ckpt, file), spans), strict=True):
        member = Member(stored.names[row], int(stored.crc[row]), int(stored.size[row]), header)
        try:
            starts[header] = data_start(data, member)
        except UnreadableError as error:
            starts[header] = UnreadableError(str(error), header - int(ckpt.records.byte_offset[row]))
    broken = []
    for row in rows.tolist():
        start = starts_by_row.get(row, starts.get(int(stored.header[row])))
        if isinstance(start, int):
            starts_by_row[row] = start
        elif start is not None:
            broken.append((row, start))
    meter.add(len(rows))
    return starts_by_row, broken


def members_and_views(table: PayloadTable, stored: StorageTable, rows: IntArray) -> list[Members]:
    """Readings of a file: first each storage once with its checksum, then the records that share a storage.

    The first record of a storage is examined there. Each other record covers its own bytes, in further readings without
    overlaps; its row of the table is changed to these bytes.
    """
    order = rows[np.argsort(table.start[rows], kind="stable")]
    is_first = np.concatenate([[True], np.diff(table.start[order]) != 0])[: len(order)]
    is_first |= table.size[order] == 0
    first, others = order[is_first], order[~is_first]
    names: dict[str, int] = {}
    keys = (table.contents[number].key for number in table.content[first].tolist())
    named = np.array([names.setdefault(key, len(names)) for key in keys], np.int64)
    starts, sizes = table.start[first], table.size[first]
    readings: list[list[int]] = []
    ends: list[int] = []
    for row in others.tolist():
        content = table.contents[int(table.content[row])]
        item = ITEM_BITS.get(content.dtype, 0) // 8
        begin, length = int(table.start[row]) + content.offset * item, content.extent * item
        if not length or begin + length > table.start[row] + table.size[row]:
            continue
        table.start[row], table.size[row], table.crc[row] = begin, length, -1
        if content.offset:
            table.content[row] = len(table.contents)
            table.contents.append(replace(content, offset=0))
    for row in others[np.argsort(table.start[others], kind="stable")].tolist():
        begin, end = int(table.start[row]), int(table.start[row] + table.size[row])
        turn = next((turn for turn, at in enumerate(ends[:_READINGS]) if at <= begin), len(ends))
        if turn == _READINGS:
            continue  # other records cover these bytes
        if turn == len(ends):
            readings.append([])
            ends.append(0)
        readings[turn].append(row)
        ends[turn] = end
    views = [with_bare_tensors(members_of([]), table, np.array(reading, np.int64)) for reading in readings]
    return [Members(first, starts, sizes, stored.crc[first], named, list(names)), *views]


_READINGS = 4


def scans_of(
    table: PayloadTable,
    members: Members,
    chunks: Mapping[int, tuple[Tensor, int]],
    sealed: Collection[str],
    hashes: Mapping[str, tuple[RowHashes, ...]],
    hashes_only: bool = False,
) -> dict[int, Scan]:
    """Member -> the tensor to scan in it, for tensors of numbers and sealed tensors; `hashes_only` skips statistics.

    `chunks` are (tensor, row of its chunk) by record, for raw, sealed and hashed tensors; `hashes` collects by key.
    """
    scans = {}
    is_storage = np.flatnonzero((members.start == table.start[members.row]) & (members.size == table.size[members.row]))
    for member in is_storage.tolist():
        record = int(members.row[member])
        tensor, row = chunks.get(record, (None, -1))
        is_raw = table.state[record] == RecordState.RAW
        content = table.contents[int(table.content[record])] if is_raw else table.of(record)
        if content is None or content.form != "tensor" or content.dtype not in ITEM_BITS:
            continue
        item = ITEM_BITS[content.dtype] // 8
        extent = content.extent
        where = gathered = None
        if tensor is not None and (tensor.fqn in sealed or tensor.fqn in hashes):
            at = places_of(tensor, row, content)
            where = at if tensor.fqn in sealed else None
            if tensor.fqn in hashes and at is not None:
                gathered = Placed(hashes[tensor.fqn], content.dtype, at)
        looks = content.dtype in ENCODINGS.keys() | INTEGERS and not hashes_only
        is_wanted = looks or where is not None or gathered is not None
        fits = extent == content.volume and (content.offset + extent) * item <= int(members.size[member])
        if is_wanted and extent and fits:
            scans[member] = Scan(content.dtype, content.offset, extent, item, looks, where, gathered)
    return scans


def bare_content(tensor: Tensor, row: int) -> RecordContent:
    """The content of a record with the raw bytes of its chunk."""
    return plain_content(tensor.dtype, tensor.tiling.box(row).sizes)


def places_of(tensor: Tensor, row: int, content: RecordContent) -> Elements | None:
    """Positions of a record's elements in the tensor; None for another chunk, or a view with gaps."""
    box = tensor.tiling.box(row)
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
