"""Folders behind a URL: object stores through fsspec, and web servers, which do not list.

Only what is asked for is fetched: one listing per folder, byte ranges of a file, never a whole file for a part of it.
Every process makes its own connections, since the event loop of fsspec does not survive a fork (`isolate.py`).
"""

from __future__ import annotations

import errno
import io
import os
import random
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, cached_property, lru_cache, partial
from itertools import islice
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote, unquote, urlsplit

from ckptlint.errors import AccessError, ConfigError, NothingToCheckError
from ckptlint.model import FileState, printable
from ckptlint.storage.folder import BLOCK, Entry, Folder, is_safe, shown

T = TypeVar("T")

ATTEMPTS = 4
"""How often a request is made that fails for a reason that may pass."""
BACKOFF = 0.25
"""Seconds before the second attempt; doubled for each further one, with jitter."""
CONNECT_SECONDS = 10
READ_SECONDS = 30
"""How long a server may stay silent."""
WORKERS = 8
"""Requests at the same time."""

ASKED = (
    ".metadata",
    ".metadata.tmp",
    "metadata.json",
    "common.pt",
    "config.json",
    "run_config.yaml",
    "train_state.pt",
    "model.safetensors.index.json",
    "model.safetensors",
)
"""The names that a web server is asked for, since it does not list."""
_NEVER_THERE = "ckptlint-asks-for-a-file-that-is-not-there"
_FILES = re.compile(r".*\.(metadata|distcp|json|safetensors|pt|yaml)")
_PAGE = 64 * 1024
_WEB = ("http", "https")
_PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs", "hf": "huggingface_hub"}
_CREDENTIALS = {
    "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; FSSPEC_S3_ANON=true for a public bucket",
    "gs": "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_STORAGE_SAS_TOKEN",
    "hf": "set HF_TOKEN, or run `hf auth login`",
    "http": "a store that may not be listed refuses absent files too: give its own URL then (s3://, gs://, ...)",
}
_ALIKE = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "https": "http"}


def remote_at(url: str) -> tuple[Folder, str]:
    """The folder that a URL means, and the name of the file in it where the URL names a file.

    Raises:
        ConfigError: fsspec does not know the scheme, or a package for it is missing.
        NothingToCheckError: nothing lies there.
        AccessError: the store refused, or could not be reached.
    """
    protocol, path = url.split("://", 1)
    protocol = protocol.lower()
    if "::" in url:
        raise ConfigError(f"{shown(url)} chains file systems, which ckptlint does not follow")
    _filesystem(protocol)
    if protocol in _WEB:
        parts = urlsplit(url)
        folder = WebFolder(f"{protocol}://{parts.netloc}{parts.path}".rstrip("/"), parts.query)
        if _FILES.fullmatch(folder.name):
            return WebFolder(folder.url.rpartition("/")[0], parts.query), folder.name
        return folder, ""
    path = path.rstrip("/")
    if not path:
        raise ConfigError(f"{shown(url)} names no bucket")
    place = ObjectFolder(protocol, path)
    parent = place.parent
    if parent is not None and place.is_file:
        return parent, place.name
    return place, ""


# ---------------------------------------------------------------- what both kinds share


class RemoteFolder(Folder):
    """A folder that is read by requests."""

    protocol: str

    def __init__(self) -> None:
        self._heads: dict[str, bytes] = {}

    def head(self, name: str, count: int) -> bytes:
        """The first bytes of a file, kept: what a folder is gets told from them more than once."""
        known = self._heads.get(name, b"")
        if len(known) < min(count, self.size(name)):
            self._heads[name] = known = super().head(name, count)
        return known[:count]

    def fetch(self, name: str, start: int, stop: int) -> bytes:
        """The bytes [start, stop) of a file, by one request; all of them or an exception of the library."""
        raise NotImplementedError

    def spans(self, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        size = self.size(name)
        pieces = [range(start, min(stop, size), BLOCK) for start, stop in spans]
        ends = [(at, min(at + BLOCK, piece.stop)) for piece in pieces for at in piece]
        data = _pool(self.protocol).map(lambda end: self._bytes(name, *end), ends)
        return [b"".join(islice(data, len(piece))) for piece in pieces]

    def blocks(self, name: str, size: int = BLOCK) -> Iterator[bytes]:
        end = self.size(name)
        ahead: list[Future[bytes]] = []
        for start in range(0, end, size):
            ahead.append(_pool(self.protocol).submit(self._bytes, name, start, min(start + size, end)))
            if len(ahead) == WORKERS // 2:
                yield ahead.pop(0).result()
        for block in ahead:
            yield block.result()

    def open(self, name: str) -> BinaryIO:
        return io.BufferedReader(_Reader(partial(self._bytes, name), self.size(name)), _PAGE)

    def looks_at(self, relatives: Sequence[str]) -> list[tuple[FileState, int | None]]:
        return list(_pool(self.protocol).map(self.look_at, relatives))

    def _bytes(self, name: str, start: int, stop: int) -> bytes:
        if start >= stop:
            return b""
        what = f"{printable(name)} in {self.display}"

        def whole() -> bytes:
            data = self.fetch(name, start, stop)
            if len(data) != stop - start:
                raise _CutShortError(f"the answer ends after {len(data):,} of {stop - start:,} bytes")
            return data

        try:
            return _attempted(whole)
        except Exception as error:
            if _is_absent(error):
                raise AccessError(f"{what} cannot be read: it is no longer there") from None
            raise AccessError(f"{what} cannot be read: {_reason(error, self.protocol)}") from None


class _Reader(io.RawIOBase):
    """A file of known size, read by pages of which the last few are kept, and by larger pieces at once."""

    def __init__(self, fetch: Callable[[int, int], bytes], size: int) -> None:
        self._fetch = fetch
        self._size = size
        self._at = 0
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
            data = self._fetch(self._at, self._at + min(count, BLOCK))
        else:
            page, skipped = divmod(self._at, _PAGE)
            data = self._page(page)[skipped : skipped + count]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


# ---------------------------------------------------------------- object stores


class ObjectFolder(RemoteFolder):
    """All keys of an object store below a prefix.

    Attributes:
        path: bucket and prefix, without a slash at the end.
    """

    def __init__(self, protocol: str, path: str) -> None:
        super().__init__()
        self.protocol = protocol
        self.path = path
        self._subs: dict[str, ObjectFolder] = {}
        self._sizes: dict[str, int] = {}

    @property
    def display(self) -> str:
        return shown("/".join(filter(None, (f"{self.protocol}://{self.path}", self.part))))

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @cached_property
    def parent(self) -> Folder | None:
        above, _, name = self.path.rpartition("/")
        if not above:
            return None
        folder = ObjectFolder(self.protocol, above)
        folder._subs[name] = self
        return folder

    def sub(self, name: str) -> Folder:
        if name not in self._subs:
            self._subs[name] = ObjectFolder(self.protocol, f"{self.path}/{name}")
        return self._subs[name]

    @cached_property
    def _infos(self) -> list[dict[str, Any]]:
        """What one listing says, page after page."""
        listing = _filesystem(self.protocol)
        try:
            return list(_attempted(lambda: listing.ls(self.path, detail=True)))
        except Exception as error:
            if _is_absent(error):
                raise NothingToCheckError(f"{self.display} does not exist") from None
            raise AccessError(f"{self.display} cannot be listed: {_reason(error, self.protocol)}") from None

    @property
    def is_file(self) -> bool:
        """Whether the path is a key itself, and no prefix of keys."""
        only = self._infos[0] if len(self._infos) == 1 else {}
        return only.get("type") == "file" and only["name"].endswith("/" + self.name)

    @cached_property
    def entries(self) -> dict[str, Entry]:
        found = {}
        for info in self._infos:
            inside = info["name"].startswith(self.path + "/")
            if not inside and "//" in self.path:
                raise AccessError(f"{self.display} cannot be listed: the library drops a slash of it")
            name = info["name"][len(self.path) + 1 :] if inside else info["name"].rpartition("/")[2]
            name = name.rstrip("/")
            if name:  # a key that ends in a slash marks a folder; one with `//` has a folder without a name
                is_folder = info["type"] == "directory"
                if info["size"] is None and not is_folder:
                    raise AccessError(f"{printable(name)} in {self.display} has no known size")
                found[name] = Entry(0 if is_folder else int(info["size"]), is_folder)
        return dict(sorted(found.items()))

    @property
    def _has_nameless(self) -> bool:
        return any(info["type"] == "directory" and info["name"] == self.path + "/" for info in self._infos)

    def instead(self, relative: str) -> str:
        if other := super().instead(relative):
            return other
        return "keys with `//` lie there: an upload joined its prefix with one slash too many" * self._has_nameless

    def size(self, name: str) -> int:
        if name in self.entries:
            return self.entries[name].size
        state, size = self.look_at(name)
        if state != "ok" or size is None:
            raise AccessError(f"{printable(name)} in {self.display} cannot be read: it is not there")
        return size

    def look_at(self, relative: str) -> tuple[FileState, int | None]:
        if not is_safe(relative):
            return "unsafe-path", None
        if relative in self.entries:
            entry = self.entries[relative]
            return ("not-a-file", None) if entry.is_folder else ("ok", entry.size)
        if relative in self._sizes:
            return "ok", self._sizes[relative]
        if "/" not in relative or relative.endswith("/"):
            return "absent", None
        store = _filesystem(self.protocol)
        try:
            info = _attempted(lambda: store.info(f"{self.path}/{relative}"))
        except Exception as error:
            if _is_absent(error):
                return "absent", None
            what = f"{printable(relative)} in {self.display}"
            raise AccessError(f"{what} cannot be looked at: {_reason(error, self.protocol)}") from None
        if info["type"] != "file":
            return "not-a-file", None
        self._sizes[relative] = int(info["size"])
        return "ok", self._sizes[relative]

    def fetch(self, name: str, start: int, stop: int) -> bytes:
        from fsspec import AbstractFileSystem

        store = _filesystem(self.protocol)
        # where a store has no ranged read of its own (Hugging Face), fsspec would read megabytes ahead
        reads_ahead = not store.async_impl and type(store).cat_file is AbstractFileSystem.cat_file
        exactly = {"cache_type": "none"} if reads_ahead else {}
        data: bytes = store.cat_file(f"{self.path}/{name}", start=start, end=stop, **exactly)
        return data


# ---------------------------------------------------------------- web servers


class WebFolder(RemoteFolder):
    """A folder of a web server, which is asked for each name: pages that list a folder leave out dot files.

    Attributes:
        url: without query, without a slash at the end.
        query: what follows every name, such as the signature of a storage account.
    """

    unseen = "since a web server does not list its files: what .metadata does not name was not looked for"

    def __init__(self, url: str, query: str) -> None:
        super().__init__()
        self.url = url
        self.query = query
        self.protocol = url.partition(":")[0]
        self._sizes: dict[str, int | None] = {}

    @property
    def display(self) -> str:
        return shown("/".join(filter(None, (self.url, self.part))))

    @property
    def name(self) -> str:
        return unquote(urlsplit(self.url).path.rpartition("/")[2])

    @property
    def parent(self) -> Folder | None:
        return None  # its other folders cannot be known

    def sub(self, name: str) -> Folder:
        return WebFolder(f"{self.url}/{quote(name)}", self.query)

    @cached_property
    def entries(self) -> dict[str, Entry]:
        names = (_NEVER_THERE, *ASKED)
        answers = dict(zip(names, _pool(self.protocol).map(self._ask, names), strict=True))
        if answers[_NEVER_THERE] is not False:
            raise AccessError(f"{self.display} cannot be checked: the server answers for files that are not there")
        found = {}
        for name, size in answers.items():
            if size is None:
                raise AccessError(f"{printable(name)} in {self.display} has no known size")
            if size is not False:
                found[name] = Entry(size, is_folder=False)
        return found

    def has(self, name: str) -> bool:
        return name in self.entries if name in ASKED else self._ask(name) is not False

    def size(self, name: str) -> int:
        if name in self.entries:
            return self.entries[name].size
        size = self._ask(name)
        if size is None or size is False:
            raise AccessError(f"{printable(name)} in {self.display} is not there or has no known size")
        return size

    def look_at(self, relative: str) -> tuple[FileState, int | None]:
        if not is_safe(relative):
            return "unsafe-path", None
        size = self._ask(relative)
        if size is False:
            return "absent", None
        return ("unchecked", None) if size is None else ("ok", size)

    def instead(self, relative: str) -> str:
        return ""

    def fetch(self, name: str, start: int, stop: int) -> bytes:
        return self._request("GET", name, start, stop)[1]

    def _ask(self, name: str) -> int | bool | None:
        """The size of a file, None when the server does not tell, False when there is no such file."""
        if name not in self._sizes:
            try:
                size: int | bool | None = _attempted(lambda: self._request("HEAD", name)[0])
            except Exception as error:
                if not _is_absent(error):
                    what = f"{printable(name)} in {self.display}"
                    raise AccessError(f"{what} cannot be looked at: {_reason(error, self.protocol)}") from None
                size = False
            self._sizes[name] = size
        return self._sizes[name]

    def _request(self, method: str, name: str, start: int = 0, stop: int = 0) -> tuple[int | None, bytes]:
        """The size of the whole file and the bytes [start, stop) of it."""
        from fsspec.asyn import sync

        store = _filesystem(self.protocol)
        return sync(store.loop, self._answered, store, method, name, start, stop)  # type: ignore[no-any-return]

    async def _answered(self, store: Any, method: str, name: str, start: int, stop: int) -> tuple[int | None, bytes]:
        session = await store.set_session()
        url = store.encode_url(f"{self.url}/{quote(name)}" + (f"?{self.query}" if self.query else ""))
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-{stop - 1}"} if stop else {})
        async with session.request(method, url, headers=headers, allow_redirects=True, **store.kwargs) as answer:
            if method == "HEAD" and answer.status in (405, 501):
                return await self._answered(store, "GET", name, 0, 1)
            answer.raise_for_status()
            length = answer.headers.get("Content-Length", "")
            if answer.status == 206:
                length = answer.headers.get("Content-Range", "").rpartition("/")[2]
            elif start:
                raise _RangesError("the server does not send parts of a file")
            data = bytearray()
            while len(data) < stop - start and (piece := await answer.content.read(stop - start - len(data))):
                data += piece  # a server without ranges would send the whole file
            return (int(length) if length.isdecimal() else None), bytes(data)


# ---------------------------------------------------------------- connections of this process


def _filesystem(protocol: str) -> Any:
    """The file system of fsspec for a scheme, made anew in each process."""
    return _made(protocol, os.getpid())


@cache
def _made(protocol: str, _process: int) -> Any:
    try:
        import fsspec
        from fsspec.config import conf
    except ImportError:
        raise ConfigError(f"{protocol}:// needs more packages: pip install 'ckptlint[remote]'") from None
    try:
        kind = fsspec.get_filesystem_class(protocol)
    except ImportError:
        package = _PACKAGES.get(protocol, "'ckptlint[remote]'")
        raise ConfigError(f"{protocol}:// needs more packages: pip install {package}") from None
    except ValueError:
        raise ConfigError(f"{protocol}:// is no scheme that fsspec knows") from None
    names = (kind.protocol,) if isinstance(kind.protocol, str) else kind.protocol
    own: dict[str, Any] = {key: value for name in names for key, value in conf.get(name, {}).items()}
    options: dict[str, Any] = {"skip_instance_cache": True}
    if protocol != "hf":  # whose files are looked up in the listing
        options["use_listings_cache"] = False
    if protocol in _WEB:
        from aiohttp import ClientTimeout

        timeout = ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
        options["client_kwargs"] = {"timeout": timeout, "trust_env": True} | own.get("client_kwargs", {})
    elif "s3" in names:
        patience = {"connect_timeout": CONNECT_SECONDS, "read_timeout": READ_SECONDS, "retries": {"max_attempts": 0}}
        options["config_kwargs"] = patience | own.get("config_kwargs", {})
    try:
        made = kind(**options)
    except Exception as error:  # each library has its own way to say that credentials are missing
        raise AccessError(f"{protocol}:// cannot be used: {_reason(error, protocol)}") from None
    if "s3" in names:
        made.retries = 1  # `_attempted` makes the attempts, for all stores alike
    return made


def _pool(protocol: str) -> ThreadPoolExecutor:
    _filesystem(protocol)  # once, before many workers ask for it
    return _pool_of(os.getpid())


@cache
def _pool_of(_process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(WORKERS, thread_name_prefix="ckptlint-remote")


# ---------------------------------------------------------------- what can go wrong


class _CutShortError(ConnectionError):
    """An answer has fewer bytes than it should."""


class _RangesError(OSError):
    """A server ignores the header `Range`."""


_PASSING = {"ConnectionError", "TimeoutError", "Timeout", "HTTPClientError", "ClientConnectionError"}
_PASSING |= {"ClientPayloadError", "IncompleteRead", "ResponseParserError", "ProtocolError", "ConnectError"}
_BROKEN_OFF = {"ServerDisconnectedError", "ConnectionResetError", "ConnectionClosedError", "ClientPayloadError"}
_BROKEN_OFF |= {"IncompleteRead", "BrokenPipeError"}
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"}
_NO_CREDENTIALS |= {"NoAuthTokenError", "TokenRetrievalError", "UnauthorizedSSOTokenError", "SSOTokenLoadError"}
_NO_CREDENTIALS |= {"DefaultCredentialsError", "RefreshError", "ClientAuthenticationError", "LocalTokenNotFoundError"}


def _attempted(work: Callable[[], T]) -> T:
    """The result of `work`, tried again while it fails for a reason that may pass."""
    for attempt in range(1, ATTEMPTS):
        try:
            return work()
        except Exception as error:
            if not _may_pass(error):
                raise
        time.sleep(BACKOFF * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))  # noqa: S311  no secret
    return work()


def _may_pass(error: BaseException) -> bool:
    status = _status(error)
    if status is not None:
        return status in (408, 425, 429, 500, 502, 503, 504)
    return bool(_PASSING & _kinds(error)) and not any(isinstance(e, ssl.SSLError) for e in _chain(error))


def _is_absent(error: BaseException) -> bool:
    return isinstance(error, FileNotFoundError) or _status(error) in (404, 410)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those that led to it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _kinds(error: BaseException) -> set[str]:
    """Names of the classes of an error: the libraries of the stores are not imported here."""
    return {kind.__name__ for part in _chain(error) for kind in type(part).__mro__}


def _response(error: BaseException) -> dict[str, Any]:
    """What botocore keeps of a refusal: `Error` with its code, `ResponseMetadata` with the HTTP status."""
    answers = (getattr(part, "response", None) for part in _chain(error))
    return next((answer for answer in answers if isinstance(answer, dict)), {})


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error stands for."""
    status = _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    if isinstance(status, int):
        return status
    for part in _chain(error):
        for holder in (part, getattr(part, "response", None)):
            # aiohttp; azure and requests; gcsfs. A broken body has a code of 400 in aiohttp, which no server sent
            for name in ("status", "status_code", *(["code"] if type(part).__name__ == "HttpError" else [])):
                value = getattr(holder, name, None)
                if isinstance(value, int) and 400 <= value < 600:
                    return value
    return None


def _reason(error: BaseException, protocol: str) -> str:
    """Why a request failed, with what to do where that is known; without URLs, which may hold signatures."""
    scheme = _ALIKE.get(protocol, protocol)
    remedy = f"; {_CREDENTIALS[scheme]}" if scheme in _CREDENTIALS else ""
    status, kinds = _status(error), _kinds(error)
    code = str(_response(error).get("Error", {}).get("Code", ""))
    if _NO_CREDENTIALS & kinds:
        return "no usable credentials were found" + remedy
    if status in (401, 403) or isinstance(error, PermissionError):
        named = f"{status}" if not code or code == str(status) else f"{status}, {printable(code)}"
        return f"access is denied ({named})" + remedy if status else "access is denied" + remedy
    if code == "NoSuchBucket":
        return "there is no such bucket"
    if status is not None:
        return f"the server answers {status}" + (f" ({printable(code)})" if code and code != str(status) else "")
    if isinstance(error, _CutShortError | _RangesError):
        return str(error)
    for part in _chain(error):
        if isinstance(part, socket.gaierror) or type(part).__name__ == "ClientConnectorDNSError":
            return "the name of its host cannot be resolved"
        if isinstance(part, ssl.SSLError):
            return "its certificate or encryption is not accepted"
        if isinstance(part, OSError) and part.errno == errno.ECONNREFUSED:
            return "the connection was refused"
    if _BROKEN_OFF & kinds:
        return "the server broke the connection off"
    if any("Timeout" in kind for kind in kinds):
        return f"the server did not answer within {READ_SECONDS} s"
    return _without_secrets(f"{type(error).__name__}: {error}")


def _without_secrets(text: str) -> str:
    text = re.sub(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+", lambda match: shown(match[0]), text)
    text = re.sub(r"(?i)((?:signature|token|secret|password|credential|key|sig)[\w-]*\s*[=:]\s*)\S+", r"\1...", text)
    return printable(" ".join(text.split())[:200])
