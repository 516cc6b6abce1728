"""The producer's side: answers requests with streams of tensors, over Arrow Flight.

A producer keeps no state: any number of them may run, be killed and be started
again. It refuses more requests than it can work on, and the trainer asks another one
(back-pressure). Of a request it decodes a few microbatches ahead of what was sent, and stops when
the trainer has gone. DistTrain §4.2.

Flight was chosen for its streams without copies, deadlines, cancellation and TLS. Rejected: gRPC
with messages of our own, into and out of which tensors have to be copied.
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
"""Requests answered at a time, for each worker."""
AHEAD = 2
"""Microbatches of a request that are decoded, beyond those in workers, before they are sent."""
LOOK_S = 0.1
"""How often a request that waits looks whether the trainer is still there."""
MOST_REQUEST_BYTES = 8 * 10**6


class Producer(Server):
    """Answers requests from when it is made.

    Args:
        samples: of the recipe, opened here.
        training: their packs and batches.
        bind: HOST:PORT to listen on; port 0: the system chooses one (`port`).
        workers: processes that decode; 0: a thread of this one.
        token: secret that requests must carry; None: none.
        certificate: PEM certificate and private key; None: nothing is encrypted.
        data: of the recipe, where it plans steps for trainers that have no data; None: they plan.
        held_out: what they are validated on, in this case.

    Raises:
        ConfigError: the address is not available, or the certificate cannot be used.
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
        """What it tells a registry.

        Args:
            address: HOST:PORT where others find it.
        """
        return Reported(address, self._fingerprint, self._workers, self.work.unfinished)

    def do_get(
        self, context: flight.ServerCallContext, ticket: flight.Ticket
    ) -> flight.GeneratorStream:
        """The samples that a request names."""
        self.watch.accept(context.peer())
        # All is done in the generator: what it holds is given back however the stream ends.
        return flight.GeneratorStream(SCHEMA, self._answer(context, ticket.ticket))

    def do_action(
        self, context: flight.ServerCallContext, action: flight.Action
    ) -> Iterator[flight.Result]:
        """Questions about steps (`torchmm.extensions.remote.producers.planning`)."""
        self.watch.accept(context.peer())
        if self._plans is None:  # another one may
            raise flight.FlightServerError("its recipe does not set data.producers.plan = true")
        try:
            body = action.body.to_pybytes()
            _check_size(body)
            answer = self._plans.answer(action.type, body)
        except (ValueError, TorchmmError) as error:
            raise flight.FlightServerError(str(error), REFUSED) from error
        return self.respond(context, answer)

    def close(self) -> None:
        """Ends requests and work."""
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
        """A request for samples that are here; raises ValueError."""
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
        """The samples, with the sizes that they have here; raises ValueError."""
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
    """Opens a recipe's sources, and begins to listen.

    Args:
        specs: what else samples are opened with (`open_samples`).

    Raises:
        ConfigError, DataError: that failed.
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
    """Return a message and its size; raise FlightServerError if it is too large."""
    batch, values = sent
    if (size := batch.nbytes + len(values)) > most_bytes:
        raise flight.FlightServerError(f"{size} bytes", TOO_LARGE)
    return sent, size
