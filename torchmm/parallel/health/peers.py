"""Detection of lost, hanging and diverging ranks, with their rank numbers.

A collective that times out does not show which rank is missing. Two mechanisms find it:

- A separate gloo group, on which `monitored_barrier` lists missing ranks. The barrier runs every
  few steps, and again after a failed collective.
- A heartbeat file per rank in the run directory, with its step and phase.

On CUDA, lost peers raise no errors, so the heartbeat thread stops the rank (`watchdog`).
Heartbeats need no network service, because checkpoints need a shared run directory anyway.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from torchmm.common.errors import NonFiniteError, PeerError
from torchmm.common.files import canonical_json, replace_atomically
from torchmm.common.log import POLL_S, ProgressReport
from torchmm.parallel.health.watchdog import FINISHED, PeerWatchdog
from torchmm.parallel.torch_compat import new_long_timeout_group

T = TypeVar("T")
SIDE_GROUP_TIMEOUT_S = 1800.0
"""Maximum time that a rank waits for the slowest writer of a checkpoint."""
LONG_PHASES = ("checkpoint", "export")
"""Phases with this timeout. Ranks that are lost in these phases are detected late."""
_PEER_FAILURE = re.compile(
    r"gloo/transport|connection (closed|reset) by peer|timed out waiting|timeout caused"
    r"|monitoredBarrier",
    re.IGNORECASE,
)
_LAST_BARRIER_S = 5.0
"""Timeout of the barrier after a failed collective. All remaining ranks fail within this time."""
WAITING_FOR_DATA = "waiting for data"
WAITING_FOR_DEVICE = "waiting for the device"
_MISSING_RANKS = re.compile(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier")


class SideGroup:
    """Separate gloo group of all ranks. Also usable without torch.distributed.

    Messages are pickled by torch. They come from ranks of this run, never from files.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank()
        self.size = 1 if group is None else dist.get_world_size()

    @classmethod
    def create(cls, timeout_s: float = SIDE_GROUP_TIMEOUT_S) -> SideGroup:
        """Create the group. Collective over all ranks."""
        if not dist.is_initialized():
            return cls(None)
        return cls(new_long_timeout_group(timedelta(seconds=timeout_s)))

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks. Collective."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def run_on_rank_zero(self, function: Callable[[], T]) -> T:
        """Return the result of `function` on rank 0. Its exception is raised on all ranks."""
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = function()
            except Exception as error:  # raised below, on all ranks
                outcome[1] = error
        if self.group is not None:
            dist.broadcast_object_list(outcome, src=0, group=self.group)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]


class HealthMonitor:
    """Heartbeats, barriers and error conversion of one rank.

    Args:
        directory: Directory of the heartbeats, shared by all ranks.
        timeout_s: Timeout of a barrier, in seconds.
        barrier_interval: Steps between barriers.
        heartbeat_s: Time between heartbeats, in seconds.
        on_lost: Stops the process if a peer is lost and no error is raised. The heartbeat thread
            calls it. None disables the watchdog.
        raises: Whether lost peers raise errors in time, as with gloo. `on_lost` is then called only
            in `LONG_PHASES` phases.
    """

    def __init__(
        self,
        directory: Path,
        timeout_s: float,
        barrier_interval: int = 100,
        heartbeat_s: float = 2.0,
        on_lost: Callable[[PeerError], None] | None = None,
        *,
        raises: bool = False,
    ) -> None:
        if not dist.is_initialized() or dist.get_rank() == 0:
            PeerWatchdog.clear_report(directory)
        self._group = SideGroup.create(timeout_s)
        self._directory = directory
        self._on_lost = on_lost
        self._raises = raises
        self._watch = PeerWatchdog(
            directory, self._group.rank, self._group.size, timeout_s, self._file
        )
        self._timeout_s = timeout_s
        self._barrier_interval = barrier_interval
        self._heartbeat_s = heartbeat_s
        self._step = 0
        self._phase = "start"
        self._phase_began = time.monotonic()
        self._work = ProgressReport("start")
        self._lost_peer = False
        self._stop = threading.Event()
        directory.mkdir(parents=True, exist_ok=True)
        self._write_heartbeat()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    @contextmanager
    def phase(self, step: int, phase: str) -> Iterator[None]:
        """Set the step and phase of this rank. Failed communication inside raises a PeerError."""
        self._step = step
        self._enter(phase)
        try:
            yield
        except PeerError as error:  # from a background save, which cannot determine the rank
            raise self._peer_error(error) from error
        except RuntimeError as error:
            if not is_peer_failure(error):
                raise
            raise self._peer_error(error) from error

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Set the phase to waiting for data, inside of another phase.

        Heartbeats show the phase, so peers can see that this rank does not wait for a peer.
        """
        outer = self._phase
        self._enter(WAITING_FOR_DATA)
        try:
            yield
        finally:
            self._enter(outer)

    @contextmanager
    def waiting_for_device(self) -> Iterator[None]:
        """Set the phase to waiting for the device, inside of another phase."""
        outer = self._phase
        self._enter(WAITING_FOR_DEVICE)
        try:
            yield
        finally:
            self._enter(outer)

    def check(self, step: int) -> None:
        """Run a barrier in every `barrier_interval`-th step. All ranks must call it in every step.

        Raises:
            PeerError: A rank did not join in time. Rank 0 reports its number.
        """
        if step % self._barrier_interval == 0:
            with self.phase(step, "health check"):
                self._barrier(self._timeout_s)

    def finish(self) -> None:
        """Stop watching peers and being watched, because this rank has no more collectives."""
        self._enter(FINISHED)
        with suppress(OSError):  # on a full disk
            self._write_heartbeat()

    def close(self) -> None:
        """Stop the heartbeat."""
        self._stop.set()
        self._thread.join()
        # Break the reference cycle with the run. Otherwise, data workers would run until the
        # process exits, and the process waits for them.
        self._on_lost = None
        self._work.end()

    def _enter(self, phase: str) -> None:
        self._phase, self._phase_began = phase, time.monotonic()
        self._work.set_operation(f"step {self._step}, {'computing' if phase == 'step' else phase}")

    def mark_reported(self) -> None:
        """Postpone progress messages, because a step was logged."""
        self._work.mark_reported()

    def _barrier(self, timeout_s: float) -> None:
        if self._group.group is not None:
            timeout = timedelta(seconds=timeout_s)
            dist.monitored_barrier(self._group.group, timeout, wait_all_ranks=True)

    def _peer_error(self, error: Exception) -> PeerError:
        """Return an error with the missing ranks and their last heartbeats.

        A stopped rank writes no heartbeats, which all ranks can detect. A rank that waits for data
        reports it in its heartbeat. A hanging rank still writes heartbeats, but misses a barrier,
        which rank 0 detects. If rank 0 hangs, its heartbeat reports no lost peer.
        """
        self._lost_peer = True
        with suppress(OSError):  # on a full disk, which must not hide the lost peer
            self._write_heartbeat()  # otherwise the other ranks would report this rank
        missing = _missing_ranks(error) or self._silent_ranks() or self._ranks_without_data()
        if not missing:
            try:
                self._barrier(min(self._timeout_s, _LAST_BARRIER_S))
            except RuntimeError as second:
                missing = _missing_ranks(second) or self._hanging_leader()
        text = f"rank {self._group.rank} lost a peer at step {self._step} in {self._phase}: "
        if missing:
            return PeerError(text + "; ".join(self._last_seen(rank) for rank in missing))
        hint = (
            "the log of rank 0 may show which rank"
            if self._group.rank
            else "all ranks still respond"
        )
        return PeerError(f"{text}{_first_line(error)} ({hint})")

    def _silent_ranks(self) -> list[int]:
        """Return ranks without a new heartbeat for more than one interval that lost no peer.

        Heartbeats are compared with earlier heartbeats, so clocks need not be synchronized.
        """
        ranks = range(self._group.size)
        before = [self._read_heartbeat(rank) for rank in ranks]
        time.sleep(1.5 * self._heartbeat_s)
        after = [self._read_heartbeat(rank) for rank in ranks]
        return [
            rank
            for rank, was, now in zip(ranks, before, after, strict=True)
            if now is None or (now == was and not now["lost_peer"])
        ]

    def _ranks_without_data(self) -> list[int]:
        """Return other ranks that have waited for data for some time.

        Call after `_silent_ranks`, so that heartbeats are recent.
        """
        long_s = min(self._timeout_s, _LAST_BARRIER_S)
        beats = {rank: self._read_heartbeat(rank) for rank in range(self._group.size)}
        return [
            rank
            for rank, beat in beats.items()
            if beat and rank != self._group.rank and not beat["lost_peer"]
            if beat["phase"] == WAITING_FOR_DATA and beat["phase_s"] >= long_s
        ]

    def _hanging_leader(self) -> list[int]:
        """Return rank 0 if it missed a barrier, which only rank 0 can detect, and lost no peer."""
        beat = self._read_heartbeat(0)
        return [0] if self._group.rank and beat and not beat["lost_peer"] else []

    def _last_seen(self, rank: int) -> str:
        beat = self._read_heartbeat(rank)
        if beat is None:
            return f"rank {rank} did not respond and left no heartbeat"
        age_s = self._written_s(self._group.rank) - self._written_s(rank)
        doing = f" in {beat['phase']}"
        if beat["phase"] == WAITING_FOR_DATA:
            doing = f", {WAITING_FOR_DATA} for {beat['phase_s']:.0f} s"
        return (
            f"rank {rank} (process {beat['process']} on {beat['host']}) did not respond; its "
            f"last heartbeat was {age_s:.0f} s ago at step {beat['step']}{doing}"
        )

    def _file(self, rank: int) -> Path:
        return self._directory / f"rank-{rank:05}.json"

    def _written_s(self, rank: int) -> float:
        """Return the write time of a heartbeat on the file system clock, which all ranks share."""
        return self._file(rank).stat().st_mtime

    def _read_heartbeat(self, rank: int) -> dict[str, Any] | None:
        try:
            return json.loads(self._file(rank).read_bytes())
        except FileNotFoundError:
            return None

    def _beat(self) -> None:
        polls = max(1, round(self._heartbeat_s / POLL_S))
        for poll in count(1):
            if self._stop.wait(self._heartbeat_s / polls):
                return
            if self._group.rank == 0:
                self._work.report()  # if a step takes long, or is not logged
            if poll % polls == 0:
                # A full disk must not stop a run. The age of the heartbeat shows the problem.
                with suppress(OSError):
                    self._write_heartbeat()
                    self._check_peers()

    def _check_peers(self) -> None:
        phase = self._phase
        phase_s = time.monotonic() - self._phase_began
        if self._on_lost is None or phase in (WAITING_FOR_DATA, FINISHED):
            return
        if self._raises and phase not in LONG_PHASES:
            return
        error = self._watch.check(self._step, phase, phase_s, phase == WAITING_FOR_DEVICE)
        if error is not None:
            self._on_lost(error)

    def _write_heartbeat(self) -> None:
        beat = {
            "rank": self._group.rank,
            "step": self._step,
            "phase": self._phase,
            "phase_s": time.monotonic() - self._phase_began,
            "lost_peer": self._lost_peer,
            "time": time.time(),
            "process": os.getpid(),
            "host": os.uname().nodename,
        }
        replace_atomically(self._file(self._group.rank), canonical_json(beat))


def is_peer_failure(error: BaseException) -> bool:
    """Return True if a collective failed because of another rank.

    The criteria are the error type, or the wording of gloo. Causes of the error are included,
    because collectives of FSDP fail inside of a backward pass.
    """
    return _find_peer_failure(error) is not None


def _find_peer_failure(error: BaseException | None) -> BaseException | None:
    """Return the first error in the chain of causes that comes from another rank, or None."""
    while error is not None:
        if isinstance(error, dist.DistError) or _PEER_FAILURE.search(str(error)):
            return error
        error = error.__cause__
    return None


@contextmanager
def peer_errors(rank: int) -> Iterator[None]:
    """Raise a PeerError for failed communication inside, before `HealthMonitor` exists."""
    try:
        yield
    except RuntimeError as error:
        if not is_peer_failure(error):
            raise
        raise PeerError(
            f"rank {rank} lost a peer, or could not connect to it, during the start: "
            f"{_first_line(error)}. Check for a rank that exited, started late, or has "
            "another MASTER_ADDR; parallel.timeout_s sets the timeout"
        ) from error


def check_finite(step: int, names: Sequence[str], values_RN: Sequence[Sequence[float]]) -> None:
    """Raise on all ranks if a value is NaN or infinite.

    Args:
        step: Number of the step, for the error message.
        names: Names of the columns, for example ("loss", "grad_norm").
        values_RN: Values by rank, see `parallel.gather.gather_floats`. Columns without a name are
            ignored.

    Raises:
        NonFiniteError: A value is not finite. The error message has step, values and ranks.
    """
    problems = [
        f"{name} = {row[column]} on rank {rank}"
        for column, name in enumerate(names)
        for rank, row in enumerate(values_RN)
        if not math.isfinite(row[column])
    ]
    if problems:
        shown = ", ".join(problems[:8]) + (", ..." if len(problems) > 8 else "")
        raise NonFiniteError(
            f"step {step}: {shown}; parameters were not updated. Resume from the last "
            "checkpoint with a lower learning rate, or check the samples of this step"
        )


def _missing_ranks(error: BaseException) -> list[int]:
    match = _MISSING_RANKS.search(str(error))
    return [int(rank) for rank in match[1].split(",")] if match else []


def _first_line(error: BaseException) -> str:
    error = _find_peer_failure(error) or error
    return str(error).strip().partition("\n")[0]
