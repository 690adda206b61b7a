"""What is in a folder: columns for its payload files, of which there may be a million, and objects for all else."""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckptlint.model.tiling import IntArray
from ckptlint.patterns import lazy_pattern

_PLAIN = lazy_pattern(r"\w[\w.-]{0,112}\.distcp", re.ASCII)
_LONGEST = 120
_PART = 65536  # names that are turned into a column at once


class FolderEntry(NamedTuple):
    """One name in a folder: bytes of a file (0 for a folder), and whether it is a folder, links followed.

    Attributes:
        mtime: seconds since the epoch; 0 on a store, which knows only when a file was uploaded.
        is_link: whether the name is a link.
        what: what is there that is neither a file nor a folder, in words; "" for these.
    """

    size: int
    is_folder: bool
    mtime: float = 0.0
    is_link: bool = False
    what: str = ""


@dataclass(eq=False)
class Listing(Mapping[str, FolderEntry]):
    """What is directly in a folder, by name, in order.

    Attributes:
        payload: bytes [n], in order, the names of the plain payload files (`__0_0.distcp`): no links, and the name is
            safe to open, printable as it is, and no litter.
        size, mtime: int64 [n] and float64 [n], their bytes and times.
        others: all other files and folders.
        strange: name -> what is there that nobody may open, in words: a pipe, a device, a link that leads nowhere.
            They are named, and no part of the mapping.
    """

    payload: npt.NDArray[Any]
    size: IntArray
    mtime: npt.NDArray[Any]
    others: dict[str, FolderEntry]
    strange: dict[str, str]

    @classmethod
    def of(cls, entries: Iterable[tuple[str, FolderEntry]]) -> Listing:
        """A listing of these names, which may come in any order."""
        blocks: list[npt.NDArray[Any]] = [np.zeros(0, "S1")]
        names: list[str] = []
        size, mtime, others, strange = array("q"), array("d"), {}, {}
        for name, entry in entries:
            if entry.what:
                strange[name] = entry.what
                continue
            if entry.is_folder or entry.is_link or not _PLAIN.fullmatch(name):
                others[name] = entry
                continue
            names.append(name)
            size.append(entry.size)
            mtime.append(entry.mtime)
            if len(names) == _PART:
                blocks.append(np.array(names, "S"))
                names = []
        payload = np.concatenate([*blocks, np.array(names, "S")])
        order = np.argsort(payload)
        sizes, mtimes = np.frombuffer(size, np.int64)[order], np.frombuffer(mtime, np.float64)[order]
        return cls(payload[order], sizes, mtimes, dict(sorted(others.items())), dict(sorted(strange.items())))

    def without(self, hidden: Collection[str], rows: IntArray | None = None) -> Listing:
        """The listing without some names, and without some rows of `payload`."""
        hidden = set(hidden)  # a list would be walked through for each name
        kept = np.ones(len(self.payload) + 1, bool)  # the last one for names that lie elsewhere
        kept[self.positions([*hidden])] = False
        if rows is not None:
            kept[rows] = False
        kept = kept[:-1]
        others = {name: entry for name, entry in self.others.items() if name not in hidden}
        strange = {name: what for name, what in self.strange.items() if name not in hidden}
        return Listing(self.payload[kept], self.size[kept], self.mtime[kept], others, strange)

    def positions(self, names: Sequence[str]) -> IntArray:
        """int64 [n], where each name is in `payload`; -1 for all others."""
        places = np.full(len(names), -1, np.int64)
        for start in range(0, len(names) if len(self.payload) else 0, _PART):
            batch = names[start : start + _PART]
            text = "".join(batch)
            if not text.isascii() or "\0" in text or max(map(len, batch)) > _LONGEST:  # of no plain payload file
                batch = [name if is_plain(name) else "" for name in batch]
            wanted = np.array(batch, "S")
            at = np.minimum(np.searchsorted(self.payload, wanted), len(self.payload) - 1)
            places[start : start + _PART] = np.where(self.payload[at] == wanted, at, -1)
        return places

    @property
    def newest(self) -> float:
        """The latest of all times; 0 without any."""
        return max([self.newest_payload, *(entry.mtime for entry in self.others.values())])

    @property
    def newest_payload(self) -> float:
        """The latest time of a plain payload file; 0 without any."""
        return float(self.mtime.max(initial=0.0))

    def __getitem__(self, name: str) -> FolderEntry:
        if name in self.others:
            return self.others[name]
        at = int(self.positions([name])[0]) if _PLAIN.fullmatch(name) else -1
        if at < 0:
            raise KeyError(name)
        return FolderEntry(int(self.size[at]), False, float(self.mtime[at]))

    def __iter__(self) -> Iterator[str]:
        yield from sorted([*self.payload_names(), *self.others])

    def __len__(self) -> int:
        return len(self.payload) + len(self.others)

    def payload_names(self) -> list[str]:
        return [name.decode() for name in self.payload.tolist()]

    def of_other_case(self, name: str) -> str | None:
        """The first name that differs from an absent one by case alone."""
        folded = name.casefold()
        matches = [self._folded[folded]] if folded in self._folded else []
        names, order = self._lower
        if _PLAIN.fullmatch(folded) and len(names):
            at = int(np.searchsorted(names, folded.encode()))
            if at < len(names) and names[at] == folded.encode():
                matches.append(self.payload[order[at]].decode())
        return min(matches, default=None)

    @cached_property
    def _folded(self) -> dict[str, str]:
        """The other names by what is equal in them apart from case."""
        return {name.casefold(): name for name in reversed(self.others)}

    @cached_property
    def _lower(self) -> tuple[npt.NDArray[Any], IntArray]:
        """The names of the payload in lower case, in order, and where each comes from."""
        lower = np.char.lower(self.payload)
        order = np.argsort(lower, kind="stable")
        return lower[order], order


def is_plain(name: str) -> bool:
    """Whether a name is one of a plain payload file: safe to open, printable as it is, and no litter.

    >>> [is_plain(name) for name in ("__0_0.distcp", "._0_0.distcp", "a/__0_0.distcp")]
    [True, False, False]
    """
    return _PLAIN.fullmatch(name) is not None
