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
from torchmm.extensions.remote.producers.decode_queue import DecodeJob, DecodeQueue
from torchmm.extensions.remote.producers.registry import ProducerStatus
from torchmm.extensions.remote.producers.rpc import Certificate, FlightServer
from torchmm.extensions.remote.producers.step_plans import PlanService
from torchmm.extensions.remote.producers.wire_format import (
    BUSY,
    REJECTED,
    SCHEMA,
    TOO_LARGE,
    SampleRequest,
    TensorMessage,
    decode_request,
    encode_message,
)
from torchmm.recipe.data_section import DataConfig
from torchmm.recipe.training_section import TrainingConfig

REQUESTS_PER_WORKER = 4
"""Number of concurrent requests per worker."""
PREFETCHED_MICROBATCHES = 2
"""Number of microbatches of a request that are decoded ahead, in addition to those in workers."""
POLL_S = 0.1
"""Interval in seconds at which a blocked request checks the connection to the trainer."""
MAX_REQUEST_BYTES = 8 * 10**6


class Producer(FlightServer):
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
        validation_samples: Validation samples, if the producer plans steps.

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
        validation_samples: Samples | None = None,
    ) -> None:
        self._fingerprint = samples.fingerprint()
        self._samples = {self._fingerprint: samples}
        if validation_samples is not None:
            self._samples[validation_samples.fingerprint()] = validation_samples
        self._plans = PlanService(data, training, samples, validation_samples) if data else None
        self._training = training
        self._request_slots = threading.BoundedSemaphore(REQUESTS_PER_WORKER * max(workers, 1))
        self._closing = threading.Event()
        self._max_jobs = max(workers, 1) + PREFETCHED_MICROBATCHES
        self._workers = max(workers, 1)
        super().__init__(bind, token, certificate)
        self.work = DecodeQueue({name: s.decoder for name, s in self._samples.items()}, workers)

    def load(self, address: str) -> ProducerStatus:
        """Return the report for a registry.

        Args:
            address: HOST:PORT at which others connect.
        """
        return ProducerStatus(address, self._fingerprint, self._workers, self.work.unfinished)

    def do_get(
        self, context: flight.ServerCallContext, ticket: flight.Ticket
    ) -> flight.GeneratorStream:
        """Return a stream of the requested samples."""
        self.watch.accept(context.peer())
        # The generator does all the work and releases its resources, however the stream ends.
        return flight.GeneratorStream(SCHEMA, self._stream_response(context, ticket.ticket))

    def do_action(
        self, context: flight.ServerCallContext, action: flight.Action
    ) -> Iterator[flight.Result]:
        """Handle requests about steps (`torchmm.extensions.remote.producers.step_plans`)."""
        self.watch.accept(context.peer())
        if self._plans is None:  # another producer may plan
            raise flight.FlightServerError("its recipe does not set data.producers.plan = true")
        try:
            body = action.body.to_pybytes()
            _check_size(body)
            answer = self._plans.answer(action.type, body)
        except (ValueError, TorchmmError) as error:
            raise flight.FlightServerError(str(error), REJECTED) from error
        return self.respond(context, answer)

    def close(self) -> None:
        """Stop all requests and the decoding."""
        self._closing.set()
        self.work.close()
        self.shutdown()

    def _stream_response(
        self, context: flight.ServerCallContext, data: bytes
    ) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        try:
            request = self._read(data)
            microbatches = self._items(request)
        except (ValueError, TorchmmError) as error:
            raise flight.FlightServerError(str(error), REJECTED) from error
        if not self._request_slots.acquire(blocking=False):
            raise flight.FlightUnavailableError("its queue of requests is full", BUSY)
        jobs: deque[DecodeJob] = deque()
        samples = self._samples[request.fingerprint]
        decoded_images = samples.decoder.for_rank(request.reads).images_to_decode(microbatches)
        upcoming = zip(microbatches, decoded_images, strict=True)
        try:
            for number in range(len(microbatches)):
                while len(jobs) < self._max_jobs and (each := next(upcoming, None)) is not None:
                    jobs.append(self.work.request(request.fingerprint, *each))
                for message in self._wait(jobs[0], context):
                    message_data, size = _check_message_size(
                        request.most_bytes, encode_message(message, number)
                    )
                    with self.watch.sending(context.peer(), size):
                        yield message_data
                self.work.release(jobs.popleft())
        finally:
            for job in jobs:
                self.work.release(job)
            self._request_slots.release()

    def _wait(self, job: DecodeJob, context: flight.ServerCallContext) -> list[TensorMessage]:
        while not wait([job.future], POLL_S).done:
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
            raise flight.FlightServerError(text, b"" if isinstance(error, OSError) else REJECTED)
        return job.future.result()

    def _read(self, data: bytes) -> SampleRequest:
        """Return a request for available samples. Raise ValueError for other requests."""
        _check_size(data)
        request = decode_request(data)
        if request.fingerprint not in self._samples:
            raise ValueError(
                "it uses different data: sources, tokenizer, model or limits of its recipe "
                "differ from those of the run; start it with outputs/NAME/recipe.toml of the "
                "run"
            )
        packs = sum(map(len, request.samples))
        if packs > (limit := self._training.global_batch_size):
            raise ValueError(f"{packs} sequences, but training.global_batch_size = {limit}")
        return request

    def _items(self, request: SampleRequest) -> list[list[PackItems]]:
        """Return the samples with their sizes in the local index. May raise ValueError."""
        samples = self._samples[request.fingerprint]
        return [[self._pack(samples, pack) for pack in packs] for packs in request.samples]

    def _pack(self, samples: Samples, names: list[tuple[int, int, int]]) -> PackItems:
        sources = samples.sources
        encoders = samples.decoder.encoders
        pack_items: PackItems = []
        for feed, epoch, index in names:
            lengths = sources[feed].index if feed < len(sources) else None
            if lengths is None or not lengths.is_usable(index):
                raise ValueError(f"source {feed} has no sample {index}")
            pack_items.append(Item(feed, epoch, lengths.meta(sources[feed].name, index, encoders)))
        tokens = sum(item.meta.tokens for item in pack_items)
        if tokens > (limit := self._training.sequence_length):
            text = f"a sequence of {tokens} tokens, but training.sequence_length = {limit}"
            raise ValueError(text)
        return pack_items


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
    validation_samples = None
    if data.producers.plan and data.validation:
        validation_samples = open_samples(data, training, validation=True, **specs)
    return Producer(
        open_samples(data, training, **specs),
        training,
        bind,
        workers=workers,
        token=token,
        certificate=certificate,
        data=data if data.producers.plan else None,
        validation_samples=validation_samples,
    )


def _check_size(data: bytes) -> None:
    if len(data) > MAX_REQUEST_BYTES:
        raise ValueError(
            f"a request of {len(data)} bytes is above the limit of {MAX_REQUEST_BYTES}"
        )


def _check_message_size(
    most_bytes: int, message_data: tuple[pa.RecordBatch, bytes]
) -> tuple[tuple[pa.RecordBatch, bytes], int]:
    """Return a message and its size. Raise FlightServerError if it is too large."""
    batch, values = message_data
    if (size := batch.nbytes + len(values)) > most_bytes:
        raise flight.FlightServerError(f"{size} bytes", TOO_LARGE)
    return message_data, size
