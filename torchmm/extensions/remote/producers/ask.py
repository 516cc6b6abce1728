"""Trainer side of disaggregated preprocessing: data workers request steps from producers.

`RemoteDecoder` replaces `StepDecoder` in the data workers, which then only wait for responses. The
number of steps in flight is therefore the prefetch depth (back-pressure). If a producer fails,
hangs or is busy, the next producer is asked. No sample is lost, because a request is self-contained
(DistTrain section 4.2).

A producer with a wrong response is logged and not used again until the end of the run.

`choosing.py` selects the order of producers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from pyarrow import flight
from torch.utils.data import Dataset, get_worker_info

from torchmm.common.errors import DataError
from torchmm.common.row_slices import Reads
from torchmm.data.decode import DecodedStep, StepDecoder, add_noise
from torchmm.data.items import PackItems
from torchmm.extensions.remote.producers.answers import unpack_step
from torchmm.extensions.remote.producers.calls import (
    IN_VAIN,
    LONGEST_WAIT_S,
    TOKEN_VARIABLE,
    connect,
    describe,
    read_certificate,
    said,
    within,
)
from torchmm.extensions.remote.producers.choosing import Choice
from torchmm.extensions.remote.producers.messages import (
    BUSY,
    REFUSED,
    TOO_LARGE,
    Message,
    Request,
    from_arrow,
    names_of,
    pack_request,
)
from torchmm.recipe.data_section import ProducersConfig

FRAMING_BYTES = 10**6
"""Upper bound on the bytes that gRPC and Arrow add to a message."""

T = TypeVar("T")
Question = Callable[[flight.FlightClient, flight.FlightCallOptions], T]
"""A call of a producer, which raises an error in `IN_VAIN`."""


class OtherDataError(OSError):
    """Error of a producer that has different data. Another producer may have the requested data."""


class Asking:
    """Client that calls producers in order until one responds. Picklable before its first use.

    Args:
        config: Section [data.producers] of the recipe.
        fingerprint: Fingerprint of the data that producers must have, or None for any data.

    Raises:
        ConfigError: The certificate cannot be read.
    """

    def __init__(self, config: ProducersConfig, fingerprint: str | None) -> None:
        self._config = config
        self._certificate = read_certificate("data.producers.ca_certificate", config.ca_certificate)
        self._choice = Choice(config, fingerprint, self._certificate)
        self._clients: dict[str, flight.FlightClient] = {}
        self.most_bytes = int(config.max_message_mb * 1e6)
        """Maximum size of a message in bytes."""

    def ask(self, first: int, question: Question[T]) -> T:
        """Return the first correct response.

        Args:
            first: Turn of the first producer (`Choice.in_turn`).
            question: Call to a producer.

        Raises:
            DataError: No producer has responded for `retry_timeout_s`, a producer rejects the
                request, or all of `data.producers.addresses` have different data or sent a wrong
                response.
        """
        tried: dict[str, str] = {}
        others: set[str] = set()
        give_up = time.monotonic() + self._config.retry_timeout_s
        wait_s = 0.05
        while True:
            for address in self._choice.in_turn(first):
                try:
                    left_s = max(0.1, give_up - time.monotonic())
                    options = within(min(self._config.timeout_s, left_s))
                    return question(self._client(address), options)
                except IN_VAIN as error:
                    tried[address] = describe(error)
                    if isinstance(error, ValueError):
                        self._choice.leave_out(address, describe(error))
                    elif _info(error) != BUSY:
                        self._choice.failed(address)
                    refused = isinstance(error, flight.FlightUnauthenticatedError)
                    if refused or _info(error) in (REFUSED, TOO_LARGE):  # by every producer
                        raise DataError(self._explain(address, error)) from error
                    if isinstance(error, OtherDataError):
                        others.add(address)
                if time.monotonic() > give_up:
                    break
            useless = others | set(self._choice.left_out)
            hopeless = self._config.registry is None and useless >= set(self._config.addresses)
            if hopeless or time.monotonic() > give_up:
                raise DataError(self._nobody(self._choice.left_out | tried, hopeless))
            time.sleep(min(wait_s, max(0.0, give_up - time.monotonic())))  # all were asked
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _client(self, address: str) -> flight.FlightClient:
        if address not in self._clients:
            most_bytes = self.most_bytes + FRAMING_BYTES
            self._clients[address] = connect(address, self._certificate, most_bytes)
        return self._clients[address]

    def _explain(self, address: str, error: Exception) -> str:
        if _info(error) == TOO_LARGE:
            return (
                f"producer {address}: the data of a microbatch is too large for one message "
                f"({said(error)}); raise data.producers.max_message_mb = "
                f"{self._config.max_message_mb:g}, or lower training.microbatch_size"
            )
        if isinstance(error, flight.FlightUnauthenticatedError):
            return (
                f"producer {address} rejects the token of this run: {said(error)}. Set "
                f"{TOKEN_VARIABLE} to the same secret on both hosts"
            )
        return f"producer {address}: {said(error)}"

    def _nobody(self, tried: dict[str, str], hopeless: bool) -> str:
        told = [f"{address}: {why}" for address, why in tried.items()]
        answers = "; ".join([*told, *filter(None, [self._choice.status_warning])])
        limit = f"within data.producers.retry_timeout_s = {self._config.retry_timeout_s:g} s "
        return (
            f"no producer has responded {'' if hopeless else limit}({answers}). Start "
            "producers with python -m torchmm.data.serve --config RECIPE --bind HOST:PORT, "
            f"or correct data.producers.{'registry' if self._config.registry else 'addresses'}"
        )


class RemoteDecoder(Dataset[DecodedStep]):
    """Dataset that requests the microbatches of one rank. Picklable before its first use.

    Args:
        asking: Client for producers with the same data.
        fingerprint: Fingerprint of the data and the preprocessing settings.
        rank: Data-parallel rank of this process. Ranks start with different producers.
        reads: Images that this rank decodes. If None, it decodes all images.
        decoder: Decoder of this run, which validates responses and adds noise.
    """

    def __init__(
        self,
        asking: Asking,
        fingerprint: str,
        rank: int,
        reads: Reads | None,
        decoder: StepDecoder,
    ) -> None:
        self._asking = asking
        self._fingerprint = fingerprint
        self._rank = rank
        self._reads = reads
        self._decoder = decoder.without_sources(reads)
        self._asked = 0

    def __getitem__(self, microbatches: list[list[PackItems]]) -> DecodedStep:
        """Return the prepared step, or a step with a `failure` and no microbatches."""
        names = names_of(microbatches)
        most_bytes = self._asking.most_bytes
        # Ranks and steps start with different producers. Workers are assigned in round-robin order.
        worker = get_worker_info()
        self._asked += 1
        turn = self._asked if worker is None else self._asked * worker.num_workers + worker.id
        request = pack_request(Request(self._fingerprint, names, self._reads, most_bytes))
        try:
            step = self._asking.ask(self._rank + turn, partial(self._get, request, microbatches))
        except DataError as error:  # a traceback of the worker would hide the message
            return DecodedStep([], {}, str(error))
        return add_noise(self._decoder.target_preprocessor, step, microbatches)

    def _get(
        self,
        request: bytes,
        microbatches: list[list[PackItems]],
        client: flight.FlightClient,
        options: flight.FlightCallOptions,
    ) -> DecodedStep:
        stream = client.do_get(flight.Ticket(request), options)
        try:
            return unpack_step(_messages(stream), microbatches, self._decoder)
        finally:
            stream.cancel()  # no effect on a complete stream


def _messages(stream: flight.FlightStreamReader) -> Iterator[Message]:
    while True:
        try:
            chunk = stream.read_chunk()
        except StopIteration:
            return
        yield from_arrow(chunk)


def _info(error: Exception) -> bytes:
    return getattr(error, "extra_info", b"")
