"""An S3 server on this machine with injected faults: `ObjectServer`.

moto stores the objects. Requests pass through a small server, which counts the bytes it sends and
can be offline, slow or full and return errors or wrong bytes:

    with ObjectServer() as server:
        server.put("bucket", "a/b.bin", content)
        ...                                     # with server.environment set
        server.faults.bytes_per_s = 1000
"""

from __future__ import annotations

import http.client
import logging
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from moto.server import ThreadedMotoServer

SECRET = "kGaUbQ7zSecretNeverWritten"
HOP_HEADERS = {"connection", "transfer-encoding", "content-length", "date", "server", "keep-alive"}


@dataclass
class Faults:
    """Faults of requests for objects."""

    status: int | None = None
    """Status of every answer."""
    write_status: int | None = None
    """Status of every answer to a write."""
    write_s: float = 0.0
    """Delay of answers to writes."""
    cut_writes: bool = False
    """Close the connection without an answer to a write, and store nothing."""
    bytes_per_s: float | None = None
    cut_after: int | None = None
    """Close the connection after this number of bytes of a body."""
    spoil: Callable[[str, int], bool] = field(default=lambda path, number: False)
    """Whether one byte of the answer is wrong, by path and number of the request."""


class ObjectServer:
    """A server that starts at once and stops at the end of the block."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._moto.start()
        self._backend = self._moto.get_host_and_port()
        self.faults = Faults()
        self.requests: list[tuple[str, str, str]] = []
        """Method, path and range of each."""
        self.sent_bytes = 0
        """Of bodies of objects."""
        self._written_buckets: set[str] = set()
        self.connections: set[socket.socket] = set()
        self._port = 0
        self.come_back()

    def __enter__(self) -> ObjectServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.go_away()
        self._moto.stop()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of clients, with a secret that is not real."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_ACCESS_KEY_ID": "AKIAMADEUP",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def reset(self) -> None:
        """Remove all faults and counts."""
        self.faults = Faults()
        self.requests.clear()
        self.sent_bytes = 0

    def put(self, bucket: str, name: str, content: bytes) -> None:
        """Write an object, and create its bucket if necessary."""
        if self._request("HEAD", f"/{bucket}").status != 200:
            self._request("PUT", f"/{bucket}")
        answer = self._request("PUT", f"/{bucket}/{name}", content)
        assert answer.status == 200, answer.read()

    def put_once(self, bucket: str, files: dict[str, bytes]) -> None:
        """Write objects to a bucket unless this was done before."""
        if bucket not in self._written_buckets:
            for name, content in files.items():
                self.put(bucket, name, content)
            self._written_buckets.add(bucket)

    def put_folder(self, bucket: str, folder: Path, prefix: str = "") -> int:
        """Write all files of a folder and return their size in bytes."""
        size = 0
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                content = file.read_bytes()
                self.put(bucket, f"{prefix}{file.relative_to(folder)}", content)
                size += len(content)
        return size

    def names(self, bucket: str) -> list[str]:
        """Return the names of all objects (at most 1000)."""
        listed = self._request("GET", f"/{bucket}?list-type=2").read().decode()
        return re.findall("<Key>(.*?)</Key>", listed)

    def get(self, bucket: str, name: str) -> bytes:
        """Return the content of an object."""
        answer = self._request("GET", f"/{bucket}/{name}")
        assert answer.status == 200, name
        return answer.read()

    def delete(self, bucket: str, name: str) -> None:
        """Delete an object."""
        self._request("DELETE", f"/{bucket}/{name}")

    def go_away(self) -> None:
        """End all connections and reject new ones."""
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def come_back(self) -> None:
        """Listen on the same port as before."""
        outer = self

        class Handler(_Handler):
            owner = outer

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._server.daemon_threads = True
        self._port = self._server.server_address[1]
        Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def _request(
        self, method: str, path: str, body: bytes | None = None, headers: Any = None
    ) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(*self._backend, timeout=60)
        signed = "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request"
        connection.request(method, path, body, headers or {"Authorization": signed})
        return connection.getresponse()


class _Handler(BaseHTTPRequestHandler):
    owner: ObjectServer
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.owner.connections.add(self.connection)

    def finish(self) -> None:
        self.owner.connections.discard(self.connection)
        with suppress(OSError):
            super().finish()

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def _answer(self) -> None:
        owner, faults = self.owner, self.owner.faults
        owner.requests.append((self.command, self.path, self.headers.get("Range", "")))
        content = self.rfile.read(int(self.headers.get("Content-Length", 0))) or None
        status = faults.status
        if self.command in ("PUT", "POST"):
            if faults.cut_writes:
                self.close_connection = True
                return
            time.sleep(faults.write_s)
            status = faults.write_status or status
        if status is not None:
            self._send(status, {}, b"<Error/>")
            return
        headers = {k: v for k, v in self.headers.items() if k.lower() not in HOP_HEADERS}
        answer = owner._request(self.command, self.path, content, headers)
        body = answer.read()
        if self.command == "GET" and "list-type" not in self.path and answer.status < 300:
            owner.sent_bytes += len(body)
            if faults.spoil(self.path, len(owner.requests)):
                body = body[:-1] + bytes([body[-1] ^ 1])
        answer_headers = {k: v for k, v in answer.getheaders() if k.lower() not in HOP_HEADERS}
        size = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(body))
        self._send(answer.status, {**answer_headers, "Content-Length": size or "0"}, body)

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        faults = self.owner.faults
        with suppress(ConnectionError):
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            if faults.cut_after is not None and len(body) > faults.cut_after:
                self.wfile.write(body[: faults.cut_after])
                self.close_connection = True
                return
            chunk = (
                len(body) if faults.bytes_per_s is None else max(1, int(faults.bytes_per_s / 10))
            )
            for start in range(0, len(body), max(chunk, 1)):
                self.wfile.write(body[start : start + chunk])
                if faults.bytes_per_s is not None:
                    time.sleep(0.1)

    def log_message(self, *args: object) -> None:
        pass
