"""Servers on this machine that count what they are asked for and can be told to misbehave."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

BUCKET = "bucket"
PAGE = 100
"""Names on one page of a listing; real stores give 1,000."""
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKIALOOPBACK",
    "AWS_SECRET_ACCESS_KEY": "loopback-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass(frozen=True)
class Asked:
    """One request: what was asked for, how it was answered, and bytes of the body."""

    method: str
    path: str
    query: str
    range: str
    status: int
    sent: int

    @property
    def name(self) -> str:
        """The last part of the path; "" for a listing."""
        return "" if "list-type" in self.query else self.path.rpartition("/")[2]


Trouble = Callable[["Handler"], bool]


@dataclass
class Server:
    """A counting server; `trouble` may answer a request itself and then says True."""

    port: int
    asked: list[Asked] = field(default_factory=list)
    trouble: Trouble | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def sent(self) -> int:
        """Bytes of all bodies."""
        return sum(request.sent for request in self.asked)

    def names(self, method: str = "GET") -> list[str]:
        """The files that were asked for, in order."""
        return [request.name for request in self.asked if request.method == method and request.name]


class Handler(BaseHTTPRequestHandler):
    """Counts, lets trouble go first, and answers."""

    protocol_version = "HTTP/1.1"
    server_state: Server
    answer: Callable[[Handler], tuple[int, dict[str, str], bytes]]

    def do_GET(self) -> None:
        """Answer a GET or HEAD."""
        if self.server_state.trouble is not None and self.server_state.trouble(self):
            return
        status, headers, body = type(self).answer(self)
        self.reply(status, headers, body)

    do_HEAD = do_GET  # noqa: N815

    def reply(self, status: int, headers: dict[str, str], body: bytes = b"", cut: int = 0) -> None:
        """Send an answer, the last `cut` bytes of its body left out and the connection closed."""
        parts = urlsplit(self.path)
        body = body if self.command == "GET" else b""
        asked = self.headers.get("Range", "")
        request = Asked(self.command, unquote(parts.path), parts.query, asked, status, len(body))
        self.server_state.asked.append(request)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[: len(body) - cut])
        self.close_connection = self.close_connection or bool(cut)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002  a name of the library
        """Nothing: the tests look at `asked`."""


@contextmanager
def serving(answer: Callable[[Handler], tuple[int, dict[str, str], bytes]]) -> Iterator[Server]:
    """A server on a free port in a thread of this process."""
    state = Server(0)
    handler = type("Handler", (Handler,), {"server_state": state, "answer": staticmethod(answer)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    state.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def files_of(root: Path, ranges: bool = True) -> Callable[[Handler], tuple[int, dict[str, str], bytes]]:
    """A web server's answers for the files of a folder, without listings."""

    def answer(handler: Handler) -> tuple[int, dict[str, str], bytes]:
        path = root / unquote(urlsplit(handler.path).path).lstrip("/")
        if not path.is_file():
            return 404, {}, b"not found"
        data = path.read_bytes()
        asked = handler.headers.get("Range", "")
        if not ranges or not asked:
            return 200, {"Content-Length": str(len(data))}, data
        first, _, last = asked.removeprefix("bytes=").partition("-")
        part = data[int(first) : int(last) + 1]
        if not part:
            return 416, {}, b""
        return 206, {"Content-Range": f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"}, part

    return answer


def forwarded_to(port: int) -> Callable[[Handler], tuple[int, dict[str, str], bytes]]:
    """The answers of another server on this machine."""
    local = threading.local()

    def answer(handler: Handler) -> tuple[int, dict[str, str], bytes]:
        if not hasattr(local, "connection"):
            local.connection = http.client.HTTPConnection("127.0.0.1", port)
        local.connection.request(handler.command, handler.path, headers=dict(handler.headers.items()))
        answered = local.connection.getresponse()
        body = answered.read()
        skipped = ("connection", "transfer-encoding", "date", "server")
        headers = {name: value for name, value in answered.getheaders() if name.lower() not in skipped}
        return answered.status, headers, body

    return answer


MOTO = """
import time
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
time.sleep(86400)
"""


@contextmanager
def moto(page: int = PAGE) -> Iterator[int]:
    """The port of moto's S3 server, a process of its own, that lists `page` names at a time."""
    environment = {**os.environ, **CREDENTIALS, "MOTO_S3_DEFAULT_MAX_KEYS": str(page)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([sys.executable, "-c", MOTO], env=environment, **pipes) as process:
        yield int(process.stdout.readline())
        process.terminate()


def client(port: int) -> Any:
    """A client that writes to the S3 server; the bucket is there."""
    import boto3

    made = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        region_name="us-east-1",
    )
    made.create_bucket(Bucket=BUCKET)
    return made


def upload(store: Any, folder: Path, prefix: str) -> None:
    """All files below a folder as objects below a prefix."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            key = f"{prefix}/{path.relative_to(folder).as_posix()}"
            store.put_object(Bucket=BUCKET, Key=key, Body=path.read_bytes())
