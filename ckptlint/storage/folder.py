"""Listing and reading a folder. Nothing here ever writes, and no path is followed outside the folder.

`Folder` is what loaders see; `LocalFolder` is one on disk, `ckptlint.remote` has those behind a URL.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, BinaryIO

from ckptlint.errors import AccessError, LimitError, NothingToCheckError
from ckptlint.model import FileState, printable
from ckptlint.progress import tell

READABLE: tuple[FileState, ...] = ("ok", "link-outside", "other-case")
"""The states of a file that can be opened; a model cache keeps its files elsewhere and links to them."""

BLOCK = 8 * 1024**2
_PLAIN = re.compile(r"\w[\w.-]*", re.ASCII)
_MANY, _PART, _THREADS = 1024, 256, 16  # files that are looked at at once: on a network each look is a round trip
_GAP = 16 * 1024  # a request or a seek costs more than reading this much for nothing
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]+)://")
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a folder.

    Attributes:
        size: bytes of a file, links followed; 0 for a folder.
        is_folder: whether it is a folder, links followed.
        mtime: seconds since the epoch; 0 on a store, which knows only when a file was uploaded.
        is_link: whether the name is a link.
    """

    size: int
    is_folder: bool
    mtime: float = 0.0
    is_link: bool = False


class Folder(ABC):
    """A folder, listed once.

    Attributes:
        unseen: what cannot be known about it, as a sentence; "" when its listing is complete.
        part: the name of the part that a view of the folder shows.

    Raises:
        AccessError: the operating system, a store or the network refused; every method may raise it.
    """

    unseen = ""
    part = ""

    @property
    @abstractmethod
    def display(self) -> str:
        """The path or URL as text that is safe to print, without credentials; of a part with the part's name."""

    def without(self, hidden: Collection[str], part: str) -> Folder:
        """The same folder with some files out of view, to judge by itself what else lies there.

        Args:
            part: the name under which it is reported, "" for the folder's own.
        """
        view = copy(self)
        view.part = part
        # each kind of folder keeps its listing as a cached property
        view.__dict__["entries"] = {name: entry for name, entry in self.entries.items() if name not in hidden}
        return view

    @property
    @abstractmethod
    def name(self) -> str:
        """The last part of the path."""

    @property
    @abstractmethod
    def parent(self) -> Folder | None:
        """The folder around it; None at the top of a store."""

    @property
    @abstractmethod
    def entries(self) -> dict[str, Entry]:
        """What lies directly in the folder, by name, in order. Links that lead nowhere are left out.

        Raises:
            NothingToCheckError: there is no such folder.
        """

    @abstractmethod
    def sub(self, name: str) -> Folder:
        """A folder inside this one."""

    @abstractmethod
    def look_at(self, relative: str) -> tuple[FileState, int | None]:
        """The state and size of a file that the metadata names; a path that leaves the folder is not touched."""

    @abstractmethod
    def open(self, name: str) -> BinaryIO:
        """The file opened for reading at any place; a read that fails raises AccessError, not OSError."""

    @abstractmethod
    def spans(self, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes [start, stop) of each span, fewer where the file ends before."""

    @abstractmethod
    def blocks(self, name: str, size: int = BLOCK) -> Iterator[bytes]:
        """The whole file in order, in blocks of `size` bytes; memory for a few of them."""

    def looks_at(self, relatives: Sequence[str]) -> list[tuple[FileState, int | None]]:
        """`look_at` for many files; over a network at the same time."""
        return [self.look_at(relative) for relative in relatives]

    def files(self) -> list[str]:
        """Names of the files."""
        return [name for name, entry in self.entries.items() if not entry.is_folder]

    def folders(self) -> list[str]:
        """Names of the folders."""
        return [name for name, entry in self.entries.items() if entry.is_folder]

    def has(self, name: str) -> bool:
        """Whether a file of this name lies directly in the folder."""
        return name in self.entries and not self.entries[name].is_folder

    def size(self, name: str) -> int:
        """Bytes of a file that lies directly in the folder."""
        return self.entries[name].size

    def instead(self, relative: str) -> str:
        """What lies there in place of an absent file, as a sentence; "" for nothing."""
        other = self._other_case(relative)
        return f"{printable(other)} is there: the case of its name was changed" if other else ""

    def read(self, name: str, limit: int) -> bytes:
        """The whole file.

        Raises:
            LimitError: it has more than `limit` bytes.
        """
        size = self.size(name)
        if size > limit:
            raise LimitError(f"has {size:,} bytes, the limit is {limit:,}")
        blocks = self.blocks(name)
        first = next(blocks, b"")
        return first if len(first) >= size else b"".join((first, *blocks))

    def head(self, name: str, count: int) -> bytes:
        """The first bytes of a file."""
        return self.read_range(name, 0, count)

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """The bytes [offset, offset + length) of a file, fewer where it ends before."""
        return self.spans(name, [(offset, offset + length)])[0]

    def ranges(self, name: str, wanted: Sequence[tuple[int, int]]) -> list[bytes]:
        """Many (offset, length) ranges of one file, in the order asked for, fewer bytes where it ends before.

        Ranges that touch or nearly touch are read at once, over a network several at the same time. The caller bounds
        the memory by what it asks for.
        """
        groups = coalesced(wanted)
        found = [b""] * len(wanted)
        data = self.spans(name, [(start, stop) for start, stop, _ in groups])
        for (start, _, members), whole in zip(groups, data, strict=True):
            for i in members:
                offset, length = wanted[i]
                found[i] = whole[offset - start : offset - start + length]
        return found

    def _other_case(self, relative: str) -> str | None:
        """A file of the folder whose name differs from an absent one by case alone."""
        if relative in self.entries or "/" in relative:
            return None
        return self._folded.get(relative.casefold())

    @cached_property
    def _folded(self) -> dict[str, str]:
        """The names of the folder by what is equal in them apart from case."""
        return {name.casefold(): name for name in reversed(self.entries)}


class LocalFolder(Folder):
    """A folder on a file system."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def display(self) -> str:
        return printable(str(self.path / self.part))

    @property
    def name(self) -> str:
        return self.path.absolute().name

    @property
    def parent(self) -> Folder | None:
        return LocalFolder(self.path.absolute().parent)

    @cached_property
    def entries(self) -> dict[str, Entry]:
        try:
            with os.scandir(self.path) as listing:
                found = dict(_entries(list(listing)))
        except FileNotFoundError:
            raise NothingToCheckError(f"{self.display} does not exist") from None
        except OSError as error:
            raise AccessError(f"{self.display} cannot be listed: {error.strerror}") from None
        return dict(sorted(found.items()))

    def sub(self, name: str) -> Folder:
        return LocalFolder(self.path / name)

    def look_at(self, relative: str) -> tuple[FileState, int | None]:
        if not is_safe(relative):
            return "unsafe-path", None
        path = self.path / relative
        try:
            status = path.stat()
        except (OSError, UnicodeEncodeError) as error:
            if isinstance(error, OSError) and error.errno not in ABSENT:
                raise AccessError(f"{printable(relative)} cannot be looked at: {error.strerror}") from None
            return "dangling-link" if _is_link(path) else "absent", None
        if not stat.S_ISREG(status.st_mode):
            return "not-a-file", None
        listed = self.entries.get(relative)
        is_inside = listed is not None and not listed.is_link  # what a name and no link stands for needs no resolving
        if not is_inside and not path.resolve().is_relative_to(self.path.resolve()):
            return "link-outside", status.st_size
        return ("other-case" if self._other_case(relative) else "ok"), status.st_size

    def looks_at(self, relatives: Sequence[str]) -> list[tuple[FileState, int | None]]:
        if len(relatives) <= _MANY:
            return super().looks_at(relatives)
        from concurrent.futures import ThreadPoolExecutor

        parts = [relatives[start : start + _PART] for start in range(0, len(relatives), _PART)]
        found: list[tuple[FileState, int | None]] = []
        with ThreadPoolExecutor(_THREADS) as pool:
            for part in pool.map(super().looks_at, parts):
                found += part
                tell("files", len(found), len(relatives))
        return found

    def open(self, name: str) -> BinaryIO:
        try:
            raw = (self.path / name).open("rb", buffering=0)
        except OSError as error:
            raise AccessError(f"{printable(name)} cannot be read: {error.strerror}") from None
        return io.BufferedReader(_Checked(raw, name))

    def size(self, name: str) -> int:
        try:
            return (self.path / name).stat().st_size
        except OSError as error:
            raise AccessError(f"{printable(name)} cannot be read: {error.strerror}") from None

    def spans(self, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        found = []
        with self.open(name) as file:
            for start, stop in spans:
                file.seek(start)
                found.append(file.read(stop - start))
        return found

    def blocks(self, name: str, size: int = BLOCK) -> Iterator[bytes]:
        with self.open(name) as file:
            while block := file.read(size):
                yield block


def _entries(listing: list[os.DirEntry[str]]) -> Iterator[tuple[str, Entry]]:
    """The files and folders of a listing, those of a large one looked at by several threads."""
    if len(listing) <= _MANY:
        yield from (found for item in listing if (found := _entry(item)))
        return
    from concurrent.futures import ThreadPoolExecutor

    parts = [listing[start : start + _PART] for start in range(0, len(listing), _PART)]
    with ThreadPoolExecutor(_THREADS) as pool:
        for number, part in enumerate(pool.map(lambda part: list(map(_entry, part)), parts)):
            tell("files", number * _PART, len(listing))
            yield from (found for found in part if found)


def _entry(item: os.DirEntry[str]) -> tuple[str, Entry] | None:
    try:
        status = item.stat()
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise
    is_folder = stat.S_ISDIR(status.st_mode)
    if not is_folder and not stat.S_ISREG(status.st_mode):
        return None  # a pipe or a device: reading it might never end
    size = 0 if is_folder else status.st_size
    return item.name, Entry(size, is_folder, status.st_mtime, item.is_symlink())


class _Checked(io.RawIOBase):
    """An open file whose failing reads are AccessErrors: to a zip reader an OSError would mean a damaged archive."""

    def __init__(self, raw: io.FileIO, name: str) -> None:
        self._raw = raw
        self._name = name

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._raw.fileno()

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._raw.seek(offset, whence)

    def tell(self) -> int:
        return self._raw.tell()

    def readinto(self, buffer: Any) -> int | None:
        try:
            return self._raw.readinto(buffer)
        except OSError as error:
            raise AccessError(f"{printable(self._name)} cannot be read: {error.strerror}") from None

    def close(self) -> None:
        self._raw.close()
        super().close()


def coalesced(
    wanted: Sequence[tuple[int, int]], gap: int = _GAP, limit: int = BLOCK
) -> list[tuple[int, int, list[int]]]:
    """Spans [start, stop) that cover all (offset, length) ranges, with the positions of the ranges in each.

    Ranges that overlap or lie at most `gap` bytes apart share a span, unless it would grow beyond `limit` bytes.

    >>> coalesced([(100, 10), (0, 50), (40, 20), (10_000_000, 1)], gap=40)
    [(0, 110, [1, 2, 0]), (10000000, 10000001, [3])]
    """
    spans: list[tuple[int, int, list[int]]] = []
    for i in sorted(range(len(wanted)), key=lambda i: wanted[i]):
        offset, length = wanted[i]
        stop = offset + length
        if spans and offset <= spans[-1][1] + gap and max(stop, spans[-1][1]) - spans[-1][0] <= limit:
            start, end, members = spans[-1]
            members.append(i)
            spans[-1] = (start, max(end, stop), members)
        else:
            spans.append((offset, stop, [i]))
    return spans


def is_url(path: str) -> bool:
    """Whether a path names something behind a scheme; `file://` is a local path.

    >>> is_url("s3://bucket/step"), is_url("runs/step"), is_url("C:\\\\runs")
    (True, False, False)
    """
    match = _URL.match(path)
    return match is not None and match[1].lower() not in ("file", "local")


def shown(path: str) -> str:
    """A path or URL as text that is safe to print: without user, password and query, which may hold a signature.

    >>> shown("https://user:secret@host/step?X-Amz-Signature=abc"), shown("az://models@account/step")
    ('https://host/step', 'az://models@account/step')
    """
    if not _URL.match(path):
        return printable(path)
    scheme, _, rest = path.partition("://")
    is_web = scheme.lower() in ("http", "https")
    rest = re.sub(r"[?#].*" if is_web else r"\?[^/?]*=.*", "", rest, flags=re.DOTALL)
    place, slash, key = rest.partition("/")
    user, _, host = place.rpartition("@")
    return printable(f"{scheme}://{host if is_web or ':' in user else place}{slash}{key}")


def is_safe(relative: str) -> bool:
    """Whether a stored path stays inside the folder by its own text: not absolute, no `..`, no drive, no NUL."""
    if _PLAIN.fullmatch(relative):
        return True
    views = PurePosixPath(relative), PureWindowsPath(relative)
    return bool(relative) and "\0" not in relative and not any(p.is_absolute() or ".." in p.parts for p in views)


def _is_link(path: Path) -> bool:
    try:
        return path.is_symlink()
    except (OSError, UnicodeEncodeError, ValueError):
        return False
