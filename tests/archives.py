"""Archives of torch.save, changed byte by byte."""

from __future__ import annotations

import io
import re
import struct
import zipfile
import zlib


def with_checksums(data: bytes) -> bytes:
    """The archive with the checksums of what its members hold now, in the central directory."""
    made = bytearray(data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members, at = archive.infolist(), archive.start_dir
    for member in members:
        named, extra = struct.unpack_from("<2H", made, member.header_offset + 26)
        start = member.header_offset + 30 + named + extra
        struct.pack_into("<I", made, at + 16, zlib.crc32(made[start : start + member.file_size]))
        at += 46 + sum(struct.unpack_from("<3H", made, at + 28))
    return bytes(made)


def members(data: bytes) -> dict[str, tuple[int, int]]:
    """Name without the folder -> first byte and length of each member's data."""
    found = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for member in archive.infolist():
            named, extra = struct.unpack_from("<2H", data, member.header_offset + 26)
            start = member.header_offset + 30 + named + extra
            found[member.filename.partition("/")[2]] = (start, member.file_size)
    return found


def with_members(data: bytes, /, **held: bytes) -> bytes:
    """The archive with other contents of some members, whole and with the right checksums; the name without `.pkl`."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w") as new:
        contents = {member.filename: old.read(member) for member in old.infolist()}
        folder = next(iter(contents)).partition("/")[0]
        for name, content in (contents | {f"{folder}/{name}.pkl": content for name, content in held.items()}).items():
            new.writestr(zipfile.ZipInfo(name), content)
    return file.getvalue()


def without_storage(data: bytes) -> bytes:
    """The archive without the first of its storages."""
    lost = next((name for name in members(data) if name.startswith("data/")), "")
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w") as new:
        for member in old.infolist():
            if member.filename.partition("/")[2] != lost:
                new.writestr(zipfile.ZipInfo(member.filename), old.read(member))
    return file.getvalue()


def flipped(data: bytes, bit: int) -> bytes:
    """The bytes with one bit turned round."""
    made = bytearray(data)
    made[bit // 8] ^= 1 << bit % 8
    return bytes(made)


def with_two_directories(data: bytes, seen: bytes, hidden: bytes) -> bytes:
    """An archive in which torch reads one `data.pkl` and Python's zipfile another.

    The end record says where one directory lies. torch goes there; zipfile takes the one that lies before the end
    record, and counts places from where that would have had to be.
    """
    first = with_members(data, data=seen, fill=bytes(2 * len(data)))  # longer than the other
    second = with_members(data, data=hidden, fill=b"")
    size, start = struct.unpack_from("<2I", first, len(first) - 10)
    own_size, own_start = struct.unpack_from("<2I", second, len(second) - 10)
    directory, at = bytearray(second[own_start : own_start + own_size]), 0
    assert size == own_size and start > own_start
    while at < own_size:
        [header] = struct.unpack_from("<I", directory, at + 42)
        struct.pack_into("<I", directory, at + 42, header + start - own_start)
        at += 46 + sum(struct.unpack_from("<3H", directory, at + 28))
    return first + second[:own_start] + bytes(directory) + first[-22:]


def with_tar_header(data: bytes) -> bytes:
    """The bytes, of which the first 512 are a tar header too: the checksum in the middle of a pickle fits."""
    made = bytearray(data[:512].ljust(512, b"\0"))
    made[148:156] = b" " * 8
    made[148:156] = b"%06o\0 " % sum(made)
    return bytes(made) + data[512:]


def with_other_values(data: bytes, number: int) -> bytes:
    """Archives, one after the other as DCP writes them, with other values in larger storages, checksums right."""
    made = bytearray(data)
    for found in re.finditer(rb"PK\x01\x02", data):
        at = found.start()
        size, named = struct.unpack_from("<I", data, at + 24)[0], struct.unpack_from("<H", data, at + 28)[0]
        name = data[at + 46 : at + 46 + named]
        header = at if size >= 32 and b"/data/" in name else -1
        length = struct.pack("<H", named)
        while header >= 0 and (data[header + 26 : header + 28], data[header + 30 : header + 30 + named]) != (
            length,
            name,
        ):
            header = data.rfind(b"PK\3\4", 0, header)
        if header >= 0:
            start = header + 30 + sum(struct.unpack_from("<2H", data, header + 26))
            made[start : start + 2] = struct.pack("<H", (number * 257) % 2**15)
            for at_byte, bits in ((0, number & 7), (2, number >> 3 & 7)):  # low bits: an update changes all elements
                place = slice(start + 4 + at_byte, start + size - 3, 4)
                made[place] = bytes(byte ^ bits for byte in made[place])
            struct.pack_into("<I", made, at + 16, zlib.crc32(made[start : start + size]))
    return bytes(made)
