"""The zip archive that torch.save makes, read in two ways.

`read_pickle_member` takes the `data.pkl` out of a whole file (`common.pt`, a train state). The rest judges the archive
of one record from a few of its bytes, strictly and without a search: a record may hold a whole archive as text inside
its `data.pkl`, so it is read from its end, whose place the metadata gives. Positions count from the record's start.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from dataclasses import dataclass
from typing import BinaryIO

from ckptlint.errors import LimitError, UnreadableError
from ckptlint.model.text import printable

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
_DESCRIPTOR, _ENCRYPTED = 0x8, 0x1


@dataclass(frozen=True, slots=True)
class Directory:
    """Where the central directory of a record lies: its number of members, first byte and length in bytes."""

    count: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a record as the central directory gives it.

    Attributes:
        name: the whole name, with the archive's folder.
        crc: CRC-32 of its bytes; 0 in every member when the writer had checksums switched off.
        size: bytes.
        header: first byte of its local header.
        entry: first byte of its entry in the central directory.
    """

    name: bytes
    crc: int
    size: int
    header: int
    entry: int = 0

    @property
    def short(self) -> str:
        """The name without the archive's folder, printable."""
        return printable(self.name.partition(b"/")[2].decode("utf-8", "surrogateescape"))


def read_end(tail: bytes, length: int) -> Directory:
    """The place of the central directory.

    Args:
        tail: the last bytes of the record, `END_SIZE` or more where it has as many.
        length: bytes of the record.

    Raises:
        UnreadableError: there is no end record, or one that contradicts itself or the length.

    Source:
        miniz in caffe2/serialize/inline_container.cc always writes the zip64 records; Python's zipfile when needed.
    """
    at = length - _PLAIN_END.size
    if len(tail) < _PLAIN_END.size:
        raise UnreadableError(f"has {length:,} bytes, fewer than an archive's end record", 0)
    plain = _PLAIN_END.unpack(tail[-_PLAIN_END.size :])
    signature, disk, first_disk, here, count, size, start, comment = plain
    if signature != b"PK\x05\x06":
        raise UnreadableError(f"has {_seen(signature)} where the archive's end record should be", at)
    if len(tail) >= END_SIZE and tail[-42:-38] == b"PK\x06\x07":
        at = length - END_SIZE
        _, _, place, _ = _LOCATOR.unpack(tail[-42:-22])
        mark, _, _, _, disk, first_disk, here, *wide = _END64.unpack(tail[-END_SIZE:-42])
        if mark != b"PK\x06\x06" or place != at:
            raise UnreadableError("has a zip64 locator that does not lead to its end record", length - 42)
        pairs = ((count, wide[0], _MARK16), (size, wide[1], _MARK32), (start, wide[2], _MARK32))
        if any(narrow not in (value, limit) for narrow, value, limit in pairs):
            raise UnreadableError("has two end records that contradict each other", at)
        count, size, start = wide
    if disk or first_disk or comment or here != count:
        raise UnreadableError("has an end record of a split or commented archive, which torch.save never writes", at)
    if start + size != at or not count:
        raise UnreadableError(f"has a central directory that ends at {start + size:,} instead of {at:,}", at)
    if count > MEMBERS_LIMIT:
        raise LimitError(f"has {count:,} members, the limit is {MEMBERS_LIMIT:,}")
    return Directory(count, start, size)


def read_members(data: bytes, directory: Directory) -> list[Member]:
    """The members in the order of their local headers.

    Args:
        data: the bytes of the central directory.

    Raises:
        UnreadableError: an entry is damaged, compressed, or leads outside, members overlap, or two readers would take
            different members for the same name.
    """
    members, at = [], 0
    for _ in range(directory.count):
        if at + _CENTRAL.size > len(data):
            raise UnreadableError("has a central directory that ends inside an entry", directory.start + at)
        entry = _CENTRAL.unpack_from(data, at)
        signature, _, _, flags, method, _, _, crc, packed, size, named, extra, comment, _, _, _, header = entry
        if signature != b"PK\x01\x02":
            raise UnreadableError(f"has {_seen(signature)} in its central directory", directory.start + at)
        end = at + _CENTRAL.size + named
        name, more = data[at + _CENTRAL.size : end], data[end : end + extra]
        if _MARK32 in (size, packed, header):
            size, packed, header = _wide(more, (size, packed, header), directory.start + end)
        if method or flags & _ENCRYPTED or packed != size:
            raise UnreadableError(
                f"has the compressed or encrypted member {_text(name)}, which torch.save never writes", header
            )
        members.append(Member(name, crc, size, header, directory.start + at))
        at = end + extra + comment
    if at != len(data):
        raise UnreadableError(f"has {len(data) - at:,} bytes after its central directory", directory.start + at)
    members.sort(key=lambda member: member.header)
    limits = [member.header for member in members[1:]] + [directory.start]
    for member, limit in zip(members, limits, strict=True):
        if member.header + LOCAL_SIZE + len(member.name) + member.size > limit:
            raise UnreadableError(f"has the member {_text(member.name)}, which overlaps the next one", member.header)
    # torch looks names up without regard to case, other readers do not
    names = {member.name.lower() for member in members}
    if len(names) < len(members) or len({name.partition(b"/")[0] for name in names}) > 1:
        raise UnreadableError(
            "is an archive that different readers read differently: it may hide what torch loads", directory.start
        )
    return members


def data_start(header: bytes, member: Member) -> int:
    """First byte of a member's data.

    Args:
        header: the bytes of its local header, the name included.

    Raises:
        UnreadableError: the header contradicts the central directory.
    """
    if len(header) < LOCAL_SIZE + len(member.name):
        raise UnreadableError(f"ends inside the header of {_text(member.name)}", member.header)
    signature, _, _, method, _, _, crc, packed, size, named, extra = _LOCAL.unpack_from(header)
    if signature != b"PK\x03\x04":
        raise UnreadableError(f"has {_seen(signature)} where the member {_text(member.name)} starts", member.header)
    if header[LOCAL_SIZE : LOCAL_SIZE + named] != member.name:
        raise UnreadableError(
            f"calls a member {_text(header[LOCAL_SIZE : LOCAL_SIZE + named])} in one place and {_text(member.name)} in "
            "another",
            member.header,
        )
    # torch leaves CRC and sizes to the central directory
    told = (method, crc, packed, size)
    if told != (0, member.crc, member.size, member.size) and not (told == (0, 0, 0, 0) or _MARK32 in (packed, size)):
        raise UnreadableError(f"has two sizes or checksums for the member {_text(member.name)}", member.header)
    return member.header + LOCAL_SIZE + int(named) + int(extra)


def _wide(extra: bytes, fields: tuple[int, int, int], at: int) -> tuple[int, int, int]:
    """Size, packed size and header place, those at the 32-bit mark from the zip64 extra field, in this order."""
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<2H", extra)
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{min(length, len(extra) - 4) // 8}Q", extra, 4))
            try:
                size, packed, header = (next(wide) if field == _MARK32 else field for field in fields)
            except (StopIteration, RuntimeError):
                break
            return size, packed, header
        extra = extra[4 + length :]
    raise UnreadableError("has an entry of more than 4 GiB without its size", at)


def _seen(signature: bytes) -> str:
    return f"{len(signature)} zero bytes" if not any(signature) else f"the bytes {signature.hex(' ')}"


def _text(name: bytes) -> str:
    return printable(name[:200].decode("utf-8", "surrogateescape"))


PICKLE_LIMIT = 1024**3
"""Largest `data.pkl` that is read, in bytes: `dp_zero_gather_scatter` puts whole optimizer states into one."""


def read_pickle_member(file: BinaryIO) -> bytes:
    """The `data.pkl` of a torch.save archive; its tensors stay on disk.

    Raises:
        UnreadableError: the file is no zip archive, or holds no `data.pkl`.
        LimitError: the member is larger than `PICKLE_LIMIT`.

    Source:
        torch.serialization.save (>= 1.6): one folder in the archive, `archive/` or the file's stem.
    """
    try:
        if file.read(4) != b"PK\x03\x04":
            raise UnreadableError("is not a torch.save archive: it does not start with a zip member")
        with zipfile.ZipFile(file) as archive:
            member = _only_pickle(archive)
            if member.file_size > PICKLE_LIMIT:
                raise LimitError(f"has a data.pkl of {member.file_size:,} bytes, the limit is {PICKLE_LIMIT:,}")
            if member.compress_type != zipfile.ZIP_STORED:
                raise UnreadableError("has a compressed data.pkl, which torch.save never writes")
            return archive.read(member)
    except (
        zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, ValueError, RuntimeError, OverflowError
    ) as error:  # fmt: skip  # OverflowError: a place beyond 2**63
        reason = printable(str(error)) or type(error).__name__
        raise UnreadableError(f"is not a torch.save archive ({reason})") from None


def _only_pickle(archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    """The one `data.pkl` of an archive; torch looks names up without regard to case, other readers do not.

    Source:
        caffe2/serialize/inline_container.cc (mz_zip_reader_locate_file without MZ_ZIP_FLAG_CASE_SENSITIVE)
    """
    names = [member.filename.lower() for member in archive.infolist()]
    pickles = [member for member in archive.infolist() if member.filename.lower().rpartition("/")[2] == "data.pkl"]
    if not pickles:
        raise UnreadableError("is a zip archive without a data.pkl")
    folders = {name.partition("/")[0] for name in names}
    if len(pickles) > 1 or len(set(names)) < len(names) or len(folders) > 1 or "/" not in pickles[0].filename:
        raise UnreadableError("is an archive that different readers read differently: it may hide what torch loads")
    return pickles[0]
