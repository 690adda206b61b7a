"""Streams one payload file once from front to back for checksums, values and digests (depth `data`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from threading import Event, Lock
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np

from ckptlint.errors import AccessError
from ckptlint.model.text import printable
from ckptlint.model.tiling import IntArray
from ckptlint.payload.values import RecordValues, values_of
from ckptlint.seals.digests import MASK, Elements, elem_digest
from ckptlint.seals.row_hashes import Placed
from ckptlint.storage.folder import Folder

try:  # the extra `fast`: the same values in a tenth of the time
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

if TYPE_CHECKING:
    from concurrent.futures import Future

BLOCK = 2 * 1024**2  # bytes read at once; a multiple of every element's size

_GAP = 64 * 1024  # bytes between members up to which reading on costs less than a seek


class Members(NamedTuple):
    """The members of the records of one file as columns, in the order of their data.

    `row` of the record; first byte in the file and bytes; `crc` as recorded; `name`, position in `names`.
    """

    row: IntArray
    start: IntArray
    size: IntArray
    crc: IntArray
    name: IntArray
    names: list[str]


@dataclass(frozen=True, slots=True)
class Scan:
    """The tensor in a member, with torch's name of its dtype.

    Attributes:
        first, count, item: index of its first element in the member; elements; bytes of one.
        looks: whether to examine the values.
        where: positions of the elements in the whole tensor, for a digest; None without one.
        placed: collector of row hashes; None without them.
    """

    dtype: str
    first: int
    count: int
    item: int
    looks: bool
    where: Elements | None = None
    placed: Placed | None = None


@dataclass(slots=True)
class Streamed:
    """The results of streaming one file, `finished` where everything was read.

    Attributes:
        crc: int64 [members], computed CRC-32.
        values: member -> statistics of its values, for scanned members with numbers.
        digests: member -> digest of its elements, where their positions are known.
        sha256: of the whole file; "" where not requested.
    """

    crc: IntArray
    values: dict[int, RecordValues] = field(default_factory=dict)
    digests: dict[int, int] = field(default_factory=dict)
    sha256: str = ""
    finished: bool = False


@dataclass(slots=True)
class Meter:
    """Progress in bytes or records (`unit`), shared by all threads, and the event that stops them."""

    unit: str = "records"
    total: int = 0
    done: int = 0
    stop: Event = field(default_factory=Event)

    def add(self, count: int) -> None:
        """Add to the progress without a lock: a lost update only makes the progress bar lag."""
        self.done += count


def stream(
    folder: Folder,
    path: str,
    members: Members,
    scans: dict[int, Scan],
    size: int | None,
    meter: Meter,
    threads: int = 2,
    recorded_only: bool = False,
) -> Streamed:
    """Read the members once, and the whole file for its SHA-256 where its size is given; raises AccessError.

    The meter counts every block, and may stop the reading. One thread reads a block while the others process theirs.
    With `recorded_only` members without a recorded checksum get none.
    """
    result = Streamed(
        np.zeros(len(members.start), np.int64),
        {member: RecordValues() for member, scan in scans.items() if scan.looks},
        {member: 0 for member, scan in scans.items() if scan.where is not None},
    )
    if size is not None:
        from hashlib import sha256  # it loads a library of its own
    file_hash = None if size is None else sha256()
    starts, ends = members.start.tolist(), (members.start + members.size).tolist()
    if (members.size.sum() if size is None else size) <= BLOCK:
        threads = 0
    with folder.open(path) as file:
        summed = [not recorded_only or crc > 0 for crc in members.crc.tolist()]
        work = _Work(file, path, starts, ends, scans, summed)
        with closing(_in_order(work, _plan(starts, ends, size), threads)) as blocks:
            for block in blocks:
                if meter.stop.is_set():
                    return result
                if file_hash is not None:
                    file_hash.update(block.data)
                _merge(result, block)
                meter.add(len(block.data))
    result.sha256 = "" if file_hash is None else file_hash.hexdigest()
    result.finished = True
    return result


class _Part(NamedTuple):
    """The part of a member in a block: bytes, their CRC-32 if they fill a block, statistics, digest."""

    member: int
    data: memoryview
    crc: int | None
    values: RecordValues | None
    digest: int


class _Block(NamedTuple):
    data: memoryview
    parts: list[_Part]


class _Work:
    """Reads blocks of one file in one thread at a time, and processes them in all threads."""

    def __init__(
        self, file: BinaryIO, path: str, starts: list[int], ends: list[int], scans: dict[int, Scan], summed: list[bool]
    ) -> None:
        self.file, self.path, self.starts, self.ends, self.scans = file, path, starts, ends, scans
        self.summed, self.lock, self.buffers = summed, Lock(), dict[int, bytearray]()

    def block(self, slot: int, begin: int, end: int, first: int, last: int) -> _Block:
        """Read the bytes [begin, end) and process the members [first, last) in them."""
        if len(self.buffers.get(slot, b"")) < end - begin:
            self.buffers[slot] = bytearray(end - begin)  # most files are far smaller than a block
        data = self._read(self.buffers[slot], begin, end)
        pieces = []
        for member in range(first, last):
            start = max(self.starts[member], begin)
            view = data[start - begin : max(self.ends[member] - begin, 0)]
            values, digest = None, 0
            if member in self.scans:
                values, digest = _scan(self.scans[member], view, start - self.starts[member])
            crc = crc32(view) if self.summed[member] and len(view) == BLOCK else None
            pieces.append(_Part(member, view if self.summed[member] else view[:0], crc, values, digest))
        return _Block(data, pieces)

    def _read(self, buffer: bytearray, begin: int, end: int) -> memoryview:
        view = memoryview(buffer)[: end - begin]
        filled = 0
        try:
            with self.lock:
                self.file.seek(begin)
                while filled < len(view) and (count := self.file.readinto(view[filled:])):  # type: ignore[attr-defined]
                    filled += count
        except OSError as error:
            raise AccessError(f"{printable(self.path)} cannot be read: {error.strerror}") from None
        return view[:filled]


def _in_order(work: _Work, plan: Iterator[tuple[int, int, int, int]], threads: int) -> Generator[_Block, None, None]:
    """The blocks in plan order, each valid until the next is requested; without threads it is processed then."""
    if not threads:
        yield from (work.block(0, *block) for block in plan)
        return
    from concurrent.futures import ThreadPoolExecutor

    slots = threads + 2
    going: deque[Future[_Block]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for turn, block in enumerate(plan):
            if len(going) == slots - 1:
                yield going.popleft().result()
            going.append(pool.submit(work.block, turn % slots, *block))
        while going:
            yield going.popleft().result()


def _merge(seen: Streamed, block: _Block) -> None:
    for piece in block.parts:
        before = int(seen.crc[piece.member])
        # CRC-32 is linear: that of two parts follows from those of each, and from the length of the second
        seen.crc[piece.member] = crc32(piece.data, before) if piece.crc is None else _shifted(before) ^ piece.crc
        if piece.values is not None:
            seen.values[piece.member].join(piece.values)
        if piece.member in seen.digests:
            seen.digests[piece.member] = seen.digests[piece.member] + piece.digest & MASK


@cache
def _shift() -> tuple[int, ...]:
    """Entry i is a CRC-32 with only bit i set, after appending one block of zeros."""
    zeros = bytes(BLOCK)
    nothing = crc32(zeros)
    return tuple(crc32(zeros, 1 << bit) ^ nothing for bit in range(32))


def _shifted(crc: int) -> int:
    moved = 0
    for bit, value in enumerate(_shift() if crc else ()):
        if crc >> bit & 1:
            moved ^= value
    return moved


def _scan(scan: Scan, data: memoryview, offset: int) -> tuple[RecordValues | None, int]:
    """Statistics and digest of the scanned elements within these bytes of the member."""
    first = max(scan.first * scan.item - offset, 0)
    last = min((scan.first + scan.count) * scan.item - offset, len(data) - len(data) % scan.item)
    if first >= last:
        return None, 0
    at = (offset + first) // scan.item
    values = values_of(data[first:last], scan.dtype, at) if scan.looks else None
    if scan.where is None and scan.placed is None:
        return values, 0
    reals = 2 if scan.dtype.startswith("complex") else 1
    bits = np.frombuffer(data[first:last], f"<u{scan.item // reals}")
    if scan.placed is not None:
        scan.placed.add(bits, at - scan.first)
    if scan.where is None:
        return values, 0
    return values, elem_digest(bits, scan.where, at - scan.first, reals)


def _plan(starts: list[int], ends: list[int], size: int | None) -> Iterator[tuple[int, int, int, int]]:
    """(first byte, end, first member, last member + 1) of each block to read.

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
