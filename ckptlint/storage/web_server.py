"""Folders of a web server, which does not list."""

from __future__ import annotations

import os
from asyncio import wait_for
from functools import cached_property, partial
from tempfile import TemporaryFile
from threading import Lock
from typing import IO, Any
from urllib.parse import quote, unquote, urlsplit

from ckptlint.errors import AccessError
from ckptlint.model import FileState
from ckptlint.model.text import first_names, human_bytes, printable
from ckptlint.storage.folder import Folder
from ckptlint.storage.listing import FolderEntry, Listing
from ckptlint.storage.paths import is_safe, shown
from ckptlint.storage.remote_folder import RemoteFolder
from ckptlint.storage.requests import (
    CutShortError,
    RangesError,
    filesystem,
    is_absent,
    longest,
    pool,
    reason,
    with_retries,
)

ASKED = (
    ".metadata", ".metadata.tmp", "metadata.json", "common.pt", "config.json", "run_config.yaml", "train_state.pt",
    "model.safetensors.index.json", "model.safetensors", "adapter_config.json", "adapter_model.safetensors",
)  # fmt: skip
"""The names that a web server is asked for, since it does not list."""

_MOST_COPIED, _ALL_COPIED = 512 * 1024**2, 4 * 1024**3  # bytes of one file, and of all of a folder
_NO_RANGES = "the server does not support range requests"
_NEVER_THERE = "ckptlint-asks-for-a-file-that-is-not-there"


class WebFolder(RemoteFolder):
    """A folder of a web server, which is asked for each name: pages that list a folder leave out dot files.

    A query, such as the signature of a storage account, follows every name; `named` is the file that the user named.
    """

    not_looked_at = "whether files lie here that .metadata does not name: a web server does not list them"

    def __init__(self, url: str, query: str, named: str = "") -> None:
        super().__init__()
        self.url, self.query, self.named = url, query, named
        self.protocol = url.partition(":")[0]
        self._sizes: dict[str, int | None] = {}
        self._copies: dict[str, IO[bytes]] = {}
        self._copying = Lock()
        self._redirects: dict[str, None] = {}  # the hosts that requests were sent on to

    @property
    def display(self) -> str:
        return shown("/".join(filter(None, (self.url, self.part))))

    @property
    def source(self) -> str:
        hosts = first_names(map(printable, self._redirects))
        return f"{self.display}, redirected to {hosts}" if hosts else self.display

    @property
    def redirected(self) -> str:
        hosts = first_names(map(printable, self._redirects))
        return f"who answers for {hosts}, to which the server redirects" if hosts else ""

    @property
    def name(self) -> str:
        return unquote(urlsplit(self.url).path.rpartition("/")[2])

    @property
    def parent(self) -> Folder | None:
        return None  # its other folders cannot be known

    def sub(self, name: str) -> Folder:
        return WebFolder(f"{self.url}/{quote(name)}", self.query)

    @cached_property
    def entries(self) -> Listing:
        names = dict.fromkeys((_NEVER_THERE, *ASKED, self.named or ASKED[0]))
        answers = dict(zip(names, pool(self.protocol).map(self._ask, names), strict=True))
        if answers[_NEVER_THERE] is not False:
            raise AccessError(f"{self.display} cannot be checked: the server answers for files that do not exist")
        if unsized := [name for name, size in answers.items() if size is None]:
            raise AccessError(f"{printable(unsized[0])} in {self.display} has no known size")
        sizes = ((name, size) for name, size in answers.items() if size is not None and size is not False)
        return Listing.of((name, FolderEntry(size, False)) for name, size in sizes)

    def has(self, name: str) -> bool:
        return name in self.entries if name in ASKED else self._ask(name) is not False

    def size(self, name: str) -> int:
        if name in self.entries:
            return self.entries[name].size
        size = self._ask(name)
        if size is None or size is False:
            raise AccessError(f"{printable(name)} in {self.display} is missing or has no known size")
        return size

    def stat(self, relative: str) -> tuple[FileState, int | None]:
        if not is_safe(relative):
            return "unsafe-path", None
        size = self._ask(relative)
        if size is False:
            return "absent", None
        return ("unchecked", None) if size is None else ("ok", size)

    def absent_hint(self, relative: str) -> str:
        return ""

    def fetch(self, name: str, start: int, stop: int) -> bytes:
        if (copy := self._copies.get(name)) is None:
            try:
                return self._request("GET", name, start, stop)[1]
            except RangesError:
                if not self.is_read_whole:
                    raise RangesError(f"{_NO_RANGES}: download the file, or check it with --depth data") from None
                copy = self._copied(name)
        return os.pread(copy.fileno(), stop - start, start)

    def _copied(self, name: str) -> IO[bytes]:
        """A file of a server that sends whole files alone, in a temporary one; RangesError where they are too large."""
        with self._copying:
            if name not in self._copies:
                size = self.size(name)
                if size > _MOST_COPIED or size + sum(map(self.size, self._copies)) > _ALL_COPIED:
                    limit = human_bytes(_MOST_COPIED if size > _MOST_COPIED else _ALL_COPIED)
                    raise RangesError(f"{_NO_RANGES}, and whole files are read up to {limit}: download the checkpoint")
                copy = TemporaryFile()  # noqa: SIM115
                copy.write(self._request("GET", name, 0, size)[1])
                copy.flush()
                if copy.tell() < size:
                    raise CutShortError(f"the answer ends after {copy.tell():,} of {size:,} bytes")
                self._copies[name] = copy
            return self._copies[name]

    def _ask(self, name: str) -> int | bool | None:
        """The size of a file, None when the server does not tell, False when there is no such file."""
        if not name:
            return False  # a server that lists answers for the folder itself
        if name not in self._sizes:
            try:
                size: int | bool | None = with_retries(lambda: self._request("HEAD", name)[0])
            except Exception as error:
                if not is_absent(error):
                    what = f"{printable(name)} in {self.source}" if name != _NEVER_THERE else self.source
                    raise AccessError(f"{what} cannot be accessed: {reason(error, self.protocol)}") from None
                size = False
            self._sizes[name] = size
        return self._sizes[name]

    def _request(self, method: str, name: str, start: int = 0, stop: int = 0) -> tuple[int | None, bytes]:
        """The size of the whole file and the bytes [start, stop) of it."""
        from fsspec.asyn import sync

        store = filesystem(self.protocol)
        answered = partial(self._answered, store, method, name, start, stop)
        return sync(store.loop, lambda: wait_for(answered(), longest(stop - start)))  # type: ignore[no-any-return]

    async def _answered(self, store: Any, method: str, name: str, start: int, stop: int) -> tuple[int | None, bytes]:
        session = await store.set_session()
        url = store.encode_url(f"{self.url}/{quote(name)}" + (f"?{self.query}" if self.query else ""))
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-{stop - 1}"} if stop else {})
        options = {"allow_redirects": True, "trace_request_ctx": self._redirects} | store.kwargs
        async with session.request(method, url, headers=headers, **options) as answer:
            if method == "HEAD" and answer.status in (405, 501):
                return await self._answered(store, "GET", name, 0, 1)
            answer.raise_for_status()
            length = answer.headers.get("Content-Length", "")
            if answer.status == 206:
                length = answer.headers.get("Content-Range", "").rpartition("/")[2]
            elif start:
                raise RangesError(_NO_RANGES)
            data = bytearray()
            while len(data) < stop - start and (piece := await answer.content.read(stop - start - len(data))):
                data += piece  # a server without ranges would send the whole file
            return (int(length) if length.isdecimal() else None), bytes(data)
