"""Trainer side of disaggregated preprocessing: data workers request steps from producers.

`RemoteDecoder` replaces `StepDecoder` in the data workers, which then only wait for responses. The
number of steps in flight is therefore the prefetch depth (back-pressure). If a producer fails,
hangs or is busy, the next producer is asked. No sample is lost, because a request is self-contained
(DistTrain section 4.2).

A producer with a wrong response is logged and not used again until the end of the run.

`load_balancing.py` selects the order of producers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from pyarrow import flight
from torch.utils.data import Dataset, get_worker_info

from torchmm.common.errors import DataError
from torchmm.common.sequence_slices import DecodeAssignment
from torchmm.data.decode import DecodedStep, StepDecoder, add_noise
from torchmm.data.items import PackItems
from torchmm.extensions.remote.producers.load_balancing import ProducerSelector
from torchmm.extensions.remote.producers.response_validation import unpack_step
from torchmm.extensions.remote.producers.rpc import (
    CALL_ERRORS,
    MAX_WAIT_S,
    TOKEN_VARIABLE,
    call_options,
    clean_message,
    connect_client,
    describe_error,
    read_certificate,
)
from torchmm.extensions.remote.producers.wire_format import (
    BUSY,
    REJECTED,
    TOO_LARGE,
    SampleRequest,
    TensorMessage,
    decode_message,
    encode_request,
    sample_keys,
)
from torchmm.recipe.data_section import ProducersConfig

FRAMING_BYTES = 10**6
"""Upper bound on the bytes that gRPC and Arrow add to a message."""

T = TypeVar("T")
ProducerCall = Callable[[flight.FlightClient, flight.FlightCallOptions], T]
"""A call of a producer, which raises an error in `CALL_ERRORS`."""


class DifferentDataError(OSError):
    """Error of a producer that has different data. Another producer may have the requested data."""


class ProducerClient:
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
        self._selector = ProducerSelector(config, fingerprint, self._certificate)
        self._clients: dict[str, flight.FlightClient] = {}
        self.max_bytes = int(config.max_message_mb * 1e6)
        """Maximum size of a message in bytes."""

    def call(self, first: int, call: ProducerCall[T]) -> T:
        """Return the first correct response.

        Args:
            first: Step number that selects the first producer (`ProducerSelector.order_producers`).
            call: Call to a producer.

        Raises:
            DataError: No producer has responded for `retry_timeout_s`, a producer rejects the
                request, or all of `data.producers.addresses` have different data or sent a wrong
                response.
        """
        errors_by_address: dict[str, str] = {}
        different_data: set[str] = set()
        deadline = time.monotonic() + self._config.retry_timeout_s
        wait_s = 0.05
        while True:
            for address in self._selector.order_producers(first):
                try:
                    left_s = max(0.1, deadline - time.monotonic())
                    options = call_options(min(self._config.timeout_s, left_s))
                    return call(self._client(address), options)
                except CALL_ERRORS as error:
                    errors_by_address[address] = describe_error(error)
                    if isinstance(error, ValueError):
                        self._selector.exclude(address, describe_error(error))
                    elif _extra_info(error) != BUSY:
                        self._selector.mark_failed(address)
                    is_rejected = isinstance(error, flight.FlightUnauthenticatedError)
                    if is_rejected or _extra_info(error) in (
                        REJECTED,
                        TOO_LARGE,
                    ):  # by every producer
                        raise DataError(self._explain(address, error)) from error
                    if isinstance(error, DifferentDataError):
                        different_data.add(address)
                if time.monotonic() > deadline:
                    break
            unusable = different_data | set(self._selector.excluded)
            is_permanent = self._config.registry is None and unusable >= set(self._config.addresses)
            if is_permanent or time.monotonic() > deadline:
                raise DataError(
                    self._describe_no_response(
                        self._selector.excluded | errors_by_address, is_permanent
                    )
                )
            time.sleep(min(wait_s, max(0.0, deadline - time.monotonic())))  # all were asked
            wait_s = min(2 * wait_s, MAX_WAIT_S)

    def _client(self, address: str) -> flight.FlightClient:
        if address not in self._clients:
            max_bytes = self.max_bytes + FRAMING_BYTES
            self._clients[address] = connect_client(address, self._certificate, max_bytes)
        return self._clients[address]

    def _explain(self, address: str, error: Exception) -> str:
        if _extra_info(error) == TOO_LARGE:
            return (
                f"producer {address}: the data of a microbatch is too large for one message "
                f"({clean_message(error)}); raise data.producers.max_message_mb = "
                f"{self._config.max_message_mb:g}, or lower training.microbatch_size"
            )
        if isinstance(error, flight.FlightUnauthenticatedError):
            return (
                f"producer {address} rejects the token of this run: {clean_message(error)}. Set "
                f"{TOKEN_VARIABLE} to the same secret on both hosts"
            )
        return f"producer {address}: {clean_message(error)}"

    def _describe_no_response(self, errors_by_address: dict[str, str], is_permanent: bool) -> str:
        messages = [f"{address}: {why}" for address, why in errors_by_address.items()]
        answers = "; ".join([*messages, *filter(None, [self._selector.registry_error])])
        limit = f"within data.producers.retry_timeout_s = {self._config.retry_timeout_s:g} s "
        return (
            f"no producer has responded {'' if is_permanent else limit}({answers}). Start "
            "producers with python -m torchmm.data.serve --config RECIPE --bind HOST:PORT, "
            f"or correct data.producers.{'registry' if self._config.registry else 'addresses'}"
        )


class RemoteDecoder(Dataset[DecodedStep]):
    """Dataset that requests the microbatches of one rank. Picklable before its first use.

    Args:
        producer_client: Client for producers with the same data.
        fingerprint: Fingerprint of the data and the preprocessing settings.
        rank: Data-parallel rank of this process. Ranks start with different producers.
        reads: Images that this rank decodes. If None, it decodes all images.
        decoder: Decoder of this run, which validates responses and adds noise.
    """

    def __init__(
        self,
        producer_client: ProducerClient,
        fingerprint: str,
        rank: int,
        reads: DecodeAssignment | None,
        decoder: StepDecoder,
    ) -> None:
        self._producer_client = producer_client
        self._fingerprint = fingerprint
        self._rank = rank
        self._reads = reads
        self._decoder = decoder.without_sources(reads)
        self._num_requests = 0

    def __getitem__(self, microbatches: list[list[PackItems]]) -> DecodedStep:
        """Return the prepared step, or a step with a `failure` and no microbatches."""
        names = sample_keys(microbatches)
        max_bytes = self._producer_client.max_bytes
        # Ranks and steps start with different producers. Workers are assigned in round-robin order.
        worker = get_worker_info()
        self._num_requests += 1
        turn = (
            self._num_requests
            if worker is None
            else self._num_requests * worker.num_workers + worker.id
        )
        request = encode_request(SampleRequest(self._fingerprint, names, self._reads, max_bytes))
        try:
            step = self._producer_client.call(
                self._rank + turn, partial(self._get, request, microbatches)
            )
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
            return unpack_step(_read_messages(stream), microbatches, self._decoder)
        finally:
            stream.cancel()  # no effect on a complete stream


def _read_messages(stream: flight.FlightStreamReader) -> Iterator[TensorMessage]:
    while True:
        try:
            chunk = stream.read_chunk()
        except StopIteration:
            return
        yield decode_message(chunk)


def _extra_info(error: Exception) -> bytes:
    return getattr(error, "extra_info", b"")
