"""What one process saw of its share of the records."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ckptlint.errors import UnreadableError
from ckptlint.model import Damage, PayloadTable, Problem, RecordContent
from ckptlint.model.layout import IntArray
from ckptlint.model.text import printable
from ckptlint.payload.record_pickle import Decoded, decode

_PENDING_LIMIT = 32 * 1024**2


@dataclass(slots=True, eq=False)
class ShareResult:
    """What one process saw of its share of the records.

    Attributes:
        rows: int64 [k], the share.
        table: its columns have those k rows.
        keys: of each content in the table, equal for what is equal in another part.
        decoded: key -> what the `data.pkl` is.
        sums: int64 [k], of the bytes that were read; equal where they are equal.
        broken: file -> records that cannot be read, with what is wrong.
        sample: as `PayloadTable` has it.
    """

    rows: IntArray
    table: PayloadTable
    keys: list[bytes]
    decoded: dict[bytes, Decoded]
    sums: IntArray
    broken: dict[int, list[tuple[int, UnreadableError]]]
    damages: list[Damage]
    unlisted: tuple[str, ...]
    bare: tuple[str, ...]
    problems: list[Problem]
    sample: str


def by_content(table: PayloadTable) -> Iterator[tuple[int, IntArray]]:
    """The number of each content of an archive that any record holds, and these records."""
    order = np.argsort(table.content, kind="stable")
    bounds = np.searchsorted(table.content[order], np.arange(len(table.contents) + 1))
    for number in range(len(table.contents)):
        if bounds[number] < bounds[number + 1]:
            yield number, order[bounds[number] : bounds[number + 1]]


class Contents:
    """Numbers for the distinct `data.pkl`s, and their bytes until they are decoded."""

    def __init__(self) -> None:
        self.numbers: dict[bytes, int] = {}
        self.decoded: list[Decoded] = []
        self._pending: list[bytes] = []
        self._names: list[str | None] = []
        self._bytes = 0

    def number(self, pickle: bytes, storages: Sequence[str], contents: list[RecordContent]) -> int:
        """The number of a record's content; `contents` gets a place for it when it is new.

        Args:
            storages: the names of its members with data.
        """
        name = storages[0] if len(storages) == 1 else None if storages else ""
        key = hashlib.blake2b(pickle + (name or "-").encode(), digest_size=16).digest()
        number = self.numbers.setdefault(key, len(self.numbers))
        if number == len(self._names):
            self._pending.append(pickle)
            self._names.append(name)
            self._bytes += len(pickle)
            if self._bytes > _PENDING_LIMIT:
                self.decode(contents)
        return number

    def decode(self, contents: list[RecordContent]) -> None:
        """Decode what has come together."""
        for name, found in zip(self._names[len(self.decoded) :], decode(self._pending), strict=True):
            content = found.content
            is_lost = content is not None and name is not None and content.key not in ("", name)
            if content is not None and is_lost and (name or content.volume):
                error = UnreadableError(f"has a data.pkl that refers to {printable(content.key)}, which is missing", 0)
                found = replace(found, error=error)
            self.decoded.append(found)
            contents.append(content or RecordContent("object"))
        self._pending, self._bytes = [], 0
