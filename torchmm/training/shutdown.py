"""End of a run: stop signals, the first error, and its record in STATUS.json.

The files of a run directory can become unwritable at any time (full disk, read-only file system).
The shutdown of a run writes some of these files. Such an error must not replace the original error
or change the exit code.

A scheduler sends SIGTERM (Slurm also SIGUSR1, a user SIGINT) to one rank or to all, at any time.
During training the handler only sets a flag. Ranks synchronize it at a step boundary, so that all
of them save the same step. The handler must not save, raise or communicate during training, because
it runs between any two bytecodes of one rank.

Before the first step no state has to be saved, and no step boundary may follow for hours if data
are measured. `StopSignal.interrupt_main_thread` raises `StopRequested` in the main thread during
this time.

torchrun exits with code 1 for all exit codes of its workers. `STATUS.json` in the run directory
therefore has the original exit code. Data workers must ignore SIGTERM themselves, because they do
not share the flag.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any, Literal, get_args

from torchmm.common.errors import (
    CheckpointError,
    ConfigError,
    PeerError,
    PreemptedError,
    TorchmmError,
)
from torchmm.common.files import (
    allocated_bytes,
    canonical_json,
    overwrite_in_place,
    replace_atomically,
)
from torchmm.training.checkpoint.directory import CheckpointDirectory, InUseError

State = Literal["running", "done", "preempted", "failed"]
STATUS_NAME = "STATUS.json"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


EXIT_GRACE_S = 8.0
"""Time that a rank has to exit after a stop signal before the first step. Launchers kill later."""

WAKE_S = 0.2
"""Time between signals to a main thread that has not run the handler yet."""


class StopRequested(BaseException):
    """A stop signal before the first step.

    It is not an `Exception`, so that code that handles errors does not handle it.
    """


class StopSignal:
    """The first stop signal of this process. Later signals have no effect.

    A context manager for the main thread. Its exit restores the previous handlers, unless the
    process received a signal: launchers often send two, and the second must not kill a process that
    is about to exit.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._interrupts = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self.received is None:
            for number, handler in self._previous.items():
                signal.signal(number, handler)
        elif self._interrupts:
            raise _preempted_before_training(self.received) from error

    @contextmanager
    def interrupt_main_thread(
        self, exit_process: Callable[[TorchmmError], object]
    ) -> Iterator[None]:
        """Raise `StopRequested` in the main thread when a stop signal arrives in this block.

        The exit of this `StopSignal` turns it into `PreemptedError`. If the process still exists
        `EXIT_GRACE_S` after the signal, another thread calls `exit_process`. Causes are a C
        extension that does not return to the interpreter, a lost peer, or threads that the exit
        waits for.

        Args:
            exit_process: Function that ends the process with the exit code of the given error.
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        watch = threading.Thread(target=self._watch, args=(reader, exit_process), daemon=True)
        watch.start()
        self._interrupts = True
        try:
            if self.received is None:
                yield
            if self.received is not None:  # before this block, or the exception was swallowed
                raise StopRequested
            self._interrupts = False
        finally:
            if self.received is None:
                signal.set_wakeup_fd(previous)
                os.close(writer)  # ends the thread

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
            if self._interrupts:
                raise StopRequested

    def _watch(self, reader: int, exit_process: Callable[[TorchmmError], object]) -> None:
        """Wait for the number of a stop signal, which C code writes even if no bytecode runs."""
        while (number := os.read(reader, 1)) and number[0] not in STOP_SIGNALS:
            pass
        if not number:
            os.close(reader)
            return
        # The kernel may deliver the signal to this thread, and the main thread stays in its system
        # call. The main thread runs the handler only after it receives a signal itself.
        deadline = time.monotonic() + EXIT_GRACE_S
        while self.received is None and time.monotonic() < deadline:
            signal.pthread_kill(threading.main_thread().ident or 0, number[0])
            time.sleep(WAKE_S)
        time.sleep(max(0.0, deadline - time.monotonic()))
        if self._interrupts:
            exit_process(_preempted_before_training(signal.Signals(number[0])))


def _preempted_before_training(number: signal.Signals) -> PreemptedError:
    return PreemptedError(
        f"stopped by {number.name} before the first step; no checkpoint is required"
    )


@dataclass(frozen=True)
class Status:
    """Status of a run."""

    state: State
    step: int
    """Last finished step."""
    rank: int
    """Rank that wrote the status. For a failure, the rank that failed."""
    exit_code: int | None = None
    """Exit code of the run. None while it is running."""
    message: str = ""


def write_status(run_dir: Path, status: Status) -> bool:
    """Replace STATUS.json atomically, unless it already has a more informative status.

    If one rank fails, the other ranks lose a peer and also call this function, in any order. The
    first failure is retained, and a lost peer never replaces another outcome. Among several reports
    of a lost peer, the report of rank 0 is retained, because it may identify the peer.

    Returns:
        Whether the status was written.

    Raises:
        OSError: The file cannot be written. An outdated file is then removed, if possible.
    """
    descriptor = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        present = read_status(run_dir)
        if present is None or not _is_more_informative(present, status):
            _write_record(run_dir / STATUS_NAME, {**asdict(status), "time": time.time()})
            return True
        return False
    finally:
        os.close(descriptor)


def _write_record(path: Path, record: dict[str, Any]) -> None:
    try:
        replace_atomically(path, canonical_json(record) + b"\n")
    except OSError:
        if not path.exists():
            raise
        # On a full disk a second file cannot be created, but the last block of this file has space.
        capacity = allocated_bytes(path)
        while len(data := canonical_json(record) + b"\n") > capacity and record["message"]:
            record["message"] = record["message"][: len(record["message"]) // 2]
        try:
            overwrite_in_place(path, data)
        except OSError:
            path.unlink()  # the status is outdated and may be truncated
            raise


def read_status(run_dir: Path) -> Status | None:
    """Return the status of a run directory, or None if it has no readable status.

    A file that is truncated by a crash or written by another version must not prevent the next
    start.
    """
    try:
        record = json.loads((run_dir / STATUS_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    known = {field.name: record[field.name] for field in fields(Status) if field.name in record}
    kinds = (known.get("state"), type(known.get("step")), type(known.get("rank")))
    if kinds[0] not in get_args(State) or kinds[1:] != (int, int):
        return None
    if not isinstance(known.get("message", ""), str):
        return None
    if not isinstance(known.get("exit_code"), int | None):
        return None
    return Status(**known)


def _is_more_informative(present: Status, new: Status) -> bool:
    lost_peer = PeerError.exit_code
    if present.state == "running":
        return False
    if new.state != "failed":
        return new.state == present.state == "preempted"
    if new.exit_code == lost_peer:
        return present.exit_code != lost_peer or new.rank != 0
    return present.state == "failed" and present.exit_code != lost_peer


logger = logging.getLogger("torchmm")
_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")
"""Error codes in messages of safetensors and tokenizers, whose exceptions are not OSError."""


@contextmanager
def startup_errors(run_dir: Path) -> Iterator[None]:
    """Raise ConfigError if the run directory is not writable. Use it before training starts."""
    try:
        yield
    except OSError as error:
        if not _is_in_directory(error, run_dir):
            raise
        raise ConfigError(
            f"output_dir = {str(run_dir.parent)!r}: cannot write {error.filename}: "
            f"{error.strerror}; use a writable directory with free space"
        ) from error


@contextmanager
def training_errors(run_dir: Path) -> Iterator[None]:
    """Raise CheckpointError if the run directory is no longer writable, as for a failed save."""
    try:
        yield
    except Exception as error:
        problem = _write_problem(error, run_dir)
        if problem is None:
            raise
        raise CheckpointError(
            f"cannot write {problem}. Earlier checkpoints are intact; free space, or make the "
            "directory writable, and start again"
        ) from error


@contextmanager
def closing_on_exit(close: Callable[[], None]) -> Iterator[None]:
    """Call `close` at the end. If another error came first, log the errors of `close`."""
    try:
        yield
    except BaseException:
        try:
            close()
        except Exception as error:  # the first error is raised below
            logger.error("another error while the failed run was shut down: %r", error)
        raise
    close()


def stop_message(step: int, *reasons: str) -> str:
    """Return the message of a run that a signal has stopped.

    Args:
        step: Last finished step.
        reasons: More sentences. Empty ones are skipped.
    """
    message = f"stopped after step {step}; a checkpoint of this step is saved"
    if not step:
        message = "stopped before the first step; no checkpoint is required"
    return ". ".join(filter(None, [message, *reasons]))


def write_failure(
    run_dir: Path, error: BaseException, step: int, rank: int, directory: CheckpointDirectory
) -> None:
    """Write STATUS.json of a run that stopped early, and mark the error if it is already reported.

    Nothing is written if another run uses the directory.
    """
    if isinstance(error, InUseError):
        error.reported = rank != 0  # all ranks have it from rank 0
        return
    if not directory.is_locked_by_this_run():
        return
    if isinstance(error, TorchmmError):
        state: Literal["preempted", "failed"] = "failed"
        if isinstance(error, PreemptedError):
            state = "preempted"
        status = Status(state, step, rank, error.exit_code, str(error))
        error.reported = not report_status(run_dir, status)
    else:
        report_status(
            run_dir, Status("failed", step, rank, 1, "".join(traceback.format_exception(error)))
        )


def _write_problem(error: Exception, run_dir: Path) -> str | None:
    """Return file and reason if the error is a file of the run directory that cannot be written."""
    if isinstance(error, OSError):
        if error.errno in _UNWRITABLE or _is_in_directory(error, run_dir):
            return f"{error.filename or f'a file of {run_dir}'}: {error.strerror}"
        return None
    match = _RUST_ERROR.search(str(error))
    return f"a file of {run_dir}: {error}" if match and int(match[1]) in _UNWRITABLE else None


def _is_in_directory(error: OSError, run_dir: Path) -> bool:
    name = error.filename
    return isinstance(name, str) and Path(name).absolute().is_relative_to(run_dir.absolute())


def report_status(run_dir: Path, status: Status) -> bool:
    """Call `write_status`. Return False if the same outcome has already been reported.

    If the file cannot be written, log the error and return True.
    """
    try:
        return write_status(run_dir, status)
    except OSError as error:
        logger.error("cannot write %s: %s", run_dir / STATUS_NAME, error)
        return True  # no other process has reported the outcome
