"""What all folders behind a URL share.

Only what is asked for is fetched: one listing per folder, byte ranges of a file, never a whole file for a part of it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import lru_cache, partial
from itertools import islice
from typing import Any, BinaryIO

from ckptlint.errors import AccessError
from ckptlint.model import FileState
from ckptlint.model.text import printable
from ckptlint.storage.folder import READ_BLOCK, Folder
from ckptlint.storage.requests import WORKERS, CutShortError, is_absent, pool, reason, with_retries

_PAGE = 64 * 1024


class RemoteFolder(Folder):
    """A folder that is read by requests."""

    protocol: str

    is_near = False

    @property
    def source(self) -> str:
        """What its bytes come from, as errors name it."""
        return self.display

    def __init__(self) -> None:
        self._heads: dict[str, bytes] = {}

    def head(self, name: str, count: int) -> bytes:
        """The first bytes of a file, kept: they are asked for more than once."""
        known = self._heads.get(name, b"")
        if len(known) < min(count, self.size(name)):
            self._heads[name] = known = super().head(name, count)
            if not any(known) and self.size(name):
                what = f"{printable(name)} in {self.source}"
                raise AccessError(f"{what} cannot be read: the server sends zero bytes only")
        return known[:count]

    def fetch(self, name: str, start: int, stop: int) -> bytes:
        """The bytes [start, stop) of a file, by one request; all of them or an exception of the library."""
        raise NotImplementedError

    def _spans(self, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        size = self.size(name)
        pieces = [range(start, min(stop, size), READ_BLOCK) for start, stop in spans]
        ends = [(at, min(at + READ_BLOCK, piece.stop)) for piece in pieces for at in piece]
        data = pool(self.protocol).map(lambda end: self._bytes(name, *end), ends)
        return [b"".join(islice(data, len(piece))) for piece in pieces]

    def heads(self, names: Sequence[str], count: int) -> Iterator[bytes | None]:
        return pool(self.protocol).map(partial(self._head, count), names)

    def _head(self, count: int, name: str) -> bytes | None:
        try:
            return self._bytes(name, 0, min(count, self.size(name)))  # one more level of the pool might wait for itself
        except AccessError:
            return None

    def blocks(self, name: str, size: int = READ_BLOCK) -> Iterator[bytes]:
        end = self.size(name)
        ahead: list[Future[bytes]] = []
        for start in range(0, end, size):
            ahead.append(pool(self.protocol).submit(self._bytes, name, start, min(start + size, end)))
            if len(ahead) == WORKERS // 2:
                yield ahead.pop(0).result()
        for block in ahead:
            yield block.result()

    def open(self, name: str) -> BinaryIO:
        return io.BufferedReader(_Reader(partial(self._bytes, name), self.size(name)), _PAGE)

    def _looks(self, relatives: Sequence[str]) -> Iterator[tuple[FileState, int | None]]:
        return pool(self.protocol).map(self.stat, relatives)

    def _bytes(self, name: str, start: int, stop: int) -> bytes:
        """A range of a file's bytes; an answer that is cut short is asked for again."""
        if start >= stop:
            return b""

        def whole() -> bytes:
            data = self.fetch(name, start, stop)
            if len(data) != stop - start:
                raise CutShortError(f"the answer ends after {len(data):,} of {stop - start:,} bytes")
            return data

        try:
            return with_retries(whole, stop - start)
        except Exception as error:
            why = "it is gone" if is_absent(error) else reason(error, self.protocol)
            raise AccessError(f"{printable(name)} in {self.source} cannot be read: {why}") from None


class _Reader(io.RawIOBase):
    """A file of known size, read by pages of which the last few are kept, and by larger pieces at once."""

    def __init__(self, fetch: Callable[[int, int], bytes], size: int) -> None:
        self._fetch, self._size, self._at = fetch, size, 0
        self._page = lru_cache(16)(lambda page: fetch(page * _PAGE, min((page + 1) * _PAGE, size)))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), max(0, self._size - self._at))
        if not count:
            return 0
        if count > _PAGE:
            data = self._fetch(self._at, self._at + min(count, READ_BLOCK))
        else:
            page, skipped = divmod(self._at, _PAGE)
            data = self._page(page)[skipped : skipped + count]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
