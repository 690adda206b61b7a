"""What a file is by its first bytes, whatever its name: a pickle, or what may hold one."""

from __future__ import annotations

import ast
import bz2
import lzma
import pickle
import pickletools
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from typing import Any, BinaryIO, Literal

from ckptlint.errors import LimitError, UnreadableError
from ckptlint.formats.pickles.safe_pickle import asks_for_names

HEAD = 512
"""Bytes that `file_content` asks for."""

FileContent = Literal["pickle", "perhaps pickle", "archive", "array", "packed"]
"""A pickle, of torch's old format too; a text that may be one of protocol 0 or 1; a zip file; an array; packed."""

_ZIP, _ARRAY = b"PK\3\4", b"\x93NUMPY"
_GZIP, _BZIP2, _XZ, _LZMA = b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"]\0\0"
_PACK_MEMORY = 2**28  # bytes that an unpacker may take
_FEW = 2**20  # packed bytes that tell what they hold: bzip2 packs almost as many at once
_PIECE = 2**16  # packed bytes that are unpacked at once: damage hides what came out of one piece
_BAD_ZIP = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, OSError, EOFError, ValueError, RuntimeError)
# what can be the first opcode: it takes nothing from the stack or the memo, and C's readers take its argument
_FIRST = re.compile(
    rb"[()\]}NJKMGTUVXBCP\x80\x82-\x84\x88-\x8f\x95\x96]|c[\w.\x80-\xff]+\n[\w.\x80-\xff]+\n"
    rb"|[IL]\s*[-+]?\d|F[-+.\dinIN]|S['\"]"
)
_NAMES = ("GLOBAL", "STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4")
_MEMBERS = 4096  # of a zip file whose first bytes are looked at
_NOT_ASCII = bytes.maketrans(bytes(range(128, 256)), b"?" * 128)


def file_content(head: bytes) -> FileContent | None:
    """What the first `HEAD` bytes of a file say; None for what no loader unpickles.

    >>> file_content(b"PK\\3\\4"), file_content(b"cos\\nsystem\\n(S'ls'\\ntR."), file_content(b'{"a": 1}')
    ('archive', 'perhaps pickle', None)
    """
    if head.startswith(_ZIP):
        return "archive"
    if head.startswith(_ARRAY):
        return "array"
    if not (_FIRST.match(head) and _is_decoded(head)):
        return "packed" if _unpacker(head) is not None else None
    return "pickle" if head[0] == 0x80 and head[1:2] > b"\1" else "perhaps pickle"  # no pickler writes PROTO 0 or 1


def _is_decoded(head: bytes) -> bool:
    """Whether the bytes are opcodes of a pickle as far as they go; what Python refuses else, C may take."""
    try:
        return all(opcode.name != "PROTO" or value in range(6) for opcode, value, _ in pickletools.genops(head))
    except ValueError as error:
        return not str(error).endswith(" unknown")


def is_pickled(start: bytes, size: int) -> bool:
    """Whether a text that may be a pickle is one that reaches a name; a part of one is by its first opcode.

    To be asked in a child process. torch reads texts as UTF-8, and the safe reader as ASCII.

    Args:
        start: its first bytes, as many as are read.
        size: bytes of all of it.

    Raises:
        LimitError: telling takes too much memory.
    """
    if size > len(start) and start[:1] in (pickle.MARK, pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.EMPTY_TUPLE):
        return True
    try:
        return asks_for_names(start) or (not start.isascii() and asks_for_names(start.translate(_NOT_ASCII)))
    except LimitError:
        if _may_reach_a_name(start):
            raise
        return False


def _may_reach_a_name(data: bytes) -> bool:
    """Whether a pickle has the opcode of a name before its end, or before what ends every reader."""
    stream, end = BytesIO(data), 0
    try:
        for opcode, _, _ in pickletools.genops(stream):
            if opcode.name in _NAMES:
                return True
            end = stream.tell()
    except ValueError:
        return data[end : end + 1] in (pickle.INT, pickle.LONG)  # C knows more forms of numbers
    return False


def pickles_in(content: FileContent | None, file: BinaryIO, limit: int) -> Iterator[bytes]:
    """The pickles inside a file of this content: in its arrays of objects, or packed, then a file of torch.save too.

    Raises:
        UnreadableError: one is damaged.
        LimitError: one has more than `limit` bytes.
    """
    if content == "archive":
        yield from _object_pickles(file, limit)
    elif content == "array" and (found := _object_pickle(file, limit)):
        yield found
    elif content == "packed":
        packed = file.read(_FEW)
        inner = file_content(_unpacked(packed, HEAD) or _unpacked(packed + file.read(limit), HEAD))
        if inner is None or inner == "packed":
            return
        file.seek(0)
        data = _unpacked(file.read(limit), limit + 1)
        if inner == "perhaps pickle" and not is_pickled(data[:limit], len(data)):
            return
        if len(data) > limit:
            raise LimitError(f"holds more than {limit:,} bytes that are packed")
        if inner in ("pickle", "perhaps pickle") or (inner == "archive" and b"data.pkl" in data.lower()):
            yield data
        else:
            yield from pickles_in(inner, BytesIO(data), limit)


# ---------------------------------------------------------------- packed


def _unpacked(data: bytes, limit: int) -> bytes:
    """What packed bytes hold, up to `limit` bytes of it, and up to where they are cut or damaged.

    Raises:
        LimitError: unpacking them takes too much memory.
    """
    found, start = bytearray(), 0
    while (unpacker := _unpacker(data[start : start + HEAD])) is not None:
        length = HEAD  # of the next piece; there may be a million members of a few bytes, each with an end to look for
        while start < len(data) and not unpacker.eof:
            piece = data[start : start + length]
            start, length = start + len(piece), min(2 * length, _PIECE)
            try:
                found += unpacker.decompress(piece, limit - len(found))
            except (zlib.error, lzma.LZMAError, OSError) as error:
                if "emory" in str(error):
                    raise LimitError(f"takes more than {_PACK_MEMORY:,} bytes of memory to unpack") from None
                return bytes(found)
            if len(found) >= limit:
                return bytes(found)
        start -= len(unpacker.unused_data)
    return bytes(found)


def _unpacker(data: bytes) -> Any:
    """What unpacks bytes that start so; None for bytes that are not packed."""
    if data.startswith((_XZ, _LZMA)):
        return lzma.LZMADecompressor(memlimit=_PACK_MEMORY)
    if data.startswith(_BZIP2):
        return bz2.BZ2Decompressor()
    is_zlib = len(data) > 1 and data[0] & 15 == 8 and data[0] < 0x80 and int.from_bytes(data[:2], "big") % 31 == 0
    return zlib.decompressobj(47) if is_zlib or data.startswith(_GZIP) else None  # 47: either of both


# ---------------------------------------------------------------- arrays


def _object_pickle(file: BinaryIO, limit: int) -> bytes:
    """The pickle in an array of objects; b"" for an array of numbers, and for what is none.

    Raises:
        UnreadableError: it is damaged.
        LimitError: it has more than `limit` bytes.

    Source:
        numpy.lib.format.read_array
    """
    import numpy as np

    start = file.read(8)
    if not start.startswith(_ARRAY):
        return b""
    width, form = (2, "<H") if start[6:7] == b"\1" else (4, "<I")
    header = b""
    try:
        [length] = struct.unpack(form, file.read(width))
        header = file.read(min(length, limit))
        has_objects = np.lib.format.descr_to_dtype(ast.literal_eval(header.decode("latin-1"))["descr"]).hasobject
    except Exception:  # a header can make numpy raise anything; it has a second way to read one
        has_objects = b"O" in header or b"object" in header
    if not has_objects:
        return b""
    try:
        data = file.read(limit + 1)
    except _BAD_ZIP as error:
        raise UnreadableError(f"holds an array of objects that is damaged ({type(error).__name__})") from None
    if len(data) > limit:
        raise LimitError(f"holds an array of more than {limit:,} bytes of objects")
    return data


def _object_pickles(file: BinaryIO, limit: int) -> Iterator[bytes]:
    """The pickles in the arrays of a zip file, whatever its members are called.

    Raises:
        as `pickles_in`

    Source:
        numpy.lib.npyio.NpzFile, which reads it by Python's zipfile
    """
    with suppress(*_BAD_ZIP), zipfile.ZipFile(file) as archive:
        members = sorted(archive.infolist(), key=lambda member: not member.filename.endswith(".npy"))
        for member in members[:_MEMBERS]:
            with suppress(*_BAD_ZIP), archive.open(member) as opened:  # the loader cannot open it either
                if found := _object_pickle(opened, limit):  # type: ignore[arg-type]
                    yield found
