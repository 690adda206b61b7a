"""Depth `data`: the members of one payload file, read once from front to back for their checksums and for NaN."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from typing import BinaryIO

import numpy as np

from ckptlint.boxes import IntArray
from ckptlint.errors import AccessError
from ckptlint.floats import Count
from ckptlint.model import printable
from ckptlint.storage import Folder

BLOCK = 2 * 1024**2
"""Bytes read at once; a multiple of every element's size."""

_GAP = 64 * 1024
_AHEAD = 2


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """The members of the records of one file as columns, in the order of their data.

    Attributes:
        row: record; start: first byte in the file; size: bytes; crc: as recorded; name: position in `names`.
    """

    row: IntArray
    start: IntArray
    size: IntArray
    crc: IntArray
    name: IntArray
    names: list[str]


@dataclass(frozen=True, slots=True)
class Scan:
    """The part of a member to look for NaN in: dtype, first element, number of elements, bytes of an element."""

    dtype: str
    first: int
    count: int
    item: int


@dataclass(slots=True)
class Streamed:
    """What was seen of one file.

    Attributes:
        crc: int64 per member, as computed.
        counts: member -> values that are not finite; for every member that was scanned.
        sha256: of the whole file, "" when not asked for.
        finished: whether everything was read.
    """

    crc: IntArray
    counts: dict[int, Count] = field(default_factory=dict)
    sha256: str = ""
    finished: bool = False


@dataclass(slots=True)
class Meter:
    """Bytes or records done so far, shared by all threads; and the order to stop."""

    total: int = 0
    done: int = 0
    stop: Event = field(default_factory=Event)

    def add(self, count: int) -> None:
        """Count; two threads may lose a step to each other, which a progress bar can bear."""
        self.done += count


def stream(
    folder: Folder, path: str, members: Members, scans: dict[int, Scan], size: int | None, meter: Meter
) -> Streamed:
    """Read the members once.

    Args:
        path: the file, raw.
        scans: member -> what to look for NaN in.
        size: of the whole file when its SHA-256 is wanted too, else None.
        meter: is told of every block, and may stop the reading.

    Raises:
        AccessError: a read was refused.
    """
    seen = Streamed(np.zeros(len(members.start), np.int64), {member: Count() for member in scans})
    whole = hashlib.sha256() if size is not None else None
    starts, ends = members.start.tolist(), (members.start + members.size).tolist()
    with folder.open(path) as file:
        for begin, data, first, last in _blocks(file, path, _plan(starts, ends, size)):
            if meter.stop.is_set():
                return seen
            if whole is not None:
                whole.update(data)
            for member in range(first, last):
                start = max(starts[member], begin)
                part = data[start - begin : max(ends[member] - begin, 0)]
                seen.crc[member] = zlib.crc32(part, int(seen.crc[member]))
                if member in scans:
                    _scan(seen.counts[member], scans[member], part, start - starts[member])
            meter.add(len(data))
    seen.sha256 = "" if whole is None else whole.hexdigest()
    seen.finished = True
    return seen


def _scan(count: Count, scan: Scan, part: memoryview, offset: int) -> None:
    """Look at the elements of the wanted part that lie in these bytes of the member."""
    first = max(scan.first * scan.item - offset, 0)
    last = min((scan.first + scan.count) * scan.item - offset, len(part) - len(part) % scan.item)
    if first < last:
        count.add(part[first:last], scan.dtype, (offset + first) // scan.item)


def _plan(starts: list[int], ends: list[int], size: int | None) -> Iterator[tuple[int, int, int, int]]:
    """Blocks to read: first byte, end, first member, last member + 1.

    Small members share a block; a large one has blocks of its own, which start at whole elements. With `size` the
    blocks cover every byte up to it.
    """
    at = member = 0
    while member < len(starts):
        begin, end, first = starts[member], ends[member], member
        if size is not None:
            yield from _cut(at, begin, 0, 0)
        member += 1
        if end - begin > BLOCK:
            yield from _cut(begin, end, first, member)
        else:
            reach = _GAP if size is None else BLOCK
            while member < len(starts) and starts[member] - end <= reach and ends[member] - begin <= BLOCK:
                end = max(end, ends[member])
                member += 1
            yield begin, end, first, member
        at = max(at, end)
    if size is not None:
        yield from _cut(at, size, 0, 0)


def _cut(begin: int, end: int, first: int, last: int) -> Iterator[tuple[int, int, int, int]]:
    for at in range(begin, end, BLOCK):
        yield at, min(at + BLOCK, end), first, last


def _blocks(
    file: BinaryIO, path: str, plan: Iterator[tuple[int, int, int, int]]
) -> Iterator[tuple[int, memoryview, int, int]]:
    """The planned blocks with their bytes, read by a thread of its own ahead of the work on them."""
    buffers = [bytearray(BLOCK) for _ in range(_AHEAD + 1)]
    with ThreadPoolExecutor(1) as reader:
        reads = []
        for turn, (begin, end, first, last) in enumerate(plan):
            reads.append((begin, first, last, reader.submit(_fill, file, path, buffers[turn % len(buffers)], begin, end)))
            if len(reads) > _AHEAD:
                at, one, two, read = reads.pop(0)
                yield at, read.result(), one, two
        for at, one, two, read in reads:
            yield at, read.result(), one, two


def _fill(file: BinaryIO, path: str, buffer: bytearray, begin: int, end: int) -> memoryview:
    view = memoryview(buffer)[: end - begin]
    filled = 0
    try:
        file.seek(begin)
        while filled < len(view) and (count := file.readinto(view[filled:])):  # type: ignore[attr-defined]
            filled += count
    except OSError as error:
        raise AccessError(f"{printable(path)} cannot be read: {error.strerror}") from None
    return view[:filled]
