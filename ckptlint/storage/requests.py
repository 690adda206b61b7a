"""Requests to a store: connections of this process, attempts, and why one failed.

Every process makes its own connections, since the event loop of fsspec does not survive a fork.
"""

from __future__ import annotations

import errno
import ipaddress
import mmap
import os
import random
import re
import socket
import ssl
import struct
import time
from asyncio import get_running_loop, timeout
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit

from ckptlint.errors import AccessError, ConfigError
from ckptlint.model.text import printable, texts
from ckptlint.storage.paths import shown

_T = TypeVar("_T")

ATTEMPTS = 4  # how often a request is made that fails for a reason that may pass
BACKOFF = 0.25  # seconds before the second attempt; doubled for each further one, with jitter
CONNECT_SECONDS = 10
READ_SECONDS = 30  # how long a server may stay silent
SLOWEST = 32 * 1024  # bytes in a second that one request is given time for, beside `READ_SECONDS`
PATIENCE_SECONDS = 120  # waited in all for one path, beyond a second for each request and the time of its bytes
PAGES = 1_000  # pages of one listing that are read, of 1,000 names each
WORKERS = 8  # requests at the same time

WEB = ("http", "https")
PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs",
    "hf": "huggingface_hub", "http": "aiohttp", "https": "aiohttp",
}  # fmt: skip
"""What each scheme needs; these name a bucket or a host first."""

_CREDENTIALS = {
    "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; FSSPEC_S3_ANON=true for a public bucket",
    "gs": "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_STORAGE_SAS_TOKEN",
    "hf": "set HF_TOKEN, or run `hf auth login`",
    "http": "a store that refuses listing refuses missing files too: give its own URL instead (s3://, gs://, ...)",
}

_ALIKE = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "https": "http"}


def filesystem(protocol: str) -> Any:
    """The file system of fsspec for a scheme, made anew in each process."""
    return _made(protocol, os.getpid())


@cache
def _made(protocol: str, _process: int) -> Any:
    """The fsspec filesystem of a protocol, with time limits and the settings of its configuration."""
    try:
        import fsspec
        from fsspec.config import conf

        kind = fsspec.get_filesystem_class(protocol)
    except ImportError:
        package = PACKAGES.get(protocol, "fsspec")
        packages = "fsspec" if package == "fsspec" else f"fsspec {package}"
        raise ConfigError(f"{protocol}:// needs {package}: pip install {packages}") from None
    except ValueError:
        raise ConfigError(f"{protocol}:// is not a scheme that fsspec knows") from None
    names = texts(kind.protocol)
    settings: dict[str, Any] = {key: value for name in names for key, value in conf.get(name, {}).items()}
    options: dict[str, Any] = {"skip_instance_cache": True}
    if protocol != "hf":  # whose files are looked up in the listing
        options["use_listings_cache"] = False
    if protocol in WEB:
        from aiohttp import ClientTimeout, TraceConfig

        redirects = TraceConfig()
        redirects.on_request_redirect.append(_redirected)
        silence = ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
        session = {"timeout": silence, "trust_env": True} | settings.get("client_kwargs", {})
        session["trace_configs"] = [*session.get("trace_configs", []), redirects]
        options |= {"client_kwargs": session, "get_client": _client}
    elif "s3" in names:
        patience = {"connect_timeout": CONNECT_SECONDS, "read_timeout": READ_SECONDS, "retries": {"max_attempts": 0}}
        options["config_kwargs"] = patience | settings.get("config_kwargs", {})
    try:
        made = kind(**options)
    except Exception as error:  # each library has its own way to say that credentials are missing
        raise AccessError(f"{protocol}:// cannot be used: {reason(error, protocol)}") from None
    if "s3" in names:
        made.retries = 1  # `with_retries` makes the attempts, for all stores alike
        if hasattr(made, "_list_pages"):  # in an older s3fs the time alone ends a listing
            made._list_pages = partial(_pages, made._list_pages)
    return made


async def _pages(listing: Callable[..., AsyncIterator[Any]], *arguments: Any, **options: Any) -> AsyncIterator[Any]:
    """The pages of a listing, up to `PAGES` of them."""
    count = 0
    async for page in listing(*arguments, **options):
        if count == PAGES:
            raise SlowError(f"its listing does not end after {PAGES:,} pages")
        yield page
        count += 1


def listed(protocol: str, path: str) -> list[dict[str, Any]]:
    """What a store lists at a path, by one attempt; raises SlowError after `PATIENCE_SECONDS` or `PAGES` pages."""
    store = filesystem(protocol)
    if not store.async_impl:
        return list(store.ls(path, detail=True))
    from fsspec.asyn import sync

    async def whole() -> list[dict[str, Any]]:
        try:
            async with timeout(PATIENCE_SECONDS) as clock:
                return list(await store._ls(path, detail=True))
        except TimeoutError:
            if clock.expired():
                raise SlowError(f"its listing does not end within {PATIENCE_SECONDS} s") from None
            raise

    return sync(store.loop, whole)  # type: ignore[no-any-return]


async def _redirected(_session: Any, context: Any, redirect: Any) -> None:
    """Note where a request is sent on to; raises RedirectError where that is a private address and this is none."""
    url = urlsplit(urljoin(str(redirect.url), redirect.response.headers.get("Location", "")))
    host, before = url.hostname or "", redirect.url.host
    if host == before:
        return
    if isinstance(context.trace_request_ctx, dict):
        context.trace_request_ctx[host] = None
    if all(await _are_private(before) or [False]):  # a host with a public address too is a public one
        return
    _GUARDED.add(host)
    if any(await _are_private(host)):
        raise _to_private(host)


_GUARDED: set[str] = set()
"""Hosts to which a public one has sent a request of this process, and which must be public too."""


async def _client(**settings: Any) -> Any:
    """A session whose guarded hosts are judged by the addresses that it connects to: a name may have others by then."""
    from aiohttp import ClientSession, TCPConnector, ThreadedResolver

    class Resolver(ThreadedResolver):
        async def resolve(self, host: str, *where: Any, **more: Any) -> list[Any]:
            answers: list[Any] = await super().resolve(host, *where, **more)
            if host in _GUARDED and any(_is_private(answer["host"]) for answer in answers):
                raise _to_private(host)
            return answers

    return ClientSession(**({"connector": TCPConnector(resolver=Resolver())} | settings))


def _to_private(host: str) -> RedirectError:
    return RedirectError(f"the server redirects to {printable(host)}, a private address: pass it if you trust it")


async def _are_private(host: str) -> list[bool]:
    """Whether each address of a host is not of the public internet; [] for a name that only a proxy knows."""
    try:
        answers = await get_running_loop().getaddrinfo(host, None)
    except OSError:
        return []
    return [_is_private(str(answer[4][0])) for answer in answers]


def _is_private(text: str) -> bool:
    """Whether an address is not of the public internet, by the IPv4 address in it where it leads to one.

    Source: RFC 4291 2.5.5 (mapped and compatible), RFC 3056 (6to4), RFC 6052 and 8215 (NAT64), RFC 6890 (192.0.0.0/24)
    """
    address: Any = ipaddress.ip_address(text.partition("%")[0])
    if address.version == 6:
        leads_on = any(address in network for network in _LEADS_TO_IPV4)
        last = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF) if leads_on else None
        address = address.ipv4_mapped or address.sixtofour or last or address
    return not address.is_global or address in _PROTOCOLS


_LEADS_TO_IPV4 = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "::/96")))
_PROTOCOLS = ipaddress.IPv4Network("192.0.0.0/24")  # of which Python calls some global; a cloud has its metadata there


def pool(protocol: str) -> ThreadPoolExecutor:
    filesystem(protocol)  # once, before many workers ask for it
    return _pool_of(os.getpid())


@cache
def _pool_of(_process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(WORKERS, thread_name_prefix="ckptlint-remote")


class CutShortError(ConnectionError):
    """An answer has fewer bytes than it should."""


class RangesError(OSError):
    """A server ignores the header `Range`."""


class RedirectError(OSError):
    """A server sends ckptlint to where it does not go."""


def longest(count: int) -> float:
    """Seconds that a request for so many bytes may take."""
    return READ_SECONDS + count / SLOWEST


class SlowError(OSError):
    """A listing goes on and on, or all patience with the servers of one path is spent."""


_patience = mmap.mmap(-1, 16)  # two numbers that forked processes share: of the path, and of the seconds spent on it


def reset_time_budget() -> None:
    """Begin to count anew what is spent of `PATIENCE_SECONDS`; what still waits for the path before counts no more."""
    _patience[:] = struct.pack("qd", _path() + 1, 0)


def _path() -> int:
    number: int = struct.unpack("qd", _patience)[0]
    return number


def _spend(path: int, seconds: float) -> None:
    current, spent = struct.unpack("qd", _patience)  # requests beside each other may miss a part, never all
    if path == current:
        _patience[:] = struct.pack("qd", current, spent + max(0.0, seconds))
        if spent > PATIENCE_SECONDS:
            raise SlowError(f"the server is too slow: ckptlint waits {PATIENCE_SECONDS} s beyond the time of the bytes")


_PASSING = {"ConnectionError", "TimeoutError", "Timeout", "HTTPClientError", "ClientConnectionError"}
_PASSING |= {"ClientPayloadError", "IncompleteRead", "ResponseParserError", "ProtocolError", "ConnectError"}
_BROKEN_OFF = {"ServerDisconnectedError", "ConnectionResetError", "ConnectionClosedError", "ClientPayloadError"}
_BROKEN_OFF |= {"IncompleteRead", "BrokenPipeError"}
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"}
_NO_CREDENTIALS |= {"NoAuthTokenError", "TokenRetrievalError", "UnauthorizedSSOTokenError", "SSOTokenLoadError"}
_NO_CREDENTIALS |= {"DefaultCredentialsError", "RefreshError", "ClientAuthenticationError", "LocalTokenNotFoundError"}


def with_retries(work: Callable[[], _T], count: int = 0) -> _T:
    """The result of `work`, which fetches `count` bytes, tried again while it fails for a reason that may pass.

    Not after two silences. Raises SlowError where the patience with the servers of this path is spent.
    """
    path, started = _path(), time.monotonic()
    for attempt in range(1, ATTEMPTS + 1):
        _spend(path, 0)
        begun = time.monotonic()
        try:
            return work()
        except Exception as error:
            if attempt == ATTEMPTS or time.monotonic() - started > 1.5 * READ_SECONDS or not _may_pass(error):
                raise
        finally:
            _spend(path, time.monotonic() - begun - 1 - count / SLOWEST)
        time.sleep(BACKOFF * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))  # noqa: S311  no secret
    raise AssertionError


def _may_pass(error: BaseException) -> bool:
    if (status := _status(error)) is not None:
        return status in (408, 425, 429, 500, 502, 503, 504)
    return bool(_PASSING & _kinds(error)) and not any(isinstance(e, ssl.SSLError) for e in _chain(error))


def is_absent(error: BaseException) -> bool:
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
    return {kind.__name__ for raised in _chain(error) for kind in type(raised).__mro__}


def _response(error: BaseException) -> dict[str, Any]:
    """What botocore keeps of a refusal: `Error` with its code, `ResponseMetadata` with the HTTP status."""
    answers = (getattr(raised, "response", None) for raised in _chain(error))
    return next((answer for answer in answers if isinstance(answer, dict)), {})


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error stands for."""
    status = _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    if isinstance(status, int):
        return status
    for raised in _chain(error):
        for holder in (raised, getattr(raised, "response", None)):
            # aiohttp; azure and requests; gcsfs. A broken body has a code of 400 in aiohttp, which no server sent
            for name in ("status", "status_code", *(["code"] if type(raised).__name__ == "HttpError" else [])):
                value = getattr(holder, name, None)
                if isinstance(value, int) and 400 <= value < 600:
                    return value
    return None


def reason(error: BaseException, protocol: str) -> str:
    """Why a request failed, with what to do where that is known; without URLs, which may hold signatures."""
    scheme = _ALIKE.get(protocol, protocol)
    remedy = f"; {_CREDENTIALS[scheme]}" if scheme in _CREDENTIALS else ""
    status, kinds = _status(error), _kinds(error)
    code = str(_response(error).get("Error", {}).get("Code", ""))
    if _NO_CREDENTIALS & kinds:
        return "there are no usable credentials" + remedy
    if "HttpProcessingError" in kinds:  # to which aiohttp gives a status of 400 that no server sent
        return "the server's answer is not HTTP"
    if "TooManyRedirects" in kinds:
        return "the server redirects again and again"
    if status in (401, 403) or isinstance(error, PermissionError):
        named = f"{status}" if not code or code == str(status) else f"{status}, {printable(code)}"
        return f"access is denied ({named})" + remedy if status else "access is denied" + remedy
    if code == "NoSuchBucket":
        return "there is no such bucket"
    if status is not None:
        return f"the server answers {status}" + (f" ({printable(code)})" if code and code != str(status) else "")
    if isinstance(error, CutShortError | RangesError | SlowError):
        return str(error)
    if (refused := next((raised for raised in _chain(error) if isinstance(raised, RedirectError)), None)) is not None:
        return str(refused)
    for raised in _chain(error):
        if isinstance(raised, socket.gaierror) or type(raised).__name__ == "ClientConnectorDNSError":
            return "its host name cannot be resolved"
        if isinstance(raised, ssl.SSLError):
            return "its certificate or encryption is not accepted"
        if isinstance(raised, OSError) and raised.errno == errno.ECONNREFUSED:
            return "the server refused the connection"
    if _BROKEN_OFF & kinds:
        return "the server closed the connection early"
    if any("Timeout" in kind for kind in kinds):
        return f"the server did not answer within {READ_SECONDS} s"
    text = f"{type(error).__name__}: {error}"  # which may hold secrets
    text = re.sub(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+", lambda match: shown(match[0]), text)
    text = re.sub(r"(?i)((?:signature|token|secret|password|credential|key|sig)[\w-]*\s*[=:]\s*)\S+", r"\1...", text)
    return printable(" ".join(text.split())[:200])
