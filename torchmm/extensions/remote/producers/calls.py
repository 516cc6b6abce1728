"""How processes that prepare samples, and those that ask them, call each other.

Everything goes over Arrow Flight. To another machine nothing goes unencrypted, the token least of
all, whoever has said that there is a producer.
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
from torchmm.data.corrupt import printable
from torchmm.extensions.remote.producers.connections import ConnectionWatch
from torchmm.recipe.data_section import is_host_port, is_local

TOKEN_VARIABLE = "TORCHMM_DATA_TOKEN"
TOKEN_HEADER = "torchmm-token"
LONGEST_WAIT_S = 2.0
IN_VAIN = (flight.FlightError, pa.ArrowException, OSError, ValueError)
"""What comes in the place of an answer."""

Certificate = tuple[bytes, bytes]
"""PEM certificate and private key."""


class TokenCheck(flight.ServerMiddlewareFactory):
    """Lets those in who know a secret."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    def start_call(
        self, info: flight.CallInfo, headers: dict[str, list[str | bytes]]
    ) -> flight.ServerMiddleware | None:
        """Raises an error if a call does not carry the secret."""
        sent = headers.get(TOKEN_HEADER, [""])[0]
        sent = sent.encode() if isinstance(sent, str) else sent
        if not hmac.compare_digest(sent, self._token):
            raise flight.FlightUnauthenticatedError("wrong token" if sent else "no token")
        return None


class Server(flight.FlightServerBase):
    """Listens from when it is made; `watch` limits what clients send.

    Args:
        bind: HOST:PORT; port 0: the system chooses one (`port`).
        token: secret that calls must carry; None: none.
        certificate: None: nothing is encrypted.

    Raises:
        ConfigError: the address is not available, or the certificate cannot be used.
    """

    def __init__(
        self, bind: str, token: str | None = None, certificate: Certificate | None = None
    ) -> None:
        if not is_host_port(bind, lowest_port=0):
            raise ConfigError(f"--bind {printable(bind)}: is not a valid address; use HOST:PORT")
        try:
            super().__init__(
                f"{'grpc+tls' if certificate else 'grpc+tcp'}://{bind}",
                tls_certificates=[certificate] if certificate else None,
                middleware={"token": TokenCheck(token)} if token else {},
            )
        except IN_VAIN as error:
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
        self.watch.close()  # until then it ends responses that are not read


def connect(address: str, certificate: bytes | None, most_bytes: int) -> flight.FlightClient:
    """A client of HOST:PORT, which connects when it calls.

    Args:
        certificate: PEM, of who signed the other side's; None: nothing is encrypted.
        most_bytes: of a message from there.

    Raises:
        ConnectionError: that is another machine, and there is no certificate.
    """
    if certificate is None and not is_local(address):
        raise ConnectionError("on another host, which requires encryption")
    options = [
        ("grpc.max_receive_message_length", most_bytes),
        ("grpc.max_reconnect_backoff_ms", int(1000 * LONGEST_WAIT_S)),
    ]
    scheme = "grpc+tcp" if certificate is None else "grpc+tls"
    return flight.FlightClient(
        f"{scheme}://{address}", tls_root_certs=certificate, generic_options=options
    )


def single_response(results: Iterable[flight.Result], most_bytes: int) -> bytes:
    """Return the only response to an action; raise ValueError if there are more, or it is large."""
    found: list[bytes] = []
    for result in results:
        if found:
            raise ValueError("more than one response")
        if (size := result.body.size) > most_bytes:
            raise ValueError(f"a response of {size} bytes is above the limit of {most_bytes}")
        found.append(result.body.to_pybytes())
    if not found:
        raise ValueError("no response")
    return found[0]


def within(timeout_s: float) -> flight.FlightCallOptions:
    """Of a call: its deadline, and this process's token."""
    token = os.environ.get(TOKEN_VARIABLE)
    headers = [(TOKEN_HEADER.encode(), token.encode())] if token else []
    return flight.FlightCallOptions(timeout=timeout_s, headers=headers)


def describe(error: Exception) -> str:
    """What happened to a call, in a few words."""
    if isinstance(error, ValueError):
        return f"malformed response: {said(error)}"
    return f"{type(error).__name__.removeprefix('Flight').removesuffix('Error')}: {said(error)}"


def said(error: Exception) -> str:
    """Return the message of the other side, printable and without additions of libraries."""
    text = str(error).partition(". Detail:")[0].partition(". gRPC client debug context:")[0]
    return printable(text)


def ended_by_signals() -> threading.Event:
    """Set by SIGTERM or SIGINT, which do nothing else from now on."""
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    return ended


def read_certificate(key: str, path: str | None) -> bytes | None:
    """The PEM file that a recipe's key names.

    Raises:
        ConfigError: it cannot be read.
    """
    if path is None:
        return None
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"{key} = {path!r}: {error.strerror}") from error


def key_pair(certificate: str | None, key: str | None) -> Certificate | None:
    """The contents of --tls-certificate and --tls-key.

    Raises:
        ConfigError: one of them is missing, or cannot be read.
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
    """Other machines may only ask with a token, over an encrypted connection.

    Raises:
        ConfigError: they could without.
    """
    if not is_local(bind) and not (encrypted and token):
        raise ConfigError(
            f"--bind {bind}: other hosts could read the data; set --tls-certificate, "
            f"--tls-key and a secret in {TOKEN_VARIABLE}, or bind to 127.0.0.1"
        )
