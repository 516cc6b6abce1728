"""Process that reads streams for all ranks of a node.

Planning the steps of a stream requires reading it. If each of eight ranks planned, the node would
read the stream eight times. Instead one process opens the sources and plans
(`torchmm.data.steps.remote_steps`). Each rank receives its sequences with their records, and its
workers decode them. Nodes do not share a reader, so it adds no network traffic.

Ranks and reader communicate with pickled messages over a Unix socket. Only the user of the run can
open its directory. The reader exits with the rank that started it. If it exits earlier, the run
exits with code 3 and can be resumed.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
from collections.abc import Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Literal, NamedTuple

import datasets

from torchmm.common.errors import DataError, TorchmmError
from torchmm.common.processes import describe_state
from torchmm.common.step_process import END_OF_STEPS, RequestStatus, serve, start_process
from torchmm.data.sources.open import Samples, open_samples
from torchmm.data.steps.remote_steps import StepPart, StepPlanServer, StepRequest, UnknownStateError
from torchmm.recipe.data_section import DataConfig
from torchmm.recipe.training_section import TrainingConfig

SLACK_STEPS = 8
"""Steps that the reader stores in addition to prefetched steps, for ranks that are behind."""
VALIDATION_STEPS = 256
"""Steps that the reader stores during validation, when ranks may be further behind."""

logger = logging.getLogger(__name__)


class ReaderAddress(NamedTuple):
    """Address of the reader of a node: path of the socket, secret and process id."""

    path: str
    secret: str
    pid: int


class StreamsInfo(NamedTuple):
    """Names of the sources that the reader opened, and their digest (see `Samples`)."""

    names: list[str]
    digest: tuple[str, str]


class SharedReader:
    """Handle of the reader process, which exits when this process exits.

    Args:
        data: Sources and limits.
        training: Batch sizes.
        specs: Further arguments of `open_samples`.
        secret: Authentication key of the clients.

    Raises:
        DataError: The process exited during its start.
    """

    def __init__(
        self, data: DataConfig, training: TrainingConfig, specs: Mapping[str, Any], secret: str
    ) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="torchmm-reader-"))
        path = str(self._directory / "socket")
        # Sources may start child processes, which a daemon must not.
        self._process, connection = start_process(
            _listen, path, secret, data, training, dict(specs), name="reader", daemon=False
        )
        try:
            connection.recv()
        except EOFError as error:
            self.close()
            raise DataError("the reader process of the streams exited during its start") from error
        self.address = ReaderAddress(path, secret, int(self._process.pid or 0))

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.join()
        shutil.rmtree(self._directory, ignore_errors=True)


class ReaderClient:
    """Client that requests steps from the reader of a node. It is thread-safe.

    Args:
        address: Address of the reader.
        validation: Whether to request validation samples.
        timeout_s: Maximum waiting time for a response, in seconds.
    """

    def __init__(self, address: ReaderAddress, validation: bool, timeout_s: float) -> None:
        self._address = address
        self._validation = validation
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def describe(self) -> StreamsInfo:
        """Return the sources of the reader, which opens them at the first request.

        Raises:
            ConfigError: See `open_samples`.
            DataError: See `open_samples`.
        """
        described: StreamsInfo = self._send_request(None)
        return described

    def part(self, step_request: StepRequest) -> StepPart | None:
        """Return a part of a step, see `StepPlanServer.part`."""
        response = self._send_request(step_request)
        return response if isinstance(response, StepPart) else None

    def _send_request(self, step_request: StepRequest | None) -> Any:
        with self._lock:
            try:
                if self._connection is None:
                    secret = self._address.secret.encode()
                    self._connection = Client(self._address.path, "AF_UNIX", authkey=secret)
                self._connection.send((0, (self._validation, step_request)))
                if not self._connection.poll(self._timeout_s):
                    self._connection.close()  # A late response must not answer the next request.
                    raise TimeoutError
                _, response, _ = self._connection.recv()
            except (OSError, EOFError, AuthenticationError) as error:
                self._connection = None
                raise DataError(self._describe_failure(error)) from error
        if isinstance(response, Exception):
            raise response
        return response

    def _describe_failure(self, error: Exception) -> str:
        pid = self._address.pid
        who = "the reader process of the streams on this node (process"
        if isinstance(error, TimeoutError):
            return (
                f"{who} {pid}{describe_state(pid)}) has not responded for data.timeout_s = "
                f"{self._timeout_s:g} s. Check for a file system that does not respond, or a "
                "stopped process"
            )
        return (
            f"{who} {pid}) exited unexpectedly ({type(error).__name__}: {error}). If memory "
            "ran out, lower data.workers or data.prefetch"
        )


class _RequestHandler:
    """Request handler of the process, see `serve`. It is thread-safe."""

    def __init__(
        self, data: DataConfig, training: TrainingConfig, specs: Mapping[str, Any]
    ) -> None:
        self._data, self._training, self._specs = data, training, specs
        self._lock = threading.Lock()
        self._opened: dict[bool, tuple[Samples, StepPlanServer]] = {}

    def __call__(
        self, request: tuple[bool, StepRequest | None], progress: RequestStatus
    ) -> StreamsInfo | StepPart | Literal["end"] | Exception:
        """Return a part of a step, or a description of the sources if no part is requested."""
        validation, step_request = request
        try:
            samples, steps = self._open(validation)
            if step_request is None:
                return StreamsInfo(list(samples.feeds()), samples.digest())
            return steps.part(step_request) or END_OF_STEPS
        except (TorchmmError, UnknownStateError) as error:
            return error

    def _open(self, validation: bool) -> tuple[Samples, StepPlanServer]:
        with self._lock:
            if validation not in self._opened:
                data, training = self._data, self._training
                samples = open_samples(data, training, validation=validation, **self._specs)
                prefetched = data.workers * data.prefetch
                max_steps = VALIDATION_STEPS if validation else prefetched + SLACK_STEPS
                # Two sequences would alternate on the same stream.
                steps = samples.make_plan_server(
                    data, training, max_steps=max_steps, max_iterators=1
                )
                self._opened[validation] = samples, steps
            return self._opened[validation]


def _listen(
    ready: Connection,
    path: str,
    secret: str,
    data: DataConfig,
    training: TrainingConfig,
    specs: Mapping[str, Any],
) -> None:
    """Serve each connection in a thread."""
    reader = _RequestHandler(data, training, specs)
    datasets.disable_progress_bars()
    with Listener(path, "AF_UNIX", backlog=1024, authkey=secret.encode()) as listener:
        ready.send(True)
        while True:
            try:
                connection = listener.accept()
            except (OSError, EOFError, AuthenticationError) as error:
                logger.warning("call failed: %s: %s", type(error).__name__, error)
                continue
            threading.Thread(target=serve, args=(connection, reader), daemon=True).start()
