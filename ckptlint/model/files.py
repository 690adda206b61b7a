"""Payload files as columns: a checkpoint may have a million of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from ckptlint.model.tiling import IntArray

FileState = Literal[
    "ok", "absent", "unsafe-path", "not-a-file", "link-outside", "dangling-link", "other-case", "unchecked"
]
FILE_STATES: tuple[FileState, ...] = get_args(FileState)
"""The states in the order of their numbers in `FileTable.state`."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A payload file that the metadata names or that is in the folder.

    Attributes:
        name: path relative to the checkpoint, printable.
        path: the same, raw; None when it must not be opened.
        size: bytes; None when the file was not looked at.
        state: what was found. `unsafe-path` is absolute or leaves the folder and was not opened; `link-outside` is a
            link to a regular file elsewhere, `dangling-link` leads nowhere; `other-case` is there under a name of
            another case, which the file system ignores; `unchecked` when depth or storage did not allow a look.
        referenced: whether a storage entry names it.
        instead: what is there in its place, as a sentence.
    """

    name: str
    path: str | None
    size: int | None
    state: FileState
    referenced: bool
    instead: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Names:
    """Many names in one piece of memory: a list of a million takes four times as much, and moves slowly.

    Attributes:
        text: all names in UTF-8, a NUL after each; none holds one, since `printable` escapes it.
        ends: int64 [n], where these NULs are.
    """

    text: bytes
    ends: IntArray

    @classmethod
    def of(cls, names: Iterable[str]) -> Names:
        """The same names."""
        text = "\0".join((*names, "")).encode("utf-8", "surrogatepass")
        return cls(text, np.flatnonzero(np.frombuffer(text, np.uint8) == 0))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> str:
        start = int(self.ends[number - 1]) + 1 if number else 0
        return self.text[start : int(self.ends[number])].decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        return iter(self.text.decode("utf-8", "surrogatepass").split("\0")[:-1])


@dataclass(frozen=True, slots=True, eq=False)
class FileTable:
    """The payload files as columns; row i is one file, and `table[i]` is a view of it.

    Attributes:
        names: the paths relative to the checkpoint, printable.
        size: int64 [n], bytes; -1 when the file was not looked at.
        state: uint8 [n], position in `FILE_STATES`.
        referenced: bool [n], whether a storage entry names it.
        paths: row -> the raw path (None when it must not be opened), where it is not the name.
        instead: row -> what is there in its place, as a sentence.
    """

    names: Names
    size: IntArray
    state: npt.NDArray[np.uint8]
    referenced: npt.NDArray[np.bool_]
    paths: dict[int, str | None]
    instead: dict[int, str]

    @classmethod
    def of(cls, files: Iterable[StoredFile]) -> FileTable:
        """The files as a table."""
        rows = list(files)
        return cls(
            Names.of(file.name for file in rows),
            np.array([-1 if file.size is None else file.size for file in rows], np.int64),
            np.array([FILE_STATES.index(file.state) for file in rows], np.uint8),
            np.array([file.referenced for file in rows], bool),
            {row: file.path for row, file in enumerate(rows) if file.path != file.name},
            {row: file.instead for row, file in enumerate(rows) if file.instead},
        )

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, row: int) -> StoredFile:
        name, size = self.names[row], int(self.size[row])
        return StoredFile(
            name,
            self.paths.get(row, name),
            None if size < 0 else size,
            FILE_STATES[self.state[row]],
            bool(self.referenced[row]),
            self.instead.get(row, ""),
        )

    def __iter__(self) -> Iterator[StoredFile]:
        return map(self.__getitem__, range(len(self)))

    def followed_by(self, other: FileTable) -> FileTable:
        """The files of both."""
        if not len(other):
            return self
        shift, text = len(self), self.names.text
        ends = np.concatenate([self.names.ends, other.names.ends + len(text)])
        return FileTable(
            Names(text + other.names.text, ends),
            np.concatenate([self.size, other.size]),
            np.concatenate([self.state, other.state]),
            np.concatenate([self.referenced, other.referenced]),
            self.paths | {row + shift: path for row, path in other.paths.items()},
            self.instead | {row + shift: text for row, text in other.instead.items()},
        )

    def are(self, *states: FileState) -> npt.NDArray[np.bool_]:
        """bool [n], whether each file is in one of these states."""
        return np.isin(self.state, [FILE_STATES.index(state) for state in states])
