"""The archives of one payload file, from the end of each record, its directory and its local headers."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptlint.errors import LimitError, UnreadableError
from ckptlint.formats.torch_archive import END_SIZE, LOCAL_SIZE, data_start, read_end, read_members
from ckptlint.storage.folder import Folder

PICKLE_LIMIT = 64 * 1024**2
"""Largest `data.pkl` of a record that is decoded, in bytes."""

_EDGE = 1024  # at one end of a tensor's record lie its headers and data.pkl, at the other its directory
_WHOLE = 4096
_BATCH = 512


class RecordPlace(NamedTuple):
    """A record: its row, first byte and length in its file."""

    row: int
    offset: int
    length: int


class ArchiveMember(NamedTuple):
    """A member: name without the folder, first byte from the start of the file, bytes, CRC-32."""

    name: str
    start: int
    size: int
    crc: int


class Record(NamedTuple):
    """A record whose archive is whole."""

    row: int
    pickle: bytes
    parts: tuple[ArchiveMember, ...]


@dataclass(slots=True)
class Headers:
    """What was read of one batch: the records that have an archive, and the others with what is wrong."""

    records: list[Record] = field(default_factory=list)
    broken: list[tuple[int, UnreadableError]] = field(default_factory=list)


_Span = tuple[int, int]
_Walk = Generator[list[_Span], list[bytes], Record]


def read_headers(folder: Folder, path: str, places: Sequence[RecordPlace]) -> Iterator[Headers]:
    """The archives of some records of one file, batch by batch; records that can be decoded are not decoded yet.

    Args:
        path: the file, raw.

    Raises:
        AccessError: a read was refused.
    """
    for at in range(0, len(places), _BATCH):
        yield _read_batch(folder, path, places[at : at + _BATCH])


@dataclass(slots=True)
class _Held:
    """The bytes of one record that were read already."""

    pieces: list[tuple[int, bytes]]
    answers: dict[_Span, bytes] = field(default_factory=dict)

    def get(self, span: _Span) -> bytes | None:
        start, size = span
        for at, piece in self.pieces:
            if at <= start and start + size <= at + len(piece):
                return piece[start - at : start - at + size]
        return self.answers.get(span)

    def all(self, spans: list[_Span]) -> list[bytes] | None:
        parts = [part for span in spans if (part := self.get(span)) is not None]
        return parts if len(parts) == len(spans) else None


def _read_batch(folder: Folder, path: str, places: Sequence[RecordPlace]) -> Headers:
    """All records step by step together, so that each step is one call for ranges."""
    found = Headers()
    held = _edges(folder, path, places)
    going = [(place, walk, next(walk)) for place in places for walk in [_walk(place)]]
    while going:
        lacking = [(p, span) for p, _, spans in going for span in spans if held[p.row].get(span) is None]
        data = folder.ranges(path, [(place.offset + start, size) for place, (start, size) in lacking])
        for (place, span), part in zip(lacking, data, strict=True):
            held[place.row].answers[span] = part
        going = [item for step in going if (item := _advance(*step, held[step[0].row], found)) is not None]
    return found


def _advance(
    place: RecordPlace, walk: _Walk, spans: list[_Span], held: _Held, found: Headers
) -> tuple[RecordPlace, _Walk, list[_Span]] | None:
    """Take a walk as far as the bytes that are there allow; None when it came to an end."""
    try:
        while (parts := held.all(spans)) is not None:
            spans = walk.send(parts)
    except StopIteration as end:
        found.records.append(end.value)
        return None
    except UnreadableError as error:
        found.broken.append((place.row, error))
        return None
    return place, walk, spans


def _edges(folder: Folder, path: str, places: Sequence[RecordPlace]) -> dict[int, _Held]:
    """Both ends of each record, small ones whole: enough for nearly all."""
    wanted, starts = [], []
    for place in places:
        ends = [(0, _EDGE), (place.length - _EDGE, _EDGE)]
        pieces = [(0, place.length)] if place.length <= _WHOLE else ends
        starts += [(place.row, start) for start, _ in pieces]
        wanted += [(place.offset + start, size) for start, size in pieces]
    held = {place.row: _Held([]) for place in places}
    for (row, start), part in zip(starts, folder.ranges(path, wanted), strict=True):
        held[row].pieces.append((start, part))
    return held


def _walk(place: RecordPlace) -> _Walk:
    """One record's archive: yields spans (from the record's start) and is sent their bytes, fewer where the file ends.

    Raises:
        UnreadableError: it is no archive that torch.save wrote; the position counts from the record's start.
        LimitError: it has too many members, or a `data.pkl` that is too large.
    """
    length = place.length
    size = min(END_SIZE, length)
    start, tail = yield [(0, min(4, length)), (length - size, size)]
    if start != b"PK\x03\x04":
        raise UnreadableError(f"starts with {_first_bytes(start)} instead of an archive's first member", 0)
    directory = read_end(tail, length)
    (data,) = yield [(directory.start, directory.size)]
    members = read_members(data, directory)
    if members[0].header:
        raise UnreadableError(f"has {members[0].header:,} bytes before its first member", 0)
    local = yield [(member.header, LOCAL_SIZE + len(member.name)) for member in members]
    starts = [data_start(header, member) for header, member in zip(local, members, strict=True)]
    limits = [member.header for member in members[1:]] + [directory.start]
    for member, begin, limit in zip(members, starts, limits, strict=True):
        if begin + member.size > limit:
            raise UnreadableError(f"has the member {member.short} reaching over the next one", member.header)
    at = next((i for i, member in enumerate(members) if member.short.lower() == "data.pkl"), None)
    if at is None:
        raise UnreadableError("is an archive without a data.pkl", directory.start)
    if members[at].size > PICKLE_LIMIT:
        raise LimitError(f"has a data.pkl of {members[at].size:,} bytes, the limit is {PICKLE_LIMIT:,}")
    (pickle,) = yield [(starts[at], members[at].size)]
    if members[at].crc and zlib.crc32(pickle) != members[at].crc:
        raise UnreadableError("has a data.pkl whose bytes do not match its checksum", starts[at])
    parts = (
        ArchiveMember(member.short, place.offset + begin, member.size, member.crc)
        for member, begin in zip(members, starts, strict=True)
    )
    return Record(place.row, pickle, tuple(parts))


def _first_bytes(data: bytes) -> str:
    if not data.strip(b"\0"):
        return f"{len(data)} zero bytes"
    return "a zstd frame" if data == b"\x28\xb5\x2f\xfd" else f"the bytes {data.hex(' ')}"
