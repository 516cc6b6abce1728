"""The trainer's side of disaggregated preprocessing: producers are asked for steps.

`RemoteDecoder` takes the place of `StepDecoder` in the data workers, which then only wait, so that
exactly as many steps are in flight as they would prepare ahead (back-pressure). If a producer
fails, hangs or is busy, the next one is asked; no sample is lost, because a request is
self-contained. DistTrain §4.2.

A producer whose response is wrong is logged and not asked again until the run ends.

Which is asked first: `choosing.py`.
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
from torchmm.data.decode import DecodedStep, StepDecoder, with_noise
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
"""More than what gRPC and Arrow add to a message."""

T = TypeVar("T")
Question = Callable[[flight.FlightClient, flight.FlightCallOptions], T]
"""A call of a producer; raises an error in `IN_VAIN`."""


class OtherDataError(OSError):
    """A producer that answers, but not for this run; another one may."""


class Asking:
    """Asks one producer after another until one answers; picklable until it is used.

    Args:
        config: who they are.
        fingerprint: of the data that they are to have; None: any.

    Raises:
        ConfigError: the certificate cannot be read.
    """

    def __init__(self, config: ProducersConfig, fingerprint: str | None) -> None:
        self._config = config
        self._certificate = read_certificate("data.producers.ca_certificate", config.ca_certificate)
        self._choice = Choice(config, fingerprint, self._certificate)
        self._clients: dict[str, flight.FlightClient] = {}
        self.most_bytes = int(config.max_message_mb * 1e6)
        """Of a message."""

    def ask(self, first: int, question: Question[T]) -> T:
        """Return the first correct response.

        Args:
            first: Turn of the first producer (`Choice.in_turn`).

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
        answers = "; ".join([*told, *filter(None, [self._choice.complaint])])
        limit = f"within data.producers.retry_timeout_s = {self._config.retry_timeout_s:g} s "
        return (
            f"no producer has responded {'' if hopeless else limit}({answers}). Start "
            "producers with python -m torchmm.data.serve --config RECIPE --bind HOST:PORT, "
            f"or correct data.producers.{'registry' if self._config.registry else 'addresses'}"
        )


class RemoteDecoder(Dataset[DecodedStep]):
    """Asks producers for the microbatches of one rank; picklable until it is used.

    Args:
        asking: asks those with the same data.
        fingerprint: of the data and how they are prepared.
        rank: this data-parallel rank; ranks begin with different producers.
        reads: which images this rank decodes; None: all.
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
        """The prepared step, or one with a `failure` and no microbatches."""
        names = names_of(microbatches)
        most_bytes = self._asking.most_bytes
        # Ranks begin with different producers, and so do the steps of a rank. Workers take turns.
        worker = get_worker_info()
        self._asked += 1
        turn = self._asked if worker is None else self._asked * worker.num_workers + worker.id
        request = pack_request(Request(self._fingerprint, names, self._reads, most_bytes))
        try:
            step = self._asking.ask(self._rank + turn, partial(self._get, request, microbatches))
        except DataError as error:  # a traceback of the worker would hide what it says
            return DecodedStep([], {}, str(error))
        return with_noise(self._decoder.drawings, step, microbatches)

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
            stream.cancel()  # it has ended, unless something is wrong


def _messages(stream: flight.FlightStreamReader) -> Iterator[Message]:
    while True:
        try:
            chunk = stream.read_chunk()
        except StopIteration:
            return
        yield from_arrow(chunk)


def _info(error: Exception) -> bytes:
    return getattr(error, "extra_info", b"")
