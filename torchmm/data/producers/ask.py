"""The trainer's side of disaggregated preprocessing: producers are asked for steps.

`RemoteDecoder` takes the place of `StepDecoder` in the data workers, which then only wait, so that
exactly as many steps are in flight as they would prepare ahead (back-pressure). If a producer
fails, hangs, is busy or answers something else, the next one is asked; no sample is lost, because a
request is self-contained. DistTrain §4.2.

Steps go to producers in turn. Ranks that work on the same samples ask the same producer for the
same step, which decodes what several of them read once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyarrow import flight
from torch.utils.data import Dataset, get_worker_info

from torchmm.common.errors import ConfigError
from torchmm.common.row_slices import Reads
from torchmm.data.decode import DecodedStep, StepDecoder, with_noise
from torchmm.data.items import PackItems
from torchmm.data.producers.messages import (
    REFUSED,
    TOKEN_HEADER,
    TOKEN_VARIABLE,
    TOO_LARGE,
    Message,
    Request,
    from_arrow,
    names_of,
    pack_request,
    unpack_step,
)
from torchmm.recipe.data_section import ProducersConfig, is_local

LONGEST_WAIT_S = 2.0
FRAMING_BYTES = 10**6
"""More than what gRPC and Arrow add to a message."""
IN_VAIN = (flight.FlightError, pa.ArrowException, OSError, ValueError)
"""What comes in the place of a step."""


class RemoteDecoder(Dataset[DecodedStep]):
    """Asks producers for the microbatches of one rank; picklable until it is used.

    Args:
        config: who they are.
        fingerprint: of the data and how they are prepared.
        sequence_length: tokens of a pack.
        rank: this data-parallel rank; ranks begin with different producers.
        reads: which images this rank decodes; None: all.
        decoder: of this run, which knows what producers do not send.

    Raises:
        ConfigError: the certificate cannot be read.
    """

    def __init__(
        self,
        config: ProducersConfig,
        fingerprint: str,
        sequence_length: int,
        rank: int,
        reads: Reads | None,
        decoder: StepDecoder,
    ) -> None:
        self._config = config
        self._fingerprint = fingerprint
        self._sequence_length = sequence_length
        self._rank = rank
        self._reads = reads
        self._drawings = decoder.drawings
        self._byte_values = decoder.byte_values
        self._certificate = _read(config.ca_certificate)
        self._clients: dict[str, flight.FlightClient] = {}
        self._asked = 0
        self._most_bytes = int(config.max_message_mb * 1e6)

    def __getitem__(self, microbatches: list[list[PackItems]]) -> DecodedStep:
        """The prepared step, or one with a `failure` and no microbatches."""
        names = names_of(microbatches)
        request = pack_request(Request(self._fingerprint, names, self._reads, self._most_bytes))
        tried: dict[str, str] = {}
        give_up = time.monotonic() + self._config.give_up_s
        wait_s = 0.05
        first = self._next_turn()
        while True:
            for address in _beginning_with(self._config.addresses, first):
                try:
                    step = self._ask(address, request, give_up, microbatches)
                except IN_VAIN as error:
                    tried[address] = _describe(error)
                    if _is_final(error):
                        return DecodedStep([], {}, self._explain(address, error))
                else:
                    return with_noise(self._drawings, step, microbatches)
                if time.monotonic() > give_up:
                    return DecodedStep([], {}, self._nobody(tried))
            time.sleep(min(wait_s, max(0.0, give_up - time.monotonic())))  # all were asked
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _next_turn(self) -> int:
        """Number of the step, from the start of this run, beginning elsewhere on every rank."""
        worker = get_worker_info()
        self._asked += 1
        if worker is None:
            return self._rank + self._asked
        return self._rank + self._asked * worker.num_workers + worker.id  # they take turns

    def _ask(
        self,
        address: str,
        request: bytes,
        give_up: float,
        microbatches: list[list[PackItems]],
    ) -> DecodedStep:
        if self._certificate is None and not is_local(address):
            raise ConnectionError("on another machine, to which nothing goes unencrypted")
        if address not in self._clients:
            self._clients[address] = self._connect(address)
        token = os.environ.get(TOKEN_VARIABLE)
        left_s = max(0.1, give_up - time.monotonic())
        options = flight.FlightCallOptions(
            timeout=min(self._config.timeout_s, left_s),
            headers=[(TOKEN_HEADER.encode(), token.encode())] if token else [],
        )
        stream = self._clients[address].do_get(flight.Ticket(request), options)
        try:
            return unpack_step(
                _messages(stream), microbatches, self._sequence_length, self._byte_values
            )
        finally:
            stream.cancel()  # it has ended, unless something is wrong

    def _connect(self, address: str) -> flight.FlightClient:
        options = [
            ("grpc.max_receive_message_length", self._most_bytes + FRAMING_BYTES),
            ("grpc.max_reconnect_backoff_ms", int(1000 * LONGEST_WAIT_S)),
        ]
        scheme = "grpc+tcp" if self._certificate is None else "grpc+tls"
        return flight.FlightClient(
            f"{scheme}://{address}", tls_root_certs=self._certificate, generic_options=options
        )

    def _explain(self, address: str, error: Exception) -> str:
        if _info(error) == TOO_LARGE:
            return (
                f"producer {address}: what a module reads of a microbatch is too large to be sent "
                f"({_said(error)}); raise data.producers.max_message_mb = "
                f"{self._config.max_message_mb:g}, or lower training.microbatch_size"
            )
        if isinstance(error, flight.FlightUnauthenticatedError):
            return (
                f"producer {address} refuses this run's token: {_said(error)}. Set "
                f"{TOKEN_VARIABLE} to the same secret on both sides"
            )
        return f"producer {address}: {_said(error)}"

    def _nobody(self, tried: dict[str, str]) -> str:
        answers = "; ".join(f"{address}: {why}" for address, why in tried.items())
        return (
            "no producer prepared a step within data.producers.give_up_s = "
            f"{self._config.give_up_s:g} s ({answers}). Start them with python -m "
            "torchmm.data.serve --config RECIPE --bind HOST:PORT, or correct "
            "data.producers.addresses"
        )


def _messages(stream: flight.FlightStreamReader) -> Iterator[Message]:
    while True:
        try:
            chunk = stream.read_chunk()
        except StopIteration:
            return
        yield from_arrow(chunk)


def _beginning_with(addresses: list[str], number: int) -> list[str]:
    first = number % len(addresses)
    return [*addresses[first:], *addresses[:first]]


def _is_final(error: Exception) -> bool:
    """Whether another try, or another producer, does not help."""
    unknown = isinstance(error, flight.FlightUnauthenticatedError)
    return unknown or _info(error) in (REFUSED, TOO_LARGE)


def _info(error: Exception) -> bytes:
    return getattr(error, "extra_info", b"")


def _describe(error: Exception) -> str:
    """What happened to a request."""
    if isinstance(error, ValueError):
        return f"malformed answer: {_said(error)}"
    return f"{type(error).__name__.removeprefix('Flight').removesuffix('Error')}: {_said(error)}"


def _said(error: Exception) -> str:
    """What a producer said, without what its libraries add."""
    return str(error).partition(". Detail:")[0].partition(". gRPC client debug context:")[0]


def _read(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"data.producers.ca_certificate = {path!r}: {error.strerror}") from error
