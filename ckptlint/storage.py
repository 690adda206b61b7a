"""Listing and reading a folder. Nothing here ever writes, and no path is followed outside the folder."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import BinaryIO

from ckptlint.errors import AccessError, LimitError, NothingToCheckError
from ckptlint.model import FileState, printable


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a folder.

    Attributes:
        size: bytes of a file, links followed; 0 for a folder.
        is_folder: whether it is a folder, links followed.
        mtime: seconds since the epoch.
    """

    size: int
    is_folder: bool
    mtime: float


class Folder:
    """A local folder, listed once.

    Raises:
        AccessError: the operating system refused to list or read; every method may raise it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.part = ""

    @property
    def display(self) -> str:
        """The path as text that is safe to print; of a part of the folder with the part's name."""
        return printable(str(self.path / self.part))

    def without(self, hidden: Collection[str], part: str) -> Folder:
        """The same folder with some files out of view, to judge by itself what else lies there.

        Args:
            part: the name under which it is reported, "" for the folder's own.
        """
        view = copy(self)
        view.part = part
        view.entries = {name: entry for name, entry in self.entries.items() if name not in hidden}
        return view

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """What lies directly in the folder, by name, in order. Links that lead nowhere are left out."""
        found = {}
        try:
            with os.scandir(self.path) as listing:
                for item in listing:
                    try:
                        status = item.stat()
                    except OSError as error:
                        if error.errno in (errno.ENOENT, errno.ELOOP):
                            continue
                        raise
                    is_folder = stat.S_ISDIR(status.st_mode)
                    if not is_folder and not stat.S_ISREG(status.st_mode):
                        continue  # a pipe or a device: reading it might never end
                    found[item.name] = Entry(0 if is_folder else status.st_size, is_folder, status.st_mtime)
        except FileNotFoundError:
            raise NothingToCheckError(f"{self.display} does not exist") from None
        except OSError as error:
            raise AccessError(f"{self.display} cannot be listed: {error.strerror}") from None
        return dict(sorted(found.items()))

    def files(self) -> list[str]:
        """Names of the files."""
        return [name for name, entry in self.entries.items() if not entry.is_folder]

    def folders(self) -> list[str]:
        """Names of the folders."""
        return [name for name, entry in self.entries.items() if entry.is_folder]

    def has(self, name: str) -> bool:
        """Whether a file of this name lies directly in the folder."""
        return name in self.entries and not self.entries[name].is_folder

    def sub(self, name: str) -> Folder:
        """A folder inside this one."""
        return Folder(self.path / name)

    def open(self, name: str) -> BinaryIO:
        """The file opened for reading."""
        try:
            return (self.path / name).open("rb")
        except OSError as error:
            raise AccessError(f"{printable(name)} cannot be read: {error.strerror}") from None

    def read(self, name: str, limit: int) -> bytes:
        """The whole file.

        Raises:
            LimitError: it has more than `limit` bytes.
        """
        with self.open(name) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise LimitError(f"has {size:,} bytes, the limit is {limit:,}")
            return _read(file, name)

    def head(self, name: str, count: int) -> bytes:
        """The first bytes of a file."""
        with self.open(name) as file:
            return _read(file, name, count)

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """The bytes [offset, offset + length) of a file, fewer where it ends before."""
        with self.open(name) as file:
            file.seek(offset)
            return _read(file, name, length)

    def look_at(self, relative: str) -> tuple[FileState, int | None]:
        """The state and size of a file that the metadata names; a path that leaves the folder is not touched."""
        if not is_safe(relative):
            return "unsafe-path", None
        path = self.path / relative
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError, UnicodeEncodeError):
            return "absent", None
        except OSError as error:
            if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
                return "absent", None
            raise AccessError(f"{printable(relative)} cannot be looked at: {error.strerror}") from None
        if not stat.S_ISREG(status.st_mode):
            return "not-a-file", None
        if not path.resolve().is_relative_to(self.path.resolve()):
            return "link-outside", status.st_size
        return "ok", status.st_size


def is_safe(relative: str) -> bool:
    """Whether a stored path stays inside the folder by its own text: not absolute, no `..`, no drive, no NUL."""
    views = PurePosixPath(relative), PureWindowsPath(relative)
    return bool(relative) and "\0" not in relative and not any(p.is_absolute() or ".." in p.parts for p in views)


def _read(file: BinaryIO, name: str, count: int = -1) -> bytes:
    try:
        return file.read(count)
    except OSError as error:
        raise AccessError(f"{printable(name)} cannot be read: {error.strerror}") from None
