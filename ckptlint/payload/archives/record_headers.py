"""Reads the zip archives of one payload file by their end records, directories and local headers."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckptlint.errors import LimitError, UnreadableError
from ckptlint.formats.torch_archive import (
    CRC_IN_ENTRY,
    END_SIZE,
    LOCAL_SIZE,
    TOLD_IN_LOCAL,
    Directory,
    Member,
    data_start,
    limits_of,
    read_end,
    read_members,
)
from ckptlint.grouping import grouped
from ckptlint.model.tiling import IntArray
from ckptlint.storage.folder import Folder

RECORD_PICKLE_LIMIT = 64 * 1024**2  # largest `data.pkl` of a record that is decoded, in bytes

_EDGE = 1024  # bytes read at each end: a tensor's record has headers and data.pkl first, its directory last
_WHOLE = 4096  # bytes up to which a record is read whole
_BATCH = 512  # records in one call for ranges
_FORMS = 8  # most layouts that records of one length are compared with
_LENGTHS = 256  # of records, whose layouts are kept from file to file


class RecordPlace(NamedTuple):
    """A record: row, first byte in its file, length in bytes."""

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
    """A record with an intact archive."""

    row: int
    pickle: bytes
    parts: tuple[ArchiveMember, ...]


class AlikeRecords(NamedTuple):
    """k records whose archives differ only in checksums and contents.

    Attributes:
        rows, offset: int64 [k], row of each record and its first byte in the file.
        names: names of the p members, without the folder.
        start, size: int64 [p], first byte of each member relative to the record, and its length.
        crc: int64 [k, p], CRC-32 of each member.
        pickles: `data.pkl` of each record.
    """

    rows: IntArray
    offset: IntArray
    names: tuple[str, ...]
    start: IntArray
    size: IntArray
    crc: IntArray
    pickles: list[bytes]

    def parts(self, at: int) -> tuple[ArchiveMember, ...]:
        starts = (self.start + self.offset[at]).tolist()
        return tuple(map(ArchiveMember, self.names, starts, self.size.tolist(), self.crc[at].tolist()))


@dataclass(slots=True)
class Headers:
    """The result of one batch: intact records, and unreadable ones with their errors."""

    records: list[Record] = field(default_factory=list)
    alike: list[AlikeRecords] = field(default_factory=list)
    broken: list[tuple[int, UnreadableError]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.records) + sum(len(group.rows) for group in self.alike) + len(self.broken)


_Span = tuple[int, int]
_Walk = Generator[list[_Span], list[bytes], tuple[Record, "_Archive"]]


class _Archive(NamedTuple):
    """The layout of an archive: directory, members and data starts, relative to the record's first byte."""

    directory: Directory
    members: list[Member]
    local: list[bytes]
    starts: list[int]
    pickled: int


def read_headers(
    folder: Folder, path: str, places: Sequence[RecordPlace], forms: Forms | None = None
) -> Iterator[Headers]:
    """The archives of these records of one file, batch by batch, with their pickles still undecoded.

    `forms` are layouts from other files of the checkpoint, extended here; threads may share them. Raises AccessError
    where a read is refused.
    """
    forms = {} if forms is None else forms
    if len(forms) > _LENGTHS:
        forms.clear()
    for at in range(0, len(places), _BATCH):
        yield _read_batch(folder, path, places[at : at + _BATCH], forms)


@dataclass(slots=True)
class _Edges:
    """The bytes of one record read so far."""

    pieces: list[tuple[int, bytes]]
    answers: dict[_Span, bytes] = field(default_factory=dict)

    def get(self, span: _Span) -> bytes | None:
        start, size = span
        for at, piece in self.pieces:
            if at <= start and start + size <= at + len(piece):
                return piece[start - at : start - at + size]
        return self.answers.get(span)

    def all(self, spans: list[_Span]) -> list[bytes] | None:
        answers = [answer for span in spans if (answer := self.get(span)) is not None]
        return answers if len(answers) == len(spans) else None


def _read_batch(folder: Folder, path: str, places: Sequence[RecordPlace], forms: Forms) -> Headers:
    """Read all records in lockstep, so that each step is one call for ranges; extend `forms`."""
    headers = Headers()
    edges = _edges(folder, path, places)
    by_length = grouped((place.length, place) for place in places)
    # Chunks of one shape have archives of one length, and almost always of one layout. So one record of each length is
    # parsed, and the others are compared with its bytes all at once; whatever differs is parsed by itself.
    rest = [_read_alike(forms.setdefault(length, []), alike, edges, headers) for length, alike in by_length.items()]
    first = [alike.pop(0) for alike in rest if alike]
    _read_singly(folder, path, first, edges, headers, forms)  # adds their layouts to `forms`
    rest = [_read_alike(forms.get(alike[0].length, [])[-1:], alike, edges, headers) for alike in rest if alike]
    _read_singly(folder, path, [place for alike in rest for place in alike], edges, headers, forms)
    return headers


def _read_singly(
    folder: Folder, path: str, places: Sequence[RecordPlace], edges: dict[int, _Edges], headers: Headers, forms: Forms
) -> None:
    going = [(place, walk, next(walk)) for place in places for walk in [_walk(place)]]
    while going:
        lacking = [(p, span) for p, _, spans in going for span in spans if edges[p.row].get(span) is None]
        data = folder.ranges(path, [(place.offset + start, size) for place, (start, size) in lacking])
        for (place, span), answer in zip(lacking, data, strict=True):
            edges[place.row].answers[span] = answer
        going = [item for step in going if (item := _advance(*step, edges[step[0].row], headers, forms)) is not None]


def _advance(
    place: RecordPlace, walk: _Walk, spans: list[_Span], edges: _Edges, headers: Headers, forms: Forms
) -> tuple[RecordPlace, _Walk, list[_Span]] | None:
    """Advance a walk as far as the available bytes allow; None once it is finished."""
    try:
        while (answers := edges.all(spans)) is not None:
            spans = walk.send(answers)
    except StopIteration as end:
        record, archive = end.value
        headers.records.append(record)
        if (form := _form(place.length, archive, edges)) is not None:
            alike = forms.setdefault(place.length, [])
            alike.append(form)
            del alike[: max(len(alike) - _FORMS, 0)]
        return None
    except UnreadableError as error:
        headers.broken.append((place.row, error))
        return None
    return place, walk, spans


def _edges(folder: Folder, path: str, places: Sequence[RecordPlace]) -> dict[int, _Edges]:
    """Both ends of each record, or all of a small one: enough for nearly every archive."""
    wanted, starts = [], []
    for place in places:
        ends = [(0, _EDGE), (place.length - _EDGE, _EDGE)]
        pieces = [(0, place.length)] if place.length <= _WHOLE else ends
        starts += [(place.row, start) for start, _ in pieces]
        wanted += [(place.offset + start, size) for start, size in pieces]
    edges = {place.row: _Edges([]) for place in places}
    for (row, start), piece in zip(starts, folder.ranges(path, wanted), strict=True):
        edges[row].pieces.append((start, piece))
    return edges


def _walk(place: RecordPlace) -> _Walk:
    """One record's archive: yields spans (from the record's start) and is sent their bytes, fewer where the file ends.

    Raises UnreadableError, with a position from the record's start, for no archive of torch.save, and LimitError for
    too many members or a `data.pkl` that is too large.
    """
    length = place.length
    size = min(END_SIZE, length)
    start, tail = yield [(0, min(4, length)), (length - size, size)]
    if start != b"PK\x03\x04":
        seen = "a zstd frame" if start == b"\x28\xb5\x2f\xfd" else f"the bytes {start.hex(' ')}"
        seen = seen if start.strip(b"\0") else f"{len(start)} zero bytes"
        raise UnreadableError(f"starts with {seen} instead of an archive's first member", 0)
    directory = read_end(tail, length)
    (data,) = yield [(directory.start, directory.size)]
    members = read_members(data, directory)
    local = yield [(member.header, LOCAL_SIZE + len(member.name)) for member in members]
    limits = limits_of(members, directory)
    starts = [data_start(*of_member) for of_member in zip(local, members, limits, strict=True)]
    at = next((i for i, member in enumerate(members) if member.short.lower() == "data.pkl"), None)
    if at is None:
        raise UnreadableError("is an archive without a data.pkl", directory.start)
    if members[at].size > RECORD_PICKLE_LIMIT:
        raise LimitError(f"has a data.pkl of {members[at].size:,} bytes, the limit is {RECORD_PICKLE_LIMIT:,}")
    (pickle,) = yield [(starts[at], members[at].size)]
    if members[at].crc and zlib.crc32(pickle) != members[at].crc:
        raise UnreadableError("has a data.pkl whose bytes do not match its checksum", starts[at])
    placed = zip(members, starts, strict=True)
    entries = tuple(ArchiveMember(m.short, place.offset + begin, m.size, m.crc) for m, begin in placed)
    return Record(place.row, pickle, entries), _Archive(directory, members, local, starts, at)


class _Edge(NamedTuple):
    """One end of a record: first byte, length, and the m bytes, with their positions, that decide on its layout."""

    start: int
    length: int
    at: IntArray
    bytes: npt.NDArray[np.uint8]


class _Form(NamedTuple):
    """A layout with all bytes that it was parsed from, except checksums: equal bytes imply an equal layout.

    `pickled` is the number of the edge with the `data.pkl`, and its slice there; `crcs` that of the edge with the
    checksums, and the position of each there, int64 [p].
    """

    archive: _Archive
    edges: list[_Edge]
    pickled: tuple[int, slice]
    crcs: tuple[int, IntArray]


Forms = dict[int, list[_Form]]  # length of a record -> the layouts last seen with that length


def _form(length: int, archive: _Archive, known: _Edges) -> _Form | None:
    """The form of a parsed record; None where parsing needed more than its edges."""
    members, directory = archive.members, archive.directory
    # Some writers repeat checksum and sizes in the local header. Such records would differ from each other
    # there, so they have no common form.
    if any(local[TOLD_IN_LOCAL] != bytes(12) for local in archive.local):
        return None
    crcs = np.array([member.entry + CRC_IN_ENTRY for member in members], np.int64)
    pickled = archive.starts[archive.pickled], members[archive.pickled].size
    spans = [(0, 4), (directory.start, length - directory.start), pickled]
    spans += [(member.header, LOCAL_SIZE + len(member.name)) for member in members]
    edges, holders = [], []
    for start, piece in known.pieces:
        inside = [start <= first and first + size <= start + len(piece) for first, size in spans]
        holders.append(inside)
        needed = np.zeros(len(piece), bool)
        for (first, size), is_inside in zip(spans, inside, strict=True):
            if is_inside and (first, size) != pickled:
                needed[first - start : first - start + size] = True
        if inside[1]:
            needed[(crcs - start)[:, None] + np.arange(4)] = False
        at = np.flatnonzero(needed)
        edges.append(_Edge(start, len(piece), at, np.frombuffer(piece, np.uint8)[at]))
    if not all(map(any, zip(*holders, strict=True))):
        return None
    of_directory, of_pickle = (next(i for i, inside in enumerate(holders) if inside[span]) for span in (1, 2))
    begin = pickled[0] - edges[of_pickle].start
    place = of_pickle, slice(begin, begin + pickled[1])
    return _Form(archive, edges, place, (of_directory, crcs - edges[of_directory].start))


def _read_alike(
    forms: Sequence[_Form], places: list[RecordPlace], edges: dict[int, _Edges], headers: Headers
) -> list[RecordPlace]:
    """Read the records with one of these layouts; returns the others, and those with a damaged `data.pkl`."""
    for form in [*forms]:  # another thread may change them
        if places:
            places = _read_form(form, places, edges, headers)
    return places


def _read_form(form: _Form, places: list[RecordPlace], edges: dict[int, _Edges], headers: Headers) -> list[RecordPlace]:
    """Read all records of one layout at once, column by column; returns the records of other layouts."""
    pieces = [[piece for _, piece in edges[place.row].pieces] for place in places]
    lengths = [edge.length for edge in form.edges]
    is_alike = np.array([[*map(len, of_record)] == lengths for of_record in pieces], bool)
    columns = []
    for number, edge in enumerate(form.edges):
        whole = b"".join(
            of_record[number] if ok else bytes(edge.length) for ok, of_record in zip(is_alike, pieces, strict=True)
        )
        column = np.frombuffer(whole, np.uint8).reshape(len(places), edge.length)
        is_alike &= (column[:, edge.at] == edge.bytes).all(axis=1)
        columns.append(column)
    of_crcs, at = form.crcs
    crc = np.ascontiguousarray(columns[of_crcs][:, at[:, None] + np.arange(4)]).view("<u4")[:, :, 0].astype(np.int64)
    of_pickle, span = form.pickled
    pickles = [of_record[of_pickle][span] if ok else b"" for ok, of_record in zip(is_alike, pieces, strict=True)]
    recorded = crc[:, form.archive.pickled]
    sums = np.fromiter(map(zlib.crc32, pickles), np.int64, len(pickles))
    is_alike &= (recorded == 0) | (recorded == sums)
    rows = np.flatnonzero(is_alike)
    if len(rows):
        members = form.archive.members
        headers.alike.append(
            AlikeRecords(
                np.array([places[row].row for row in rows.tolist()], np.int64),
                np.array([places[row].offset for row in rows.tolist()], np.int64),
                tuple(member.short for member in members),
                np.array(form.archive.starts, np.int64),
                np.array([member.size for member in members], np.int64),
                crc[rows],
                [pickles[row] for row in rows.tolist()],
            )
        )
    return [place for place, ok in zip(places, is_alike.tolist(), strict=True) if not ok]
