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
        with zipfile.ZipFile(file) as archive:
            name = next((n for n in archive.namelist() if n.count("/") == 1 and n.endswith("/data.pkl")), None)
            if name is None:
                raise UnreadableError("is a zip archive without a data.pkl")
            member = archive.getinfo(name)
            if member.file_size > MEMBER_LIMIT:
                raise LimitError(f"has a data.pkl of {member.file_size:,} bytes, the limit is {MEMBER_LIMIT:,}")
            if member.compress_type != zipfile.ZIP_STORED:
                raise UnreadableError("has a compressed data.pkl, which torch.save never does")
            return archive.read(member)
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, NotImplementedError, RuntimeError) as e:
        reason = printable(str(e)) or type(e).__name__
        raise UnreadableError(f"is no torch.save archive ({reason})") from None
