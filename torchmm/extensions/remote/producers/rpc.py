"""Calls between producers, registries and trainers over Arrow Flight.

Connections to other hosts are always encrypted, because calls carry the token.
"""

from __future__ import annotations

import hmac
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

import pyarrow as pa
from pyarrow import flight

from torchmm.common.errors import ConfigError
from torchmm.data.corrupt import escape_text
from torchmm.extensions.remote.producers.connection_limits import ConnectionWatch
from torchmm.recipe.data_section import is_host_port, is_local

TOKEN_VARIABLE = "TORCHMM_DATA_TOKEN"
TOKEN_HEADER = "torchmm-token"
MAX_WAIT_S = 2.0
CALL_ERRORS = (flight.FlightError, pa.ArrowException, OSError, ValueError)
"""Errors of calls that receive no valid response."""

Certificate = tuple[bytes, bytes]
"""PEM certificate and private key."""


class TokenMiddleware(flight.ServerMiddlewareFactory):
    """Middleware that accepts only calls with the token."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    def start_call(
        self, info: flight.CallInfo, headers: dict[str, list[str | bytes]]
    ) -> flight.ServerMiddleware | None:
        """Raise an error if a call does not have the token."""
        sent = headers.get(TOKEN_HEADER, [""])[0]
        sent = sent.encode() if isinstance(sent, str) else sent
        if not hmac.compare_digest(sent, self._token):
            raise flight.FlightUnauthenticatedError("wrong token" if sent else "no token")
        return None


class FlightServer(flight.FlightServerBase):
    """Flight server that listens from construction on. `watch` limits the data that clients send.

    Args:
        bind: HOST:PORT. With port 0, the system selects a port (`port`).
        token: Token that calls must have. If None, no token is required.
        certificate: Certificate and private key. If None, connections are not encrypted.

    Raises:
        ConfigError: The address is not available, or the certificate cannot be used.
    """

    def __init__(
        self, bind: str, token: str | None = None, certificate: Certificate | None = None
    ) -> None:
        if not is_host_port(bind, lowest_port=0):
            raise ConfigError(f"--bind {escape_text(bind)}: is not a valid address; use HOST:PORT")
        try:
            super().__init__(
                f"{'grpc+tls' if certificate else 'grpc+tcp'}://{bind}",
                tls_certificates=[certificate] if certificate else None,
                middleware={"token": TokenMiddleware(token)} if token else {},
            )
        except CALL_ERRORS as error:
            raise ConfigError(
                f"cannot listen on {bind}: {error}; check for another process on this port"
            ) from error
        self.watch = ConnectionWatch(self.port)

    def respond(self, context: flight.ServerCallContext, body: bytes) -> Iterator[flight.Result]:
        """Yield the response to an action."""
        with self.watch.sending(context.peer(), len(body)):
            yield flight.Result(body)

    def shutdown(self) -> None:
        """Stop listening, and wait for current requests."""
        super().shutdown()
        self.watch.close()  # stops responses that are not read, until the shutdown is complete


def connect_client(address: str, certificate: bytes | None, max_bytes: int) -> flight.FlightClient:
    """Return a client of HOST:PORT, which connects at its first call.

    Args:
        address: HOST:PORT.
        certificate: PEM certificate of the signer of the server certificate. If None, the
            connection is not encrypted.
        max_bytes: Maximum size of a received message.

    Raises:
        ConnectionError: The server is on another host, and no certificate is set.
    """
    if certificate is None and not is_local(address):
        raise ConnectionError("on another host, which requires encryption")
    options = [
        ("grpc.max_receive_message_length", max_bytes),
        ("grpc.max_reconnect_backoff_ms", int(1000 * MAX_WAIT_S)),
    ]
    scheme = "grpc+tcp" if certificate is None else "grpc+tls"
    return flight.FlightClient(
        f"{scheme}://{address}", tls_root_certs=certificate, generic_options=options
    )


def read_single_response(results: Iterable[flight.Result], max_bytes: int) -> bytes:
    """Return the only response to an action. Raise ValueError for several or large responses."""
    bodies: list[bytes] = []
    for result in results:
        if bodies:
            raise ValueError("more than one response")
        if (size := result.body.size) > max_bytes:
            raise ValueError(f"a response of {size} bytes is above the limit of {max_bytes}")
        bodies.append(result.body.to_pybytes())
    if not bodies:
        raise ValueError("no response")
    return bodies[0]


def call_options(timeout_s: float) -> flight.FlightCallOptions:
    """Return the options of a call: its deadline, and the token of this process."""
    token = os.environ.get(TOKEN_VARIABLE)
    headers = [(TOKEN_HEADER.encode(), token.encode())] if token else []
    return flight.FlightCallOptions(timeout=timeout_s, headers=headers)


def describe_error(error: Exception) -> str:
    """Return a short description of the error of a call."""
    if isinstance(error, ValueError):
        return f"malformed response: {clean_message(error)}"
    name = type(error).__name__.removeprefix("Flight").removesuffix("Error")
    return f"{name}: {clean_message(error)}"


def clean_message(error: Exception) -> str:
    """Return the error message of the other process, printable and without library additions."""
    text = str(error).partition(". Detail:")[0].partition(". gRPC client debug context:")[0]
    return escape_text(text)


def stop_event() -> threading.Event:
    """Return an event that SIGTERM or SIGINT sets. The signals have no other effect."""
    stopped = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    return stopped


def read_certificate(key: str, path: str | None) -> bytes | None:
    """Return the content of the PEM file in a key of the recipe.

    Raises:
        ConfigError: The file cannot be read.
    """
    if path is None:
        return None
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"{key} = {path!r}: {error.strerror}") from error


def read_key_pair(certificate: str | None, key: str | None) -> Certificate | None:
    """Return the contents of --tls-certificate and --tls-key.

    Raises:
        ConfigError: One of them is missing, or cannot be read.
    """
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("--tls-certificate and --tls-key must be used together")
    try:
        return Path(certificate).read_bytes(), Path(key).read_bytes()
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error


def check_exposure(bind: str, encrypted: bool, token: str | None) -> None:
    """Require a token and an encrypted connection for addresses that other hosts can reach.

    Raises:
        ConfigError: One of them is missing.
    """
    if not is_local(bind) and not (encrypted and token):
        raise ConfigError(
            f"--bind {bind}: other hosts could read the data; set --tls-certificate, "
            f"--tls-key and a secret in {TOKEN_VARIABLE}, or bind to 127.0.0.1"
        )
