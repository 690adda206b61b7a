"""Short texts that lie where a large file should: git has one for each file in LFS, and may write a link as one."""

from __future__ import annotations

from ckptlint.errors import GIT_LFS_POINTER, LINK_AS_TEXT
from ckptlint.patterns import lazy_pattern

POINTER_LIMIT = 1024 + 4
"""Bytes of such a text, at most."""

_LINK = lazy_pattern(rb"(\.{1,2}/|/)[^\x00-\x20\x7f]{1,1024}\n?")


def pointer_in(start: bytes) -> str:
    """What an UnreadableError says of a file that is such a text, by its first bytes; "" for all else.

    >>> pointer_in(b"../../blobs/0123abcd"), pointer_in(b"../../blobs/0123 is the file")
    ('holds the path of a link, not the file it leads to', '')

    Source: git-lfs docs/spec.md; git-config core.symlinks: links are then checked out as plain files with the path in
    them
    """
    if start.startswith(b"version https://git-lfs"):
        return GIT_LFS_POINTER
    return LINK_AS_TEXT if _LINK.fullmatch(start) else ""
