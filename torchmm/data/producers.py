"""The trainer's side of disaggregated preprocessing: producers are asked for steps.

`RemoteDecoder` takes the place of `StepDecoder` in the data workers, which then only wait, so that
exactly as many steps are in flight as they would prepare ahead (back-pressure). If a producer
fails, hangs or is busy, the next one is asked; no sample is lost, because a request is
self-contained. DistTrain §4.2.

gRPC was chosen for its deadlines, TLS, message limits and reconnection.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import grpc
from torch.utils.data import Dataset

from torchmm.common.errors import ConfigError
from torchmm.common.row_slices import Reads
from torchmm.data.decode import DecodedStep, StepDecoder, with_noise
from torchmm.data.items import PackItems
from torchmm.data.wire import Request, pack_request, unpack_step
from torchmm.recipe.data_section import ProducersConfig

METHOD = "/torchmm.Producer/Prepare"
TOKEN_VARIABLE = "TORCHMM_DATA_TOKEN"
TOKEN_KEY = "torchmm-token"
LONGEST_WAIT_S = 2.0
TOO_LARGE = "larger than max"
"""What gRPC says of a message above the limit."""

Code = grpc.StatusCode
PERMANENT = (
    Code.UNAUTHENTICATED, Code.FAILED_PRECONDITION, Code.INVALID_ARGUMENT, Code.UNIMPLEMENTED,
)  # fmt: skip
"""What another try does not fix."""


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
        self._first = rank
        self._reads = reads
        self._drawings = decoder.drawings
        self._byte_values = decoder.byte_values
        self._certificate = _read(config.ca_certificate)
        self._channels: dict[str, grpc.Channel] = {}

    def __getitem__(self, microbatches: list[list[PackItems]]) -> DecodedStep:
        """The prepared step, or one with a `failure` and no microbatches."""
        request = pack_request(Request(self._fingerprint, microbatches, self._reads))
        tried: dict[str, str] = {}
        give_up = time.monotonic() + self._config.give_up_s
        wait_s = 0.05
        addresses = self._config.addresses
        for number in itertools.count(self._first):
            address = addresses[number % len(addresses)]
            try:
                answer = self._ask(address, request, give_up)
            except grpc.RpcError as error:
                code, details = error.code(), str(error.details())
                tried[address] = f"{code.name}: {details}"
                if code in PERMANENT or TOO_LARGE in details:
                    return DecodedStep([], {}, self._explain(address, code, details))
            else:
                self._first = number + 1
                length = self._sequence_length
                step = unpack_step(answer, microbatches, length, self._byte_values)
                return with_noise(self._drawings, step, microbatches)
            if time.monotonic() > give_up:
                break
            if (number + 1 - self._first) % len(addresses) == 0:  # all were asked
                time.sleep(min(wait_s, max(0.0, give_up - time.monotonic())))
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        answers = "; ".join(f"{address}: {why}" for address, why in tried.items())
        return DecodedStep(
            [],
            {},
            f"no producer prepared a step within data.producers.give_up_s = "
            f"{self._config.give_up_s:g} s ({answers}). Start them with python -m "
            "torchmm.data.serve --config RECIPE --bind HOST:PORT, or correct "
            "data.producers.addresses",
        )

    def _ask(self, address: str, request: bytes, give_up: float) -> bytes:
        if address not in self._channels:
            self._channels[address] = self._connect(address)
        token = os.environ.get(TOKEN_VARIABLE)
        left_s = max(0.1, give_up - time.monotonic())
        call = self._channels[address].unary_unary(METHOD)
        return call(
            request,
            timeout=min(self._config.timeout_s, left_s),
            metadata=((TOKEN_KEY, token),) if token else (),
        )

    def _connect(self, address: str) -> grpc.Channel:
        limit = int(self._config.max_message_mb * 1e6)
        options = [
            ("grpc.max_receive_message_length", limit),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_reconnect_backoff_ms", int(1000 * LONGEST_WAIT_S)),
        ]
        if self._certificate is None:
            return grpc.insecure_channel(address, options)
        credentials = grpc.ssl_channel_credentials(self._certificate)
        return grpc.secure_channel(address, credentials, options)

    def _explain(self, address: str, code: grpc.StatusCode, details: str) -> str:
        if TOO_LARGE in details:
            return (
                f"producer {address}: a step is too large to be sent ({details}); raise "
                f"data.producers.max_message_mb = {self._config.max_message_mb:g} and the "
                "producer's --max-request-mb, or lower training.global_batch_size"
            )
        if code == Code.UNAUTHENTICATED:
            return (
                f"producer {address} refuses this run's token: {details}. Set {TOKEN_VARIABLE} "
                "to the same secret on both sides"
            )
        return f"producer {address}: {details}"


def _read(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"data.producers.ca_certificate = {path!r}: {error.strerror}") from error
