"""Producer side of disaggregated preprocessing: streams of tensors over Arrow Flight.

A producer is stateless: any number of producers may run, be killed and be restarted. It rejects
requests that exceed its queue, and the trainer asks another producer (back-pressure). It decodes a
few microbatches of a request ahead, and stops when the trainer disconnects (DistTrain section 4.2).

Flight provides streams without copies, deadlines, cancellation and TLS. gRPC with custom messages
would require copying tensors into and out of messages.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pyarrow as pa
from pyarrow import flight

from torchmm.common.errors import TorchmmError
from torchmm.data.items import Item, PackItems
from torchmm.data.sources.open import Samples, open_samples
from torchmm.extensions.remote.producers.calls import Certificate, Server
from torchmm.extensions.remote.producers.messages import (
    BUSY,
    REFUSED,
    SCHEMA,
    TOO_LARGE,
    Message,
    Request,
    to_arrow,
    unpack_request,
)
from torchmm.extensions.remote.producers.planning import Plans
from torchmm.extensions.remote.producers.registry import Reported
from torchmm.extensions.remote.producers.work import Job, Work
from torchmm.recipe.data_section import DataConfig
from torchmm.recipe.training_section import TrainingConfig

QUEUED_PER_WORKER = 4
"""Number of concurrent requests per worker."""
AHEAD = 2
"""Number of microbatches of a request that are decoded ahead, in addition to those in workers."""
LOOK_S = 0.1
"""Interval in seconds at which a blocked request checks the connection to the trainer."""
MOST_REQUEST_BYTES = 8 * 10**6


class Producer(Server):
    """Server that prepares samples, from construction on.

    Args:
        samples: Samples of the recipe, opened in this process.
        training: Section [training] of the recipe.
        bind: HOST:PORT to listen on. With port 0, the system selects a port (`port`).
        workers: Number of decoding processes. With 0, a thread of this process decodes.
        token: Token that requests must have. If None, no token is required.
        certificate: PEM certificate and private key. If None, connections are not encrypted.
        data: Section [data] of the recipe if the producer plans steps for trainers without data. If
            None, trainers plan.
        held_out: Validation samples, if the producer plans steps.

    Raises:
        ConfigError: The address is not available, or the certificate cannot be used.
    """

    def __init__(
        self,
        samples: Samples,
        training: TrainingConfig,
        bind: str,
        *,
        workers: int,
        token: str | None = None,
        certificate: Certificate | None = None,
        data: DataConfig | None = None,
        held_out: Samples | None = None,
    ) -> None:
        self._fingerprint = samples.fingerprint()
        self._samples = {self._fingerprint: samples}
        if held_out is not None:
            self._samples[held_out.fingerprint()] = held_out
        self._plans = Plans(data, training, samples, held_out) if data else None
        self._training = training
        self._room = threading.BoundedSemaphore(QUEUED_PER_WORKER * max(workers, 1))
        self._closing = threading.Event()
        self._ahead = max(workers, 1) + AHEAD
        self._workers = max(workers, 1)
        super().__init__(bind, token, certificate)
        self.work = Work({name: s.decoder for name, s in self._samples.items()}, workers)

    def load(self, address: str) -> Reported:
        """Return the report for a registry.

        Args:
            address: HOST:PORT at which others connect.
        """
        return Reported(address, self._fingerprint, self._workers, self.work.unfinished)

    def do_get(
        self, context: flight.ServerCallContext, ticket: flight.Ticket
    ) -> flight.GeneratorStream:
        """Return a stream of the requested samples."""
        self.watch.accept(context.peer())
        # The generator does all the work and releases its resources, however the stream ends.
        return flight.GeneratorStream(SCHEMA, self._answer(context, ticket.ticket))

    def do_action(
        self, context: flight.ServerCallContext, action: flight.Action
    ) -> Iterator[flight.Result]:
        """Handle requests about steps (`torchmm.extensions.remote.producers.planning`)."""
        self.watch.accept(context.peer())
        if self._plans is None:  # another producer may plan
            raise flight.FlightServerError("its recipe does not set data.producers.plan = true")
        try:
            body = action.body.to_pybytes()
            _check_size(body)
            answer = self._plans.answer(action.type, body)
        except (ValueError, TorchmmError) as error:
            raise flight.FlightServerError(str(error), REFUSED) from error
        return self.respond(context, answer)

    def close(self) -> None:
        """Stop all requests and the decoding."""
        self._closing.set()
        self.work.close()
        self.shutdown()

    def _answer(
        self, context: flight.ServerCallContext, data: bytes
    ) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        try:
            asked = self._read(data)
            microbatches = self._items(asked)
        except (ValueError, TorchmmError) as error:
            raise flight.FlightServerError(str(error), REFUSED) from error
        if not self._room.acquire(blocking=False):
            raise flight.FlightUnavailableError("its queue of requests is full", BUSY)
        jobs: deque[Job] = deque()
        samples = self._samples[asked.fingerprint]
        wanted = samples.decoder.for_rank(asked.reads).images_to_decode(microbatches)
        upcoming = zip(microbatches, wanted, strict=True)
        try:
            for number in range(len(microbatches)):
                while len(jobs) < self._ahead and (each := next(upcoming, None)) is not None:
                    jobs.append(self.work.take(asked.fingerprint, *each))
                for message in self._wait(jobs[0], context):
                    sent, size = _within(asked.most_bytes, to_arrow(message, number))
                    with self.watch.sending(context.peer(), size):
                        yield sent
                self.work.leave(jobs.popleft())
        finally:
            for job in jobs:
                self.work.leave(job)
            self._room.release()

    def _wait(self, job: Job, context: flight.ServerCallContext) -> list[Message]:
        while not wait([job.future], LOOK_S).done:
            if self._closing.is_set():
                raise flight.FlightUnavailableError("it is shutting down")
            if context.is_cancelled():
                raise flight.FlightCancelledError("the training run has disconnected")
        if job.future.cancelled() or isinstance(job.future.exception(), BrokenProcessPool):
            raise flight.FlightUnavailableError(
                "its worker exited unexpectedly; a new worker is starting"
            )
        if (error := job.future.exception()) is not None:
            text = f"{type(error).__name__}: {error}"
            raise flight.FlightServerError(text, b"" if isinstance(error, OSError) else REFUSED)
        return job.future.result()

    def _read(self, data: bytes) -> Request:
        """Return a request for available samples. Raise ValueError for other requests."""
        _check_size(data)
        asked = unpack_request(data)
        if asked.fingerprint not in self._samples:
            raise ValueError(
                "it uses different data: sources, tokenizer, model or limits of its recipe "
                "differ from those of the run; start it with outputs/NAME/recipe.toml of the "
                "run"
            )
        packs = sum(map(len, asked.samples))
        if packs > (most := self._training.global_batch_size):
            raise ValueError(f"{packs} sequences, but training.global_batch_size = {most}")
        return asked

    def _items(self, asked: Request) -> list[list[PackItems]]:
        """Return the samples with their sizes in the local index. May raise ValueError."""
        samples = self._samples[asked.fingerprint]
        return [[self._pack(samples, pack) for pack in packs] for packs in asked.samples]

    def _pack(self, samples: Samples, names: list[tuple[int, int, int]]) -> PackItems:
        sources = samples.sources
        encoders = samples.decoder.encoders
        found: PackItems = []
        for feed, epoch, index in names:
            lengths = sources[feed].index if feed < len(sources) else None
            if lengths is None or not lengths.has(index):
                raise ValueError(f"source {feed} has no sample {index}")
            found.append(Item(feed, epoch, lengths.meta(sources[feed].name, index, encoders)))
        tokens = sum(item.meta.tokens for item in found)
        if tokens > (most := self._training.sequence_length):
            text = f"a sequence of {tokens} tokens, but training.sequence_length = {most}"
            raise ValueError(text)
        return found


def open_producer(
    data: DataConfig,
    training: TrainingConfig,
    specs: Mapping[str, Any],
    bind: str,
    *,
    workers: int,
    token: str | None,
    certificate: Certificate | None,
) -> Producer:
    """Open the sources of a recipe, and start to listen.

    Args:
        data: Section [data] of the recipe.
        training: Section [training] of the recipe.
        specs: Further arguments of `open_samples`.
        bind, workers, token, certificate: See `Producer`.

    Raises:
        ConfigError, DataError: The sources or the address cannot be opened.
    """
    held_out = None
    if data.producers.plan and data.validation:
        held_out = open_samples(data, training, validation=True, **specs)
    return Producer(
        open_samples(data, training, **specs),
        training,
        bind,
        workers=workers,
        token=token,
        certificate=certificate,
        data=data if data.producers.plan else None,
        held_out=held_out,
    )


def _check_size(data: bytes) -> None:
    if len(data) > MOST_REQUEST_BYTES:
        raise ValueError(
            f"a request of {len(data)} bytes is above the limit of {MOST_REQUEST_BYTES}"
        )


def _within(
    most_bytes: int, sent: tuple[pa.RecordBatch, bytes]
) -> tuple[tuple[pa.RecordBatch, bytes], int]:
    """Return a message and its size. Raise FlightServerError if it is too large."""
    batch, values = sent
    if (size := batch.nbytes + len(values)) > most_bytes:
        raise flight.FlightServerError(f"{size} bytes", TOO_LARGE)
    return sent, size
