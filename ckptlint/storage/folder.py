"""What a folder is to every reader: listed once, read in ranges. Nothing here ever writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property, partial
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from ckptlint.errors import AccessError, LimitError
from ckptlint.model import FILE_STATES, FileState
from ckptlint.model.facts import Facts
from ckptlint.model.text import printable
from ckptlint.model.tiling import IntArray
from ckptlint.storage.listing import Listing

READABLE: tuple[FileState, ...] = ("ok", "link-outside", "other-case")
"""The states of a file that can be opened; a model cache keeps its files elsewhere and links to them."""

READ_BLOCK = 8 * 1024**2
_SHORT = 256  # bytes of a file that holds a name or a number
_GAP = 16 * 1024  # a request or a seek costs more than reading this much for nothing


class Folder(ABC):
    """A folder, listed once. Every method may raise AccessError: the operating system, a store or the network refused.

    Attributes:
        not_looked_at: what cannot be known about it, as a sentence; "" when its listing is complete.
        part: the name of the part that a view of the folder shows.
        is_near: whether a small read costs next to nothing; otherwise each is a request.
        bytes_read: that `spans` has returned.
        is_read_whole: whether somebody reads all of its files, so that a server that sends no parts may send them.
    """

    not_looked_at = ""
    part = ""
    is_near = True
    bytes_read = 0
    is_read_whole = False

    @property
    def redirected(self) -> str:
        """Which other host a server sends requests on to, as what is not known; "" for none."""
        return ""

    @property
    @abstractmethod
    def display(self) -> str:
        """The path or URL as text that is safe to print, without credentials; of a part with the part's name."""

    @property
    def place(self) -> str:
        """`display` of the whole folder, of which it may show a part."""
        view = copy(self)
        view.part = ""
        return view.display

    @cached_property
    def facts(self) -> Facts:
        """What was worked out about it (`fact`)."""
        return Facts()

    def without(self, hidden: Collection[str], part: str) -> Folder:
        """The same folder with some files out of view, to judge what else is there; a part is reported by its name."""
        view = copy(self)
        view.part = part
        view.__dict__.pop("facts", None)
        # each kind of folder keeps its listing as a cached property
        view.__dict__["entries"] = self.entries.without(hidden)
        return view

    def only(self, name: str) -> Folder:
        """The same folder with one of its files in view."""
        return self.without({*self.entries, *self.entries.strange} - {name}, name)

    @property
    def is_one_file(self) -> bool:
        """Whether it is a view of one file, as `only` makes it."""
        return [*self.entries] == [self.part]

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
    def entries(self) -> Listing:
        """What is directly in the folder, by name, in order; raises NothingToCheckError for no such folder."""

    @abstractmethod
    def sub(self, name: str) -> Folder:
        """A folder inside this one."""

    @abstractmethod
    def stat(self, relative: str) -> tuple[FileState, int | None]:
        """The state and size of a file that the metadata names; a path that leaves the folder is not touched."""

    @abstractmethod
    def open(self, name: str) -> BinaryIO:
        """The file opened for reading at any place; a read that fails raises AccessError, not OSError."""

    def spans(self, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes [start, stop) of each span, fewer where the file ends before."""
        data = self._spans(name, spans)
        self.bytes_read += sum(map(len, data))
        return data

    @abstractmethod
    def _spans(self, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """What `spans` returns."""

    @abstractmethod
    def blocks(self, name: str, size: int = READ_BLOCK) -> Iterator[bytes]:
        """The whole file in order, in blocks of `size` bytes; memory for a few of them."""

    def stat_many(self, relatives: Sequence[str]) -> tuple[npt.NDArray[np.uint8], IntArray, IntArray]:
        """`stat` for many files, of which plain payload is known from the listing.

        Position in `FILE_STATES`, uint8 [n]; bytes, int64 [n], -1 where there is no such file, or nobody knows its
        size; place in the payload of the listing, int64 [n], -1 for a file elsewhere.
        """
        at = self.entries.positions(relatives)
        listed = at >= 0
        state, size = np.zeros(len(at), np.uint8), np.full(len(at), -1, np.int64)
        size[listed] = self.entries.size[at[listed]]
        others = np.flatnonzero(~listed).tolist()
        for row, (file_state, count) in zip(others, self._looks([relatives[row] for row in others]), strict=True):
            state[row] = FILE_STATES.index(file_state)
            size[row] = -1 if count is None else count
        return state, size, at

    def _looks(self, relatives: Sequence[str]) -> Iterator[tuple[FileState, int | None]]:
        """`stat` for each of them; where a look is a round trip, for many at the same time."""
        return map(self.stat, relatives)

    def stamps(self) -> list[tuple[object, ...]]:
        """What tells whether something in the folder became another: names, sizes, times of the last change.

        Asked anew each time, unlike `entries`; a store is listed once.
        """
        columns = (self.entries.payload, self.entries.size, self.entries.mtime)
        payload = zip(*(column.tolist() for column in columns), strict=True)
        return [*payload, *self.entries.others.items(), *self.entries.strange.items()]

    def escapes_to(self, name: str) -> str:
        """Where a link leads that leaves this folder, or leads back to it; "" for all else."""
        return ""

    def target(self, name: str) -> str:
        """Where a link in the folder leads, as it says; "" for all else, and in a store."""
        return ""

    def lost_link(self, name: str) -> str:
        """What is said of a link in the folder that leads nowhere; "" for all else."""
        if name not in self.entries.strange or self.stat(name)[0] != "dangling-link":
            return ""
        return f"{printable(name)} is a link to {printable(self.target(name))}, which is not there"

    def link_target_resolved(self, name: str) -> str:
        """Where a link in the folder leads at last, over other links; "" for all else, and in a store."""
        return ""

    def inner_target(self, name: str) -> str:
        """The place below this folder where a link in it leads at last; "" for all else, and in a store."""
        return ""

    @property
    def real(self) -> str:
        """The path without links; "" in a store."""
        return ""

    @property
    def sums(self) -> Mapping[str, str]:
        """The SHA-256 of files that the store keeps with them, by name."""
        return {}

    @property
    def newest(self) -> float:
        """When what is directly in the folder was last written, seconds since the epoch; 0 where nobody knows."""
        return self.entries.newest

    def files(self) -> list[str]:
        return sorted([*self.entries.payload_names(), *self.files_beside()])

    def files_beside(self) -> list[str]:
        """Names of the files but for plain payload: of these there may be a million."""
        return [name for name, entry in self.entries.others.items() if not entry.is_folder]

    def folders(self) -> list[str]:
        return [name for name, entry in self.entries.others.items() if entry.is_folder]

    def has(self, name: str) -> bool:
        """Whether a file of this name is directly in the folder."""
        return name in self.entries and not self.entries[name].is_folder

    def size(self, name: str) -> int:
        """Bytes of a file that is directly in the folder."""
        return self.entries[name].size

    def absent_hint(self, relative: str) -> str:
        """What is there in place of an absent file, as a sentence; "" for nothing."""
        if lost := self.lost_link(relative):
            return f"{lost}: download or copy it again with links followed"
        name = self.other_case(relative)
        return f"rename {printable(name)}, which differs only in letter case" if name else ""

    def read(self, name: str, limit: int) -> bytes:
        """The whole file; raises LimitError for one of more than `limit` bytes."""
        size = self.size_within(name, limit)
        blocks = self.blocks(name)
        first = next(blocks, b"")
        return first if len(first) >= size else b"".join((first, *blocks))

    def size_within(self, name: str, limit: int) -> int:
        """Bytes of a file; raises LimitError for more than `limit`."""
        size = self.size(name)
        if size > limit:
            raise LimitError(f"has {size:,} bytes, the limit is {limit:,}")
        return size

    def head(self, name: str, count: int) -> bytes:
        return self.read_range(name, 0, count)

    def short_text(self, name: str) -> str:
        """What a file says that holds a name or a number, without space around it."""
        return self.head(name, _SHORT).decode("utf-8", "replace").strip()

    def heads(self, names: Sequence[str], count: int) -> Iterator[bytes | None]:
        """The first bytes of many files, None of one that cannot be read; over a network of several at once."""
        return map(partial(self._head, count), names)

    def _head(self, count: int, name: str) -> bytes | None:
        try:
            return self.read_range(name, 0, count)
        except AccessError:
            return None

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """The bytes [offset, offset + length) of a file, fewer where it ends before."""
        return self.spans(name, [(offset, offset + length)])[0]

    def ranges(self, name: str, wanted: Sequence[tuple[int, int]]) -> list[bytes]:
        """Many (offset, length) ranges of one file, in the order asked for, fewer bytes where it ends before.

        Ranges that touch or nearly touch are read at once, over a network several at the same time. The caller bounds
        the memory by what it asks for.
        """
        if not wanted:
            return []
        groups = coalesced(wanted)
        pieces = [b""] * len(wanted)
        data = self.spans(name, [(start, stop) for start, stop, _ in groups])
        for (start, _, members), whole in zip(groups, data, strict=True):
            for i in members:
                offset, length = wanted[i]
                pieces[i] = whole[offset - start : offset - start + length]
        return pieces

    def other_case(self, relative: str) -> str | None:
        """A name of the folder whose name differs from an absent one by case alone."""
        if relative in self.entries or "/" in relative:
            return None
        return self.entries.of_other_case(relative)


def coalesced(
    wanted: Sequence[tuple[int, int]], gap: int = _GAP, limit: int = READ_BLOCK
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
