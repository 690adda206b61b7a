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
from io import BytesIO
from typing import Any, BinaryIO, Literal

from ckptlint.errors import LimitError, UnreadableError
from ckptlint.formats.pickles.joblib_arrays import MARK
from ckptlint.formats.pickles.safe_pickle import asks_for_names
from ckptlint.formats.torch_legacy import is_tar

HEAD = 512
"""Bytes that `file_content` asks for."""

FileContent = Literal["pickle", "perhaps pickle", "archive", "array", "packed", "tar"]
"""A pickle, of torch's old format too; a text that may be one of protocol 0 or 1; a zip file; an array; packed; tar."""

_ZIP, _ARRAY = (b"PK\3\4", b"PK\5\6"), b"\x93NUMPY"  # numpy.load opens what starts with the end of an empty zip too
_GZIP, _BZIP2, _XZ = b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0"
_NOT_UNPACKED = (b'\x04"M\x18', b"\x02!L\x18", b"\x28\xb5\x2f\xfd")  # LZ4 frames, its older ones, Zstandard
# properties, size of the dictionary, size of the content or -1, first byte of the coder (xz, doc/lzma-file-format.txt)
_LZMA = re.compile(rb"(?:].{4}(?:\xff{8}|.{5}\0{3})|[\0-\xe0].{4}\xff{8})\0", re.DOTALL)
_Z_FILE = re.compile(rb"ZF[-+\w\s]{19} ?")  # joblib < 0.10, read_zfile of joblib.numpy_pickle_compat: then zlib
_ZEROS = re.compile(rb"\0*")
_PACK_MEMORY = 2**28  # bytes that an unpacker may take
_FEW = 2**20  # packed bytes that tell what they hold: bzip2 packs almost as many at once
_PIECE = 2**16  # packed bytes that are unpacked at once: damage hides what came out of one piece
# what can be the first opcode: it takes nothing from the stack or the memo, and C's readers take its argument
_FIRST = re.compile(
    rb"[()\]}NJKMGTUVXBCP\x80\x82-\x84\x88-\x8f\x95\x96]|c[\w.\x80-\xff]+\n[\w.\x80-\xff]+\n"
    rb"|[IL]\s*[-+]?\d|F[-+.\dinIN]|S['\"]"
)
_NAMES = ("GLOBAL", "STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4")
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
    """Whether a text is a pickle that reaches a name; where the text is cut, its first opcode decides.

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
        UnreadableError: one is damaged, or in an archive of torch < 0.2.
        LimitError: one has more than `limit` bytes.
    """
    if content == "archive":
        yield from _object_pickles(file, limit)
    elif content == "array" and (found := _object_pickle(file, limit)):
        yield found
    elif content == "tar" and _has_storages(file):
        raise UnreadableError("is a tar archive with the storages that torch.load unpickles, a form of torch < 0.2")
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
            raise LimitError(f"holds more than {limit:,} bytes of compressed data")
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
    import lzma

    found, header = bytearray(), _Z_FILE.match(data)
    start = header.end() if header is not None else 0
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
        zeros = _ZEROS.match(data, start - len(unpacker.unused_data))  # Python's gzip goes on behind them
        start = zeros.end() if zeros is not None else len(data)
    return bytes(found)


def _unpacker(data: bytes) -> Any:
    """What unpacks bytes that start so; None for bytes that are not packed."""
    if data.startswith(_BZIP2):
        import bz2

        return bz2.BZ2Decompressor()
    if data.startswith(_XZ) or _LZMA.match(data):  # told which, as liblzma knows the latter by usual sizes alone
        import lzma

        form = lzma.FORMAT_XZ if data.startswith(_XZ) else lzma.FORMAT_ALONE
        return lzma.LZMADecompressor(form, memlimit=_PACK_MEMORY)
    is_zlib = len(data) > 1 and data[0] & 15 == 8 and data[0] < 0x80 and int.from_bytes(data[:2], "big") % 31 == 0
    is_zlib = is_zlib or data.startswith(_GZIP) or _Z_FILE.match(data) is not None
    return zlib.decompressobj(47) if is_zlib else None  # 47: either of both


# ---------------------------------------------------------------- arrays


def _object_pickle(file: BinaryIO, limit: int) -> bytes:
    """The pickle in an array of objects; b"" for an array of numbers, and for what is none.

    Raises:
        UnreadableError: it is damaged.
        LimitError: it has more than `limit` bytes.

    Source:
        numpy.lib.format.read_array
    """
    if file.read(len(_ARRAY)) != _ARRAY or not _has_objects(file):
        return b""
    try:
        data = file.read(limit + 1)
    except _damages() as error:
        raise UnreadableError(f"holds an array of objects that is damaged ({type(error).__name__})") from None
    if len(data) > limit:
        raise LimitError(f"holds an array of more than {limit:,} bytes of objects")
    return data


def _has_objects(file: BinaryIO) -> bool:
    """Whether an array is one of objects, by its version and its header.

    Raises:
        UnreadableError: numpy cannot read the header, or it has more than `_HEADER` bytes.

    Source:
        numpy.lib.format, which evaluates literals alone and reads what Python 2 wrote in a second way; version 3.0
        differs from 2.0 in the encoding of the names of fields
    """
    from numpy.lib.format import read_array_header_1_0, read_array_header_2_0

    try:
        is_first = file.read(2)[0] == 1
        form, read_header = ("<H", read_array_header_1_0) if is_first else ("<I", read_array_header_2_0)
        size = file.read(struct.calcsize(form))
        header = BytesIO(size + file.read(min(*struct.unpack(form, size), _HEADER)))
        with warnings.catch_warnings(action="ignore"):
            return bool(read_header(header, max_header_size=_HEADER)[2].hasobject)
    except Exception as error:  # a header can make numpy raise anything
        raise UnreadableError(f"holds an array whose header is damaged ({type(error).__name__})") from None


def _object_pickles(file: BinaryIO, limit: int) -> Iterator[bytes]:
    """The pickles in the arrays of a zip file, whatever its members are called.

    Raises:
        as `pickles_in`

    Source:
        numpy.lib.npyio.NpzFile, which reads it by Python's zipfile
    """
    import zipfile

    with suppress(*_damages()), zipfile.ZipFile(file) as archive:
        members = sorted(archive.infolist(), key=lambda member: not member.filename.endswith(".npy"))
        for member in members[:_MEMBERS]:
            try:
                with archive.open(member) as opened:
                    pickled = _object_pickle(opened, limit)  # type: ignore[arg-type]
            except _damages() as error:
                if isinstance(error, NotImplementedError) and member.filename.endswith(".npy"):
                    raise UnreadableError("holds an array whose compression this Python cannot read") from None
                continue  # the loader cannot open it either
            if pickled:
                yield pickled
        if len(members) > _MEMBERS:
            raise LimitError(f"has {len(members):,} members, the limit is {_MEMBERS:,}")


def _damages() -> tuple[type[Exception], ...]:
    """What reading a damaged zip file raises."""
    import lzma
    import zipfile

    return zipfile.BadZipFile, zlib.error, lzma.LZMAError, OSError, EOFError, ValueError, RuntimeError


def _has_storages(file: BinaryIO) -> bool:
    """Whether a tar file has the member that torch.load unpickles first (torch.serialization._legacy_load, torch 2.13).

    Raises:
        LimitError: it has too many members.
    """
    import tarfile

    with suppress(tarfile.TarError), tarfile.open(fileobj=file, mode="r:") as archive:
        for number, member in enumerate(archive):
            if member.name == "storages":
                return True
            if number == _MEMBERS:
                raise LimitError(f"has more than {_MEMBERS:,} members")
    return False
