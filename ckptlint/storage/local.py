"""Folders on a file system. No path is followed outside the folder."""

from __future__ import annotations

import errno
import io
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

from ckptlint.errors import AccessError, NothingToCheckError
from ckptlint.model import FileState
from ckptlint.model.text import printable
from ckptlint.progress import advance, is_listened_to
from ckptlint.storage.folder import READ_BLOCK, Folder
from ckptlint.storage.listing import FolderEntry, Listing
from ckptlint.storage.paths import is_safe

_MANY, _PART, _THREADS = 1024, 256, 16  # files that are looked at at once: on a network each look is a round trip
_SLOW = 1e-4  # seconds for a look that is one
_STRANGE = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


class LocalFolder(Folder):
    """A folder on a file system; the one that it was reached from (`above`) is listed once for all that is in it."""

    def __init__(self, path: Path, above: LocalFolder | None = None) -> None:
        self.path, self.above = path, above

    @property
    def display(self) -> str:
        return printable(str(self.path / self.part))

    @property
    def name(self) -> str:
        return self.path.absolute().name

    @property
    def parent(self) -> Folder | None:
        if self.above is None:
            self.above = LocalFolder(self.path.absolute().parent)
        return self.above

    @cached_property
    def entries(self) -> Listing:
        try:
            with os.scandir(self.path) as names:
                total = sum(1 for _ in names) if is_listened_to() else 0
            with os.scandir(self.path) as listing:
                return Listing.of(_entries(listing, total))
        except FileNotFoundError:
            raise NothingToCheckError(f"{self.display} does not exist") from None
        except OSError as error:
            raise AccessError(f"{self.display} cannot be listed: {error.strerror}") from None

    def sub(self, name: str) -> Folder:
        return LocalFolder(self.path / name, self)

    def stamps(self) -> list[tuple[object, ...]]:
        try:
            with os.scandir(self.path) as listing:
                return sorted(
                    (item.name, _stamp(item.stat(follow_symlinks=False)), _stamp(_status(item))) for item in listing
                )
        except OSError as error:
            raise AccessError(f"{self.display} cannot be listed: {error.strerror}") from None

    def escapes_to(self, name: str) -> str:
        if name not in self.entries or not self.entries[name].is_link:
            return ""
        here, target = self.path.resolve(), (self.path / name).resolve()
        return "" if here in target.parents else str(target)

    def target(self, name: str) -> str:
        path = self.path / name
        return str(path.readlink()) if name in {*self.entries, *self.entries.strange} and _is_link(path) else ""

    def link_target_resolved(self, name: str) -> str:
        return os.path.realpath(self.path / name) if self.target(name) else ""  # of a loop Path.resolve raises

    @property
    def real(self) -> str:
        return os.path.realpath(self.path)

    def inner_target(self, name: str) -> str:
        if not _is_link(self.path / name):  # without a listing: the folder may be the one around what was named
            return ""
        try:
            here, target = self.path.resolve(), (self.path / name).resolve()
        except (OSError, RuntimeError):  # a circle of links
            return ""
        return str(target.relative_to(here)) if here in target.parents else ""

    def stat(self, relative: str) -> tuple[FileState, int | None]:
        if not is_safe(relative):
            return "unsafe-path", None
        path = self.path / relative
        try:
            status = path.stat()
        except (OSError, UnicodeEncodeError) as error:
            if isinstance(error, OSError) and error.errno not in ABSENT:
                raise AccessError(f"{printable(relative)} cannot be accessed: {error.strerror}") from None
            return "dangling-link" if _is_link(path) else "absent", None
        if not stat.S_ISREG(status.st_mode):
            return "not-a-file", None
        listed = self.entries.get(relative)
        is_inside = listed is not None and not listed.is_link  # what a name and no link stands for needs no resolving
        if not is_inside and not path.resolve().is_relative_to(self.path.resolve()):
            return "link-outside", status.st_size
        return ("other-case" if self.other_case(relative) else "ok"), status.st_size

    def _looks(self, relatives: Sequence[str]) -> Iterator[tuple[FileState, int | None]]:
        if len(relatives) <= _MANY:
            yield from super()._looks(relatives)
            return
        from concurrent.futures import ThreadPoolExecutor

        batches = [relatives[start : start + _PART] for start in range(0, len(relatives), _PART)]
        done = 0
        with ThreadPoolExecutor(_THREADS) as pool:
            for stats in pool.map(lambda batch: list(map(self.stat, batch)), batches):
                yield from stats
                done += len(stats)
                advance("files", done, len(relatives))

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

    def _spans(self, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        data = []
        try:
            with open(f"{self.path}/{name}", "rb") as file:  # noqa: PTH123  as in `_head`
                for start, stop in spans:
                    file.seek(start)
                    data.append(file.read(stop - start))
        except OSError as error:
            raise AccessError(f"{printable(name)} cannot be read: {error.strerror}") from None
        return data

    def _head(self, count: int, name: str) -> bytes | None:
        try:
            with open(f"{self.path}/{name}", "rb", buffering=0) as file:  # noqa: PTH123  a Path takes longer than the read
                return file.read(count)
        except OSError:
            return None

    def blocks(self, name: str, size: int = READ_BLOCK) -> Iterator[bytes]:
        with self.open(name) as file:
            while block := file.read(size):
                yield block


def _entries(listing: Iterator[os.DirEntry[str]], total: int) -> Iterator[tuple[str, FolderEntry]]:
    """The files and folders of a listing, looked at by several threads where that is slow, as on a network.

    What the system says of a file takes a kilobyte, so only a few thousand are held at once.
    """
    done, is_slow, pool = 0, False, None
    try:
        while items := list(islice(listing, _PART * _THREADS if is_slow else _MANY)):
            entries: Iterable[tuple[str, FolderEntry] | None] = map(_entry, items)
            if is_slow:
                from concurrent.futures import ThreadPoolExecutor

                pool = pool or ThreadPoolExecutor(_THREADS)
                batches = [items[start : start + _PART] for start in range(0, len(items), _PART)]
                entries = chain.from_iterable(pool.map(lambda batch: list(map(_entry, batch)), batches))
            started = time.perf_counter()
            yield from filter(None, entries)
            is_slow = is_slow or time.perf_counter() - started > _SLOW * len(items)
            done += len(items)
            advance("files", min(done, total), total)
    finally:
        if pool:
            pool.shutdown()


def _entry(item: os.DirEntry[str]) -> tuple[str, FolderEntry] | None:
    status = _status(item)
    if status is None:
        return (item.name, FolderEntry(0, False, what="a link that leads nowhere")) if item.is_symlink() else None
    is_folder = stat.S_ISDIR(status.st_mode)
    if not is_folder and not stat.S_ISREG(status.st_mode):  # reading it might never end
        return item.name, FolderEntry(0, False, what=_STRANGE.get(stat.S_IFMT(status.st_mode), "no regular file"))
    size = 0 if is_folder else status.st_size
    return item.name, FolderEntry(size, is_folder, status.st_mtime, item.is_symlink())


def _status(item: os.DirEntry[str]) -> os.stat_result | None:
    """What a name stands for, links followed; None where a link leads nowhere."""
    try:
        return item.stat()
    except OSError as error:
        if error.errno not in ABSENT:
            raise
        return None


def _stamp(status: os.stat_result | None) -> tuple[int, ...]:
    # of a file that is written in place size and time may stay, not that of the change; on a network inodes vary
    return () if status is None else (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class _Checked(io.RawIOBase):
    """An open file whose failing reads are AccessErrors: to a zip reader an OSError would mean a damaged archive."""

    def __init__(self, raw: io.FileIO, name: str) -> None:
        self._raw, self._name = raw, name

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


def _is_link(path: Path) -> bool:
    try:
        return path.is_symlink()
    except (OSError, UnicodeEncodeError, ValueError):
        return False
