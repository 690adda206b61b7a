"""What a file is by its first bytes, whatever its name: a pickle, or what may hold one."""

from __future__ import annotations

import pickle
import pickletools
import re
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from io import SEEK_END, BytesIO
from math import prod
from typing import Any, BinaryIO, Literal

from ckptlint.errors import LimitError, ScriptError, UnreadableError
from ckptlint.formats.pickles.joblib_arrays import MARK
from ckptlint.formats.pickles.safe_pickle import asks_for_names
from ckptlint.formats.torch_legacy import is_tar
from ckptlint.patterns import lazy_pattern

HEAD = 512
"""Bytes that `file_content` asks for."""

FileContent = Literal["pickle", "perhaps pickle", "archive", "array", "packed", "tar"]
"""A pickle, of torch's old format too; a text that may be one of protocol 0 or 1; a zip file; an array; packed; tar."""

_ZIP, _ARRAY = (b"PK\3\4", b"PK\5\6"), b"\x93NUMPY"  # numpy.load opens what starts with the end of an empty zip too
_GZIP, _BZIP2, _XZ = b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0"
# frames of LZ4, its older ones, Zstandard; 7z, RAR, lzip, compress, Snappy
_NOT_UNPACKED = (b'\x04"M\x18', b"\x02!L\x18", b"\x28\xb5\x2f\xfd", *(bytes([80 + n]) + b"*M\x18" for n in range(16)))
_NOT_UNPACKED += (b"7z\xbc\xaf\x27\x1c", b"Rar!\x1a\x07", b"LZIP\1", b"\x1f\x9d\x90", b"\xff\6\0\0sNaPpY")
# properties, size of the dictionary, size of the content or -1, first byte of the coder (xz, doc/lzma-file-format.txt)
_LZMA = lazy_pattern(rb"(?:].{4}(?:\xff{8}|.{5}\0{3})|[\0-\xe0].{4}\xff{8})\0", re.DOTALL)
_Z_FILE = lazy_pattern(rb"ZF[-+\w\s]{19} ?")  # joblib < 0.10, read_zfile of joblib.numpy_pickle_compat: then zlib
_ZEROS = lazy_pattern(rb"\0*")
_PACK_MEMORY = 2**28  # bytes that an unpacker may take
_FEW = 2**20  # packed bytes that tell what they hold: bzip2 packs almost as many at once
_PIECE = 2**16  # packed bytes that are unpacked at once: damage hides what came out of one piece
# what can be the first opcode: it takes nothing from the stack or the memo, and C's readers take its argument
_FIRST = lazy_pattern(
    rb"[()\]}NJKMGTUVXBCP\x80\x82-\x84\x88-\x8f\x95\x96]|c[\w.\x80-\xff]+\n[\w.\x80-\xff]+\n"
    rb"|[IL]\s*[-+]?\d|F[-+.\dinIN]|S['\"]"
)
_NAMES = ("GLOBAL", "STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4")
_DEPTH = 3  # archives and packed files in one another that are opened
_TOO_DEEP = f"holds archives or packed files in one another, more than {_DEPTH} deep"
_MEMBERS = 65_535  # of a zip or tar file that are looked at
_HEADER = 2**20  # bytes of the header of an array, which grows with its named fields
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
    if head.startswith(_NOT_UNPACKED):
        return "packed"
    if not (_FIRST.match(head) and _is_decoded(head)):
        return "tar" if is_tar(head) else "packed" if _unpacker(head) is not None else None
    return "pickle" if head[0] == 0x80 and head[1:2] > b"\1" else "perhaps pickle"  # no pickler writes PROTO 0 or 1


def is_packed(head: bytes) -> bool:
    """Whether a file says by its first bytes that it is packed, in a way that is not unpacked here too."""
    return head.startswith((*_NOT_UNPACKED, _GZIP, _BZIP2, _XZ)) or bool(_LZMA.match(head) or _Z_FILE.match(head))


def _is_decoded(head: bytes) -> bool:
    """Whether bytes are opcodes of a pickle up to their end or to joblib's arrays; C may take what Python refuses."""
    try:
        return all(opcode.name != "PROTO" or value in range(6) for opcode, value, _ in pickletools.genops(head))
    except ValueError as error:
        return MARK in head or not str(error).endswith(" unknown")


def is_pickled(start: bytes, size: int) -> bool:
    """Whether a text of so many bytes is a pickle that reaches a name; where it is cut, its first opcode decides.

    To be asked in a child process. torch reads texts as UTF-8, and the safe reader as ASCII.

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
        return False
    except ValueError:
        return data[end : end + 1] in (pickle.INT, pickle.LONG)  # C knows more forms of numbers


def pickles_in(content: FileContent | None, file: BinaryIO, limit: int, depth: int = 1) -> Iterator[BinaryIO]:
    """The pickles inside a file of this content: members, packed, in arrays of objects; and zip files, torch's or not.

    Archives and packed data in one another are followed down to `_DEPTH`. Each of the files is to be read before the
    next is asked for. To be asked in a child process.

    Raises:
        UnreadableError: something inside is damaged, packed in a way that is not unpacked here, or too deep.
        LimitError: something inside that may be a pickle has more than `limit` bytes.
    """
    if content == "array":
        yield from _in_arrays(file, file.seek(0, SEEK_END), limit)
    elif content == "archive":
        yield from _in_zip(file, limit, depth)
    elif content == "tar":
        yield from _in_tar(file, limit, depth)
    elif content == "packed":
        yield from _in_packed(file, limit, depth)


def _in_member(file: BinaryIO, size: int, limit: int, depth: int) -> Iterator[BinaryIO]:
    """The pickles in what is inside `depth` others, itself too where it is one or a file of torch.save."""
    head = file.read(HEAD)
    content = file_content(head)
    if content is None:
        return
    file.seek(0)
    if content == "array":
        yield from _in_arrays(file, size, limit)
        return
    if content == "perhaps pickle":
        container: FileContent = "tar" if is_tar(head) else "packed"  # which may start with the same bytes
        content = "pickle" if is_pickled(file.read(limit), size) else container
        file.seek(0)
    from zipfile import ZipExtFile

    if isinstance(file, ZipExtFile):  # to go back in one unpacks it again
        file = _in_memory(file, limit)
    if content in ("pickle", "archive"):
        yield file
    if content == "pickle":
        return
    if depth >= _DEPTH and content != "packed" and not (content == "archive" and _is_torch(file)):
        raise LimitError(_TOO_DEEP)
    file.seek(0)
    yield from pickles_in(content, file, limit, depth + 1)


def _in_memory(file: BinaryIO, limit: int) -> BytesIO:
    data = file.read(limit + 1)
    if len(data) > limit:
        raise LimitError(f"holds more than {limit:,} bytes in one member")
    return BytesIO(data)


# ---------------------------------------------------------------- packed


def _in_packed(file: BinaryIO, limit: int, depth: int) -> Iterator[BinaryIO]:
    """The pickles in packed data; texts are not unpacked further than their first bytes."""
    packed = file.read(_FEW)
    if packed.startswith(_NOT_UNPACKED):
        raise UnreadableError("is packed, or holds what is packed, in a way that ckptlint does not unpack")
    start = _unpacked(packed, HEAD) or _unpacked(packed + file.read(limit), HEAD)
    inner = file_content(start)
    if inner is None or (inner == "packed" and not is_packed(start) and not _unpacked(start, 1)):
        return  # numbers often start as zlib does
    if depth > _DEPTH:
        raise LimitError(_TOO_DEEP)
    file.seek(0)
    data = _unpacked(file.read(limit), limit + 1)
    is_other = is_tar(data[:HEAD]) or _unpacker(data[:HEAD]) is not None
    if inner == "perhaps pickle" and not is_other and not is_pickled(data[:limit], len(data)):
        return
    if len(data) > limit:
        raise LimitError(f"holds more than {limit:,} bytes of compressed data")
    yield from _in_member(BytesIO(data), len(data), limit, depth)


def _unpacked(data: bytes, limit: int) -> bytes:
    """What packed bytes hold, up to `limit` bytes of it, and up to where they are cut or damaged."""
    import lzma

    unpacked, header = bytearray(), _Z_FILE.match(data)
    start = header.end() if header is not None else 0
    while (unpacker := _unpacker(data[start : start + HEAD])) is not None:
        length = HEAD  # of the next piece; there may be a million members of a few bytes, each with an end to look for
        while start < len(data) and not unpacker.eof:
            piece = data[start : start + length]
            start, length = start + len(piece), min(2 * length, _PIECE)
            try:
                unpacked += unpacker.decompress(piece, limit - len(unpacked))
            except (zlib.error, lzma.LZMAError, OSError) as error:
                if "emory" in str(error):
                    raise LimitError(f"takes more than {_PACK_MEMORY:,} bytes of memory to unpack") from None
                return bytes(unpacked)
            if len(unpacked) >= limit:
                return bytes(unpacked)
        zeros = _ZEROS.match(data, start - len(unpacker.unused_data))  # Python's gzip goes on behind them
        start = zeros.end() if zeros is not None else len(data)
    return bytes(unpacked)


def _unpacker(data: bytes) -> Any:
    """What unpacks bytes that start so; None for bytes that are not packed."""
    if data.startswith(_BZIP2):
        import bz2

        return bz2.BZ2Decompressor()
    if data.startswith(_XZ) or _LZMA.match(data):  # told which, as liblzma knows the latter by usual sizes alone
        import lzma

        form = lzma.FORMAT_XZ if data.startswith(_XZ) else lzma.FORMAT_ALONE
        return lzma.LZMADecompressor(form, memlimit=_PACK_MEMORY)
    if _is_zlib(data) or data.startswith(_GZIP) or _Z_FILE.match(data):
        return zlib.decompressobj(47)  # either of both
    return zlib.decompressobj(-15) if _is_deflated(data) else None


def _is_zlib(data: bytes) -> bool:
    return len(data) > 1 and data[0] & 15 == 8 and data[0] < 0x80 and int.from_bytes(data[:2], "big") % 31 == 0


def _is_deflated(head: bytes) -> bool:
    """Whether bytes without any mark inflate to what is opened: numbers and texts hardly ever do."""
    try:
        start = zlib.decompressobj(-15).decompress(head, HEAD)
    except zlib.error:
        return False
    is_opened = start.startswith((*_ZIP, _ARRAY)) or is_packed(start) or _is_zlib(start) or is_tar(start)
    return len(start) > 8 and (is_opened or bool(_FIRST.match(start) and _is_decoded(start)))


# ---------------------------------------------------------------- arrays


def _in_arrays(file: BinaryIO, size: int, limit: int) -> Iterator[BinaryIO]:
    """The pickle in arrays that stand in a row, as `numpy.load` reads one after another from an open file.

    Source: numpy.lib.format.read_array
    """
    start, head = 0, _ARRAY
    while head.startswith(_ARRAY):
        file.seek(start + len(_ARRAY))
        length = _bytes_of_array(file)
        if length is None or file.tell() + length >= size:
            break
        start = file.tell() + length
        file.seek(start)
        head = file.read(HEAD)
    else:
        length = None if file_content(head) in ("pickle", "perhaps pickle") else 0
        file.seek(start)
        if length == 0 and any(piece.strip(b"\0") for piece in iter(partial(file.read, _FEW), b"")):
            raise UnreadableError(f"has {size - start:,} bytes after its array, which are no array and no pickle")
    if length is None:
        yield _in_memory(file, limit)


def _bytes_of_array(file: BinaryIO) -> int | None:
    """Bytes of the elements of an array by its version and its header, which is read; None for one of objects.

    Source: numpy.lib.format, which evaluates literals alone and reads what Python 2 wrote in a second way; version 3.0
    differs from 2.0 in the encoding of the names of fields
    """
    from numpy.lib.format import read_array_header_1_0, read_array_header_2_0

    try:
        is_first = file.read(2)[0] == 1
        form, read_header = ("<H", read_array_header_1_0) if is_first else ("<I", read_array_header_2_0)
        size = file.read(struct.calcsize(form))
        header = BytesIO(size + file.read(min(*struct.unpack(form, size), _HEADER)))
        with warnings.catch_warnings(action="ignore"):
            shape, _, dtype = read_header(header, max_header_size=_HEADER)
        return None if dtype.hasobject else max(prod(shape) * dtype.itemsize, 0)
    except Exception as error:  # a header can make numpy raise anything
        raise UnreadableError(f"holds an array whose header is damaged ({type(error).__name__})") from None


# ---------------------------------------------------------------- archives


def _in_zip(file: BinaryIO, limit: int, depth: int) -> Iterator[BinaryIO]:
    """The pickles in the members of a zip file, whatever they are called, but for those that torch.load reads itself.

    Source: numpy.lib.npyio.NpzFile, which reads it by Python's zipfile; torch.serialization; torch.package
    """
    from zipfile import ZipFile

    try:
        with ZipFile(file) as archive:
            members = sorted(archive.infolist(), key=lambda member: not member.filename.endswith(".npy"))
            names = {member.filename.partition("/")[2].lower() for member in members}
            if ".data/extern_modules" in names and any(name.endswith(".py") for name in names):
                raise ScriptError("is an archive of torch.package with code, which runs when it is loaded")
            for member in members[:_MEMBERS]:
                inner = member.filename.partition("/")[2].lower()
                is_torchs = "data.pkl" in names and (inner == "data.pkl" or inner.startswith("data/"))
                with archive.open(member) as opened:
                    if is_torchs and opened.read(len(_ARRAY)) != _ARRAY:
                        continue
                    opened.seek(0)
                    yield from _in_member(opened, member.file_size, limit, depth)  # type: ignore[arg-type]
            if len(members) > _MEMBERS:
                raise LimitError(f"has {len(members):,} members, the limit is {_MEMBERS:,}")
    except _damages() as error:
        what = f"is a zip file, or holds one, that cannot be unpacked ({type(error).__name__})"
        raise UnreadableError(what) from None


def _is_torch(file: BinaryIO) -> bool:
    """Whether an archive has what torch.load reads first."""
    from zipfile import ZipFile

    with suppress(*_damages()), ZipFile(file) as archive:
        return any(name.partition("/")[2].lower() == "data.pkl" for name in archive.namelist())
    return False


def _damages() -> tuple[type[Exception], ...]:
    """What reading a damaged zip file raises."""
    import lzma
    from zipfile import BadZipFile

    return BadZipFile, zlib.error, lzma.LZMAError, OSError, EOFError, ValueError, RuntimeError


def _in_tar(file: BinaryIO, limit: int, depth: int) -> Iterator[BinaryIO]:
    """The pickles in the members of a tar file.

    Source: torch.serialization._legacy_load (torch 2.13)
    """
    import tarfile

    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for number, member in enumerate(archive):
                if member.name == "storages":
                    what = "is a tar archive with the storages of torch < 0.2, which torch.load unpickles"
                    raise UnreadableError(what)
                if number == _MEMBERS:
                    raise LimitError(f"has more than {_MEMBERS:,} members")
                if member.isfile() and (opened := archive.extractfile(member)) is not None:
                    yield from _in_member(opened, member.size, limit, depth)  # type: ignore[arg-type]
            file.seek(archive.offset)
            if any(piece.strip(b"\0") for piece in iter(partial(file.read, _FEW), b"")):
                raise UnreadableError("is a tar file, or holds one, that goes on after its last member")
    except (tarfile.TarError, OSError, ValueError) as error:
        raise UnreadableError(f"is a tar file, or holds one, that is damaged ({type(error).__name__})") from None
