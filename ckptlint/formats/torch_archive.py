"""The zip archive that torch.save makes: read strictly, from its end, so that no two readers can see other members.

torch (miniz) follows the places that the end record gives, Python's zipfile those that lie before it, and either may
name a member from another of the places where a name stands. Here an archive that two readers could take differently
is unreadable: its directory must end where the end record starts, local headers must agree with it, members must lie
end to end from the first byte on, and none may have a field that changes its name. An archive may be a file, a
record inside one (which may hold a whole archive as text, so it is never searched for), or bytes inside a pickle.
Positions count from its first byte.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

from ckptlint.errors import ForeignError, LimitError, ScriptError, UnreadableError
from ckptlint.model.text import human_bytes, printable

MEMBERS_LIMIT = 65_535
"""Most members of one record; an optimizer state that was not flattened has one for each of its tensors."""

END_SIZE = 98
"""Bytes of the end records that torch writes: zip64 end record (56), its locator (20), plain end record (22)."""

LOCAL_SIZE = 30
"""Bytes of a local header before the name."""

CRC_IN_ENTRY = 16
"""Bytes of an entry of the central directory before its CRC-32, which has four."""

TOLD_IN_LOCAL = slice(14, 26)
"""CRC-32, packed size and size in a local header; zeros where the central directory alone has them."""

_CENTRAL = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_PLAIN_END = struct.Struct("<4s4H2IH")
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_MARK16, _MARK32 = 0xFFFF, 0xFFFFFFFF
_DESCRIPTOR, _UTF8 = 0x8, 0x800
_FOLDER = 0x10  # among the attributes of a member
_NEEDS = 45  # the version of the format that has zip64; nothing newer is written
_DESCRIPTORS = {False: (0,), True: (12, 16, 20, 24)}  # bytes after a member, with and without a signature and zip64
_TAIL = 64 * 1024  # holds the end records and, of most files, the directory
_SMALL = 4096  # members other than data.pkl and storages, which torch reads too (`version`, `byteorder`)

PICKLE_LIMIT = 1024**3
"""Largest `data.pkl` that is read, in bytes: `dp_zero_gather_scatter` puts whole optimizer states into one."""

DIRECTORY_LIMIT = 256 * 1024**2
"""Largest central directory that is read, in bytes."""

Read = Callable[[Sequence[tuple[int, int]]], list[bytes]]
"""Reads (offset, length) ranges of an archive, fewer bytes where it ends before."""


_SPLIT = "has an end record of a split or commented archive, which torch.save never writes"
_AMBIGUOUS = "is an archive that different readers read differently: it may hide what torch loads"


@dataclass(frozen=True, slots=True)
class Directory:
    """Where the central directory of a record is: its number of members, first byte and length in bytes."""

    count: int
    start: int
    size: int


class Member(NamedTuple):
    """A member of a record as the central directory gives it."""

    name: bytes  # the whole name, with the archive's folder
    crc: int  # CRC-32 of its bytes; 0 in every member when the writer had checksums switched off
    size: int  # bytes
    header: int  # first byte of its local header
    entry: int = 0  # first byte of its entry in the central directory

    @property
    def short(self) -> str:
        """The name without the archive's folder, printable."""
        return printable(self.name.partition(b"/")[2].decode("utf-8", "surrogateescape"))

    @property
    def is_storage(self) -> bool:
        """Whether it holds the data of a tensor."""
        return self.short.lower().startswith("data/")

    @property
    def is_code(self) -> bool:
        """Whether it holds code, as torch.jit.save writes it, compressed."""
        return self.short.lower().startswith("code/")


def read_end(tail: bytes, length: int) -> Directory:
    """The place of the central directory of a record of so many bytes, by its last `END_SIZE` bytes or more.

    Raises:
        UnreadableError: there is no end record, or one that contradicts itself or the length.

    Source: miniz in caffe2/serialize/inline_container.cc always writes the zip64 records; Python's zipfile when needed.
    """
    at = length - _PLAIN_END.size
    if len(tail) < _PLAIN_END.size:
        raise UnreadableError(f"has {length:,} bytes, fewer than an archive's end record", 0)
    plain = _PLAIN_END.unpack(tail[-_PLAIN_END.size :])
    signature, disk, first_disk, here, count, size, start, comment = plain
    if signature != b"PK\x05\x06":
        raise UnreadableError(f"has {_seen(signature)} where the archive's end record should be", at)
    if disk or first_disk or comment or here != count:
        raise UnreadableError(_SPLIT, at)
    if len(tail) >= END_SIZE and tail[-42:-38] == b"PK\x06\x07":
        at = length - END_SIZE
        _, on_disk, place, disks = _LOCATOR.unpack(tail[-42:-22])
        mark, rest, _, _, disk, first_disk, here, *wide = _END64.unpack(tail[-END_SIZE:-42])
        if (mark, rest, place, on_disk, disks) != (b"PK\x06\x06", _END64.size - 12, at, 0, 1):
            raise UnreadableError("has a zip64 locator that does not lead to its end record", length - 42)
        pairs = ((count, wide[0], _MARK16), (size, wide[1], _MARK32), (start, wide[2], _MARK32))
        if any(narrow not in (value, limit) for narrow, value, limit in pairs):
            raise UnreadableError("has two end records that contradict each other", at)
        count, size, start = wide
        if disk or first_disk or here != count:
            raise UnreadableError(_SPLIT, at)
    if start + size != at or not count:
        raise UnreadableError(f"has a central directory that ends at {start + size:,} instead of {at:,}", at)
    if count > MEMBERS_LIMIT:
        raise LimitError(f"has {count:,} members, the limit is {MEMBERS_LIMIT:,}")
    return Directory(count, start, size)


def read_members(data: bytes, directory: Directory) -> list[Member]:
    """The members in the order of their local headers, from the bytes of the central directory.

    Raises:
        UnreadableError: an entry is damaged, compressed, or leads outside, members overlap, or two readers would take
            different members for the same name.
        ScriptError: it is the directory of a TorchScript archive.
    """
    members, at = [], 0
    compressed: Member | None = None
    for _ in range(directory.count):
        if at + _CENTRAL.size > len(data):
            raise UnreadableError("has a central directory that ends inside an entry", directory.start + at)
        entry = _CENTRAL.unpack_from(data, at)
        signature, _, needs, flags, method, _, _, crc, packed, size, *lengths, disk, _, kind, header = entry
        named, extra, comment = lengths
        if signature != b"PK\x01\x02":
            raise UnreadableError(f"has {_seen(signature)} in its central directory", directory.start + at)
        end = at + _CENTRAL.size + named
        name, more = data[at + _CENTRAL.size : end], data[end : end + extra]
        if is_wide := _MARK32 in (size, packed, header):
            size, packed, header = _wide(more, (size, packed, header), directory.start + end)
        member = Member(name, crc, packed, header, directory.start + at)
        is_compressed = bool(method) or packed != size
        if flags & ~(_DESCRIPTOR | _UTF8) or (is_compressed and not member.is_code):
            raise _compressed(member)
        compressed = member if is_compressed else compressed
        # another field may give another name, size or place to a reader that knows it
        is_odd = (extra and not is_wide) or comment or disk or needs > _NEEDS or kind & _FOLDER
        if is_odd or not _is_one_name(name, flags):
            raise UnreadableError(_AMBIGUOUS, directory.start + at)
        members.append(member)
        at = end + extra + comment
    if at != len(data):
        raise UnreadableError(f"has {len(data) - at:,} bytes after its central directory", directory.start + at)
    members.sort(key=lambda member: member.header)
    if members[0].header:
        raise UnreadableError(f"has {members[0].header:,} bytes before its first member", 0)
    for member, limit in zip(members, limits_of(members, directory), strict=True):
        if member.header + LOCAL_SIZE + len(member.name) + member.size > limit:
            raise UnreadableError(f"has the member {_text(member.name)}, which overlaps the next one", member.header)
    # torch looks names up without regard to case, other readers do not
    names = {member.name.lower() for member in members}
    if len(names) < len(members) or len({member.name.partition(b"/")[0] for member in members}) > 1:
        raise UnreadableError(_AMBIGUOUS, directory.start)
    if any(member.is_code for member in members) and "constants.pkl" in {member.short.lower() for member in members}:
        raise ScriptError("is a TorchScript archive, whose code runs when it is loaded")
    if compressed is not None:
        raise _compressed(compressed)
    return members


def _compressed(member: Member) -> UnreadableError:
    what = f"has the compressed or encrypted member {_text(member.name)}, which torch.save never writes"
    return UnreadableError(what, member.header)


def limits_of(members: Sequence[Member], directory: Directory) -> list[int]:
    """Where each member ends with all that belongs to it: the next header, or the directory."""
    return [member.header for member in members[1:]] + [directory.start]


def data_start(header: bytes, member: Member, limit: int | None = None) -> int:
    """First byte of a member's data, by its local header and name.

    Args:
        limit: where the member ends (`limits_of`); None where that is not asked.

    Raises:
        UnreadableError: the header contradicts the central directory, or does not leave the member what it has.
    """
    if len(header) < LOCAL_SIZE + len(member.name):
        raise UnreadableError(f"ends inside the header of {_text(member.name)}", member.header)
    signature, _, flags, method, _, _, crc, packed, size, named, extra = _LOCAL.unpack_from(header)
    if signature != b"PK\x03\x04":
        raise UnreadableError(f"has {_seen(signature)} where the member {_text(member.name)} starts", member.header)
    if header[LOCAL_SIZE : LOCAL_SIZE + named] != member.name:
        what = f"is damaged: the zip's two directories disagree about the name of {_text(member.name)}"
        raise UnreadableError(what, member.header)
    # torch leaves CRC and sizes to the central directory
    local = (method, crc, packed, size)
    if local != (0, member.crc, member.size, member.size) and not (local == (0, 0, 0, 0) or _MARK32 in (packed, size)):
        raise UnreadableError(f"has two sizes or checksums for the member {_text(member.name)}", member.header)
    if flags & ~(_DESCRIPTOR | _UTF8):
        what = f"has an encrypted member {_text(member.name)}, which torch.save never writes"
        raise UnreadableError(what, member.header)
    start = member.header + LOCAL_SIZE + int(named) + int(extra)
    if limit is not None and limit - start - member.size not in _DESCRIPTORS[bool(flags & _DESCRIPTOR)]:
        what = "overlaps the next one" if limit < start + member.size else "leaves bytes before the next one"
        raise UnreadableError(f"has the member {_text(member.name)}, which {what}", member.header)
    return start


def _wide(extra: bytes, fields: tuple[int, int, int], at: int) -> tuple[int, int, int]:
    """Size, packed size and header place, those at the 32-bit mark from the zip64 extra field, in this order."""
    kind, length = struct.unpack_from("<2H", extra) if len(extra) >= 4 else (0, 0)
    count = sum(field == _MARK32 for field in fields)
    if (kind, length, len(extra)) != (1, 8 * count, 4 + 8 * count):
        raise UnreadableError("has an entry of more than 4 GiB without its size", at)
    wide = iter(struct.unpack_from(f"<{count}Q", extra, 4))
    size, packed, header = (next(wide) if field == _MARK32 else field for field in fields)
    return size, packed, header


def _is_one_name(name: bytes, flags: int) -> bool:
    """Whether all readers take these bytes for the same name: Python ends it at a zero and guesses at an encoding."""
    try:
        name.decode("utf-8" if flags & _UTF8 else "ascii")
    except UnicodeDecodeError:
        return False
    return b"\0" not in name and b"\\" not in name


def _seen(signature: bytes) -> str:
    return f"{len(signature)} zero bytes" if not any(signature) else f"the bytes {signature.hex(' ')}"


def _text(name: bytes) -> str:
    return printable(name[:200].decode("utf-8", "surrogateescape"))


# ---------------------------------------------------------------- a whole archive


class Archive(NamedTuple):
    """An archive of torch.save."""

    members: list[Member]  # in the order of their data
    limits: list[int]  # where each of them ends (`limits_of`)
    pickle: bytes  # the `data.pkl`, whose checksum matches


def ranges_in(data: bytes) -> Read:
    """Reads ranges of bytes in memory."""
    return lambda spans: [data[start : start + length] for start, length in spans]


def read_archive(read: Read, size: int) -> Archive:
    """An archive by its directory and the members beside its storages; tensors stay where they are.

    Raises:
        UnreadableError: it is damaged, no archive of torch.save, or one that two readers may read differently.
        ForeignError: it is an archive of something else, without a `data.pkl`.
        ScriptError: torch.jit.save wrote it.
        LimitError: its directory or its `data.pkl` is too large.

    Source: torch.serialization.save (>= 1.6), caffe2/serialize/inline_container.cc: one folder in the archive,
    `archive/` or the file's stem; names are looked up without regard to case
    """
    [tail] = read([(max(size - _TAIL, 0), min(size, _TAIL))])
    if _is_cut(tail):
        raise UnreadableError(f"is cut short: {human_bytes(size)} are there, the end of its archive is not", size)
    directory = read_end(tail[-END_SIZE:], size)
    if directory.size > DIRECTORY_LIMIT:
        raise LimitError(f"has a directory of {directory.size:,} bytes, the limit is {DIRECTORY_LIMIT:,}")
    at = directory.start - (size - len(tail))
    data = tail[at : at + directory.size] if at >= 0 else read([(directory.start, directory.size)])[0]
    members = read_members(data, directory)
    limits = limits_of(members, directory)
    names = {member.short.lower() for member in members}
    if "data.pkl" not in names:
        raise ForeignError("is a zip archive without a data.pkl")
    if "constants.pkl" in names:
        raise UnreadableError("is a TorchScript archive, whose code torch.load runs")
    pickled = next(member for member in members if member.short.lower() == "data.pkl")
    if pickled.size > PICKLE_LIMIT:
        raise LimitError(f"has a data.pkl of {pickled.size:,} bytes, the limit is {PICKLE_LIMIT:,}")
    is_wanted = [member is pickled or (member.size <= _SMALL and not member.is_storage) for member in members]
    wanted = [*compress(zip(members, limits, strict=True), is_wanted)]
    raw = read([(member.header, limit - member.header) for member, limit in wanted])
    pairs = zip(raw, wanted, strict=True)
    contents = {member.short.lower(): member_data(data, member, limit) for data, (member, limit) in pairs}
    if contents.get("byteorder", b"little") != b"little":  # numbers would be read in the wrong order
        raise UnreadableError("holds numbers in big-endian order, which ckptlint does not read")
    return Archive(members, limits, contents["data.pkl"])


def _is_cut(tail: bytes) -> bool:
    """Whether an archive stops before its end records; one that ends in zeros, or goes on after them, does not."""
    at = tail.rfind(b"PK\5\6")
    has_end = 0 <= at <= len(tail) - _PLAIN_END.size or tail[-42:-38] == b"PK\6\7"
    return not has_end and any(tail[-_PLAIN_END.size :])


def member_data(raw: bytes, member: Member, limit: int) -> bytes:
    """The bytes of a member, from those between its local header and `limit`.

    Raises:
        UnreadableError: they end early, contradict the directory, or do not match the checksum.
    """
    start = data_start(raw[: LOCAL_SIZE + len(member.name)], member, limit) - member.header
    data = raw[start : start + member.size]
    if len(data) < member.size:
        raise UnreadableError(f"ends inside {_text(member.name)}", member.header)
    if member.crc and zlib.crc32(data) != member.crc:
        raise UnreadableError(f"has a {member.short} whose bytes do not match its checksum", member.header + start)
    return data
