"""Limit the connections of a server: bytes per request, and time to read a response.

pyarrow receives a complete message before any Python code runs, also before the token is checked,
and it has no option for the size of messages. It also cannot cancel a response that a client does
not read. A thread therefore polls the TCP connections of the server and closes them:

    bytes     A client has sent more than `MAX_REQUEST_BYTES` since its last accepted request.
    reading   A client has not read a message of its response in time.

gRPC then drops the partial message, and the response fails. Between two polls a client can exceed
the limit, at the speed of the network. The kernel counts the bytes (TCP_INFO), so the limits apply
only on Linux.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote

MAX_REQUEST_BYTES = 16 * 10**6
"""Twice the largest valid request."""
READ_TIMEOUT_S = 30.0
"""Time to read a message, in addition to its bytes at `MIN_READ_BYTES_PER_S`."""
MIN_READ_BYTES_PER_S = 10**6
POLL_S = 0.1
_FD_DIRECTORY = Path("/proc/self/fd")
_TCP_INFO_BYTES = 136
_RECEIVED_OFFSET = 128
"""Offset of tcpi_bytes_received in struct tcp_info of the Linux kernel."""

logger = logging.getLogger(__name__)


class ConnectionWatch:
    """Thread that closes the connections of clients that send too much or do not read.

    Args:
        port: Port of the server.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._lock = threading.Lock()
        self._accepted: set[str] = set()
        """Peers with a request or progress since the last poll."""
        self._deadlines: dict[int, tuple[str, float]] = {}
        """Peer and deadline of each message that is being sent."""
        self._sent = 0
        self._bases: dict[str, int] = {}
        """Bytes received up to the last accepted request, by peer."""
        self.closed = 0
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="connections", daemon=True).start()

    def accept(self, peer: str) -> None:
        """Start counting the bytes of a connection at 0.

        Args:
            peer: `ServerCallContext.peer()`.
        """
        with self._lock:
            self._accepted.add(_normalize_peer(peer))

    @contextmanager
    def sending(self, peer: str, size: int) -> Iterator[None]:
        """Close the connection if a message of `size` bytes is not read in time."""
        deadline_s = time.monotonic() + READ_TIMEOUT_S + size / MIN_READ_BYTES_PER_S
        with self._lock:
            self._sent += 1
            number = self._sent
            self._deadlines[number] = _normalize_peer(peer), deadline_s
        try:
            yield
        finally:
            with self._lock:
                del self._deadlines[number]
            self.accept(peer)

    def close(self) -> None:
        """Stop polling."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(POLL_S):
            self._check_connections()

    def _check_connections(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            accepted, self._accepted = self._accepted, set()
            timed_out = {
                peer for peer, deadline_s in self._deadlines.values() if now_s > deadline_s
            }
        bases: dict[str, int] = {}
        for connection, peer in _accepted_connections(self._port):
            received = _received_bytes(connection)
            bases[peer] = received if peer in accepted else self._bases.get(peer, 0)
            if received - bases[peer] > MAX_REQUEST_BYTES:
                self._close_connection(
                    connection, peer, f"a request has more than {MAX_REQUEST_BYTES} bytes"
                )
            elif peer in timed_out:
                self._close_connection(connection, peer, "the client does not read the response")
        self._bases = bases

    def _close_connection(self, connection: socket.socket, peer: str, reason: str) -> None:
        with suppress(OSError):  # the client may have closed it
            connection.shutdown(socket.SHUT_RDWR)
        self.closed += 1
        if self.closed & (self.closed - 1) == 0:  # 1, 2, 4, ...: limits the number of log lines
            logger.warning(
                "connection of %s closed: %s (closed_connections=%d)", peer, reason, self.closed
            )


def _accepted_connections(port: int) -> Iterator[tuple[socket.socket, str]]:
    """Yield copies of the sockets that this process has accepted at a port, with their peers."""
    try:
        numbers = [int(file.name) for file in _FD_DIRECTORY.iterdir()]
    except OSError:  # not Linux
        return
    for number in numbers:
        with suppress(OSError):  # closed in the meantime, or not connected
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            connection = _duplicate_socket(number)
            with closing(connection):
                local_address = connection.getsockname()
                if connection.type != socket.SOCK_STREAM or local_address[1:2] != (port,):
                    continue
                peer = connection.getpeername()
                yield connection, f"{peer[0].removeprefix('::ffff:')}:{peer[1]}"


def _duplicate_socket(number: int) -> socket.socket:
    """Return a duplicate of an open socket, whose number no other file can reuse."""
    copy = os.dup(number)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _received_bytes(connection: socket.socket) -> int:
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return 0
    return struct.unpack_from("Q", info, _RECEIVED_OFFSET)[0] if len(info) >= _TCP_INFO_BYTES else 0


def _normalize_peer(peer: str) -> str:
    """Return HOST:PORT of a gRPC peer such as ipv4:127.0.0.1:7 or ipv6:%5B::1%5D:7."""
    host, _, port = unquote(peer.partition(":")[2]).rpartition(":")
    return f"{host.strip('[]').removeprefix('::ffff:')}:{port}"
