"""One stored record: the torch.save zip of a tensor, an object, or the whole common state."""

from __future__ import annotations

import struct
import zipfile
import zlib
from typing import BinaryIO

from ckptlint.errors import LimitError, UnreadableError
from ckptlint.model import printable

MEMBER_LIMIT = 1024**3
"""Largest `data.pkl` that is read, in bytes: `dp_zero_gather_scatter` puts whole optimizer states into one."""


def read_pickle_member(file: BinaryIO) -> bytes:
    """The `data.pkl` of a torch.save archive; its tensors stay on disk.

    Raises:
        UnreadableError: the file is no zip archive, or holds no `data.pkl`.
        LimitError: the member is larger than `MEMBER_LIMIT`.

    Source:
        torch.serialization.save (>= 1.6): one folder in the archive, `archive/` or the file's stem.
    """
    try:
        if file.read(4) != b"PK\x03\x04":
            raise UnreadableError("is no torch.save archive: it does not start with a zip member")
        with zipfile.ZipFile(file) as archive:
            member = _only_pickle(archive)
            if member.file_size > MEMBER_LIMIT:
                raise LimitError(f"has a data.pkl of {member.file_size:,} bytes, the limit is {MEMBER_LIMIT:,}")
            if member.compress_type != zipfile.ZIP_STORED:
                raise UnreadableError("has a compressed data.pkl, which torch.save never writes")
            return archive.read(member)
    except (
        zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, ValueError, RuntimeError, OverflowError
    ) as error:  # fmt: skip  # OverflowError: a place beyond 2**63
        reason = printable(str(error)) or type(error).__name__
        raise UnreadableError(f"is no torch.save archive ({reason})") from None


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
        raise UnreadableError(
            "is an archive whose members readers take for different ones: it may hide what torch loads"
        )
    return pickles[0]
