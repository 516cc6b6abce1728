"""One process of a machine that reads streams for all its ranks.

A stream has no places to return to: whoever plans has to read it. If every rank did, a machine of
eight would read all of it eight times, for eighths of its samples. Instead one process beside the
ranks opens the sources and plans (`torchmm.data.steps.elsewhere`); each rank gets the packs that
are its own, with their records, and its workers decode them as ever. Machines do not share a
reader, so nothing crosses the network that did not before.

The ranks of a machine trust each other: they are the same user's, and the socket lies in a
directory that only this user can enter. So samples go as DataLoader's workers get them, pickled.
The reader needs no care: it ends with the rank that has started it, and without it the run ends
(exit code 3), to be resumed from its checkpoint.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, NamedTuple

import datasets
from PIL import Image

from torchmm.common.errors import DataError, TorchmmError
from torchmm.common.processes import describe_state, fork_server, make_worker_setup
from torchmm.data.sources.open import Samples, open_samples
from torchmm.data.steps.elsewhere import Asked, SharedSteps, StepPart, UnknownStateError
from torchmm.recipe.data_section import DataConfig
from torchmm.recipe.training_section import TrainingConfig

SLACK_STEPS = 8
"""Kept beyond those that ranks prefetch; ranks train in step, and differ by less."""
HELD_OUT_STEPS = 256
"""Kept while a run is validated, when ranks may differ by more."""

logger = logging.getLogger(__name__)


class ReaderAddress(NamedTuple):
    """Where a machine's reader is asked: a socket, a secret, and its process."""

    path: str
    secret: str
    pid: int


class StreamsDescribed(NamedTuple):
    """What the reader has opened: names of sources, and digest as of `Samples`."""

    names: list[str]
    digest: tuple[str, str]


class SharedReader:
    """The process, from when it is made until it is closed, or this process ends.

    Args:
        data, training: sources and limits; batch sizes.
        specs: what else samples are opened with (`open_samples`).
        secret: that all who ask have to know.

    Raises:
        DataError: it has died at once.
    """

    def __init__(
        self, data: DataConfig, training: TrainingConfig, specs: Mapping[str, Any], secret: str
    ) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="torchmm-reader-"))
        path = str(self._directory / "socket")
        context = fork_server()
        listens, theirs = context.Pipe(duplex=False)
        # Its life is that of a pipe's end, as data workers' are; it may have workers of its own.
        self._process = context.Process(
            target=_read_for_all,
            args=(path, secret, make_worker_setup(), theirs, data, training, dict(specs)),
            name="reader",
        )
        self._process.start()
        theirs.close()
        try:
            listens.recv()
        except EOFError as error:
            self.close()
            raise DataError("the process that was to read streams has died at its start") from error
        self.address = ReaderAddress(path, secret, int(self._process.pid or 0))

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.join()
        shutil.rmtree(self._directory, ignore_errors=True)


class ReaderClient:
    """Asks a machine's reader; may be used by several threads, which take turns.

    Args:
        address: the reader's.
        held_out: ask for held-out samples.
        timeout_s: how long an answer may take.
    """

    def __init__(self, address: ReaderAddress, held_out: bool, timeout_s: float) -> None:
        self._address = address
        self._held_out = held_out
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def describe(self) -> StreamsDescribed:
        """What it has; opens the sources, if nobody has asked before.

        Raises:
            ConfigError, DataError: as of `open_samples`.
        """
        found: StreamsDescribed = self._ask("describe")
        return found

    def part(self, asked: Asked) -> StepPart | None:
        """Of a step; see `SharedSteps.part`."""
        found: StepPart | None = self._ask("part", asked)
        return found

    def pictures(self, feed: int, index: int) -> list[Image.Image]:
        """Images of a sample, to be shown; none of a stream."""
        found: list[Image.Image] = self._ask("pictures", feed, index)
        return found

    def references(self, feed: int, index: int) -> tuple[str, ...]:
        """Texts of a sample, to be compared with; none of a stream."""
        found: tuple[str, ...] = self._ask("references", feed, index)
        return found

    def _ask(self, *question: Any) -> Any:
        with self._lock:
            try:
                if self._connection is None:
                    path, secret = self._address.path, self._address.secret.encode()
                    self._connection = Client(path, "AF_UNIX", authkey=secret)
                self._connection.send((self._held_out, *question))
                if not self._connection.poll(self._timeout_s):
                    self._connection.close()  # or its late answer would be the next question's
                    raise TimeoutError
                answer = self._connection.recv()
            except (OSError, EOFError, AuthenticationError) as error:
                self._connection = None
                raise DataError(self._complaint(error)) from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _complaint(self, error: Exception) -> str:
        pid = self._address.pid
        who = "the process that reads streams for this machine (process"
        if isinstance(error, TimeoutError):
            return (
                f"{who} {pid}{describe_state(pid)}) has not answered for data.timeout_s = "
                f"{self._timeout_s:g} s. Look for a file system that does not answer, or a process "
                "that was stopped"
            )
        return (
            f"{who} {pid}) is gone ({type(error).__name__}: {error}). If memory ran out, lower "
            "data.workers or data.prefetch"
        )


class _Reader:
    """What the process does; may be used by several threads."""

    def __init__(
        self, data: DataConfig, training: TrainingConfig, specs: Mapping[str, Any]
    ) -> None:
        self._data = data
        self._training = training
        self._specs = specs
        self._lock = threading.Lock()
        self._opened: dict[bool, tuple[Samples, SharedSteps]] = {}

    def answer(self, held_out: bool, kind: str, *values: Any) -> Any:
        """What is sent back."""
        samples, steps = self._open(held_out)
        if kind == "describe":
            return StreamsDescribed(list(samples.feeds()), samples.digest())
        if kind == "part":
            return steps.part(*values)
        return samples.pictures(*values) if kind == "pictures" else samples.references(*values)

    def _open(self, held_out: bool) -> tuple[Samples, SharedSteps]:
        with self._lock:
            if held_out not in self._opened:
                data, training = self._data, self._training
                samples = open_samples(data, training, validation=held_out, **self._specs)
                prefetched = data.workers * data.prefetch
                kept = HELD_OUT_STEPS if held_out else prefetched + SLACK_STEPS
                # One sequence, as two would read the same stream in turns.
                steps = samples.shared(data, training, kept=kept, sequences=1)
                self._opened[held_out] = samples, steps
            return self._opened[held_out]


def _read_for_all(
    path: str,
    secret: str,
    setup: Callable[[int], None],
    listens: Connection,
    data: DataConfig,
    training: TrainingConfig,
    specs: Mapping[str, Any],
) -> None:
    setup(0)
    datasets.disable_progress_bars()
    reader = _Reader(data, training, specs)
    with Listener(path, "AF_UNIX", backlog=1024, authkey=secret.encode()) as listener:
        listens.send(True)
        while True:
            try:
                connection = listener.accept()
            except (OSError, EOFError, AuthenticationError) as error:
                logger.warning("a call that failed: %s: %s", type(error).__name__, error)
                continue
            thread = threading.Thread(target=_answer, args=(reader, connection), daemon=True)
            thread.start()


def _answer(reader: _Reader, connection: Connection) -> None:
    while True:
        try:
            held_out, *question = connection.recv()
            answer: Any
            try:
                answer = reader.answer(held_out, *question)
            except (TorchmmError, UnknownStateError) as error:
                answer = error
            connection.send(answer)
        except (OSError, EOFError):  # this rank has ended
            return
