"""Noticing lost, hung and diverging ranks, and naming them.

A collective that times out tells every rank that somebody is missing, never who. Beside the
training group there is therefore a gloo group of its own, on which `monitored_barrier` lists the
ranks that do not arrive, and a file per rank ("heartbeat") that says which step and phase it
was in. The barrier runs every few steps and once more when a collective fails. On CUDA, where a
lost peer raises nothing, the heartbeat's thread ends the rank (`peer_watch`). Rejected: heartbeats
over the network (the run directory is shared anyway, for checkpoints).
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
from torchmm.common.log import POLL_S, Work
from torchmm.parallel.health.peer_watch import FINISHED, PeerWatch
from torchmm.parallel.torch_private import new_patient_group

T = TypeVar("T")
SIDE_GROUP_TIMEOUT_S = 1800.0
"""A rank may wait this long for the slowest writer of a checkpoint."""
PATIENT = ("checkpoint", "export")
"""Phases in which ranks wait so long for each other: who died there would be noticed late."""
_PEER_TROUBLE = re.compile(
    r"gloo/transport|connection (closed|reset) by peer|timed out waiting|timeout caused"
    r"|monitoredBarrier",
    re.IGNORECASE,
)
_LAST_BARRIER_S = 5.0
"""After a failed collective: all ranks that can still do so fail within about this time."""
WAITING_FOR_DATA = "waiting for data"
WAITING_FOR_DEVICE = "waiting for the device"
_MISSING_RANKS = re.compile(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier")


class SideGroup:
    """All ranks over gloo, apart from the training group; also without torch.distributed.

    Messages are pickled by torch: they come from ranks of this run, never from files.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank()
        self.size = 1 if group is None else dist.get_world_size()

    @classmethod
    def create(cls, timeout_s: float = SIDE_GROUP_TIMEOUT_S) -> SideGroup:
        """Collective over all ranks."""
        if not dist.is_initialized():
            return cls(None)
        return cls(new_patient_group(timedelta(seconds=timeout_s)))

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on every rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def on_rank_0(self, function: Callable[[], T]) -> T:
        """Result of `function` on rank 0, on every rank; its exception is raised on every rank."""
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


class Health:
    """Heartbeats, barriers and error conversion of one rank.

    Args:
        directory: where heartbeats are, shared by all ranks.
        timeout_s: seconds to wait for a rank in a barrier.
        barrier_interval: steps between barriers.
        heartbeat_s: seconds between heartbeats.
        on_lost: where lost peers raise nothing: what ends the process, called in the thread of the
            heartbeat.
        raises: whether they raise errors by themselves in time, as with gloo; then it is called
            only in `PATIENT` phases.
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
            PeerWatch.forget(directory)
        self._group = SideGroup.create(timeout_s)
        self._directory = directory
        self._on_lost = on_lost
        self._raises = raises
        self._watch = PeerWatch(
            directory, self._group.rank, self._group.size, timeout_s, self._file
        )
        self._timeout_s = timeout_s
        self._barrier_interval = barrier_interval
        self._heartbeat_s = heartbeat_s
        self._step = 0
        self._phase = "start"
        self._phase_began = time.monotonic()
        self._work = Work("start")
        self._lost_peer = False
        self._stop = threading.Event()
        directory.mkdir(parents=True, exist_ok=True)
        self._write_heartbeat()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    @contextmanager
    def phase(self, step: int, phase: str) -> Iterator[None]:
        """What this rank is doing now; failed communication inside becomes a PeerError."""
        self._step = step
        self._enter(phase)
        try:
            yield
        except PeerError as error:  # of a save in the background, which cannot know whom
            raise self._peer_error(error) from error
        except RuntimeError as error:
            if not is_peer_trouble(error):
                raise
            raise self._peer_error(error) from error

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Inside of a phase: what this rank waits for comes from no peer, and peers can see that
        in its heartbeat."""
        outer = self._phase
        self._enter(WAITING_FOR_DATA)
        try:
            yield
        finally:
            self._enter(outer)

    @contextmanager
    def waiting_for_device(self) -> Iterator[None]:
        """Inside of a phase: the host waits for its device, which may wait for a peer."""
        outer = self._phase
        self._enter(WAITING_FOR_DEVICE)
        try:
            yield
        finally:
            self._enter(outer)

    def check(self, step: int) -> None:
        """Barrier in every `barrier_interval`-th step; all ranks must call it in every step.

        Raises:
            PeerError: a rank did not arrive in time; on rank 0 it is named.
        """
        if step % self._barrier_interval == 0:
            with self.phase(step, "health check"):
                self._barrier(self._timeout_s)

    def finish(self) -> None:
        """This rank has no more to do with others: they shall not miss it, nor it them."""
        self._enter(FINISHED)
        with suppress(OSError):  # on a full disk
            self._write_heartbeat()

    def close(self) -> None:
        """Ends the heartbeat."""
        self._stop.set()
        self._thread.join()
        # It knows its run, and the run this: in a circle, data workers would live on until the
        # process ends, which waits for them.
        self._on_lost = None
        self._work.end()

    def _enter(self, phase: str) -> None:
        self._phase, self._phase_began = phase, time.monotonic()
        self._work.now(f"step {self._step}, {'computing' if phase == 'step' else phase}")

    def said(self) -> None:
        """A step was shown: there is nothing to tell for some time."""
        self._work.said()

    def _barrier(self, timeout_s: float) -> None:
        if self._group.group is not None:
            timeout = timedelta(seconds=timeout_s)
            dist.monitored_barrier(self._group.group, timeout, wait_all_ranks=True)

    def _peer_error(self, error: Exception) -> PeerError:
        """Names the culprits, with what they were last seen doing.

        Who is dead or stopped does not write heartbeats any more, which every rank can see for
        itself, and so does who says that it waits for data. Who hangs otherwise still writes, but
        misses a barrier, which rank 0 sees; if that is rank 0, it does not say that it lost a peer.
        """
        self._lost_peer = True
        with suppress(OSError):  # on a full disk, which must not hide the lost peer
            self._write_heartbeat()  # the others must not take this rank for a culprit
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
        """Ranks that write no heartbeat for more than one interval and did not lose a peer.

        Heartbeats are compared with what they were: clocks of machines need not agree.
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
        """Other ranks that have been waiting for data for some time; after `_silent_ranks`, when
        heartbeats are fresh."""
        long_s = min(self._timeout_s, _LAST_BARRIER_S)
        beats = {rank: self._read_heartbeat(rank) for rank in range(self._group.size)}
        return [
            rank
            for rank, beat in beats.items()
            if beat and rank != self._group.rank and not beat["lost_peer"]
            if beat["phase"] == WAITING_FOR_DATA and beat["phase_s"] >= long_s
        ]

    def _hanging_leader(self) -> list[int]:
        """Rank 0 if it missed a barrier, which it alone could tell, and has lost nobody either."""
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
        """When a rank's heartbeat was written, on the clock of the file system: one for all."""
        return self._file(rank).stat().st_mtime

    def _read_heartbeat(self, rank: int) -> dict[str, Any] | None:
        try:
            return json.loads(self._file(rank).read_bytes())
        except FileNotFoundError:
            return None

    def _beat(self) -> None:
        looks = max(1, round(self._heartbeat_s / POLL_S))
        for look in count(1):
            if self._stop.wait(self._heartbeat_s / looks):
                return
            if self._group.rank == 0:
                self._work.tell()  # where a step takes long, or is not shown
            if look % looks == 0:
                # A full disk must not end a run for want of a heartbeat; its age shows that.
                with suppress(OSError):
                    self._write_heartbeat()
                    self._look()

    def _look(self) -> None:
        phase = self._phase
        phase_s = time.monotonic() - self._phase_began
        if self._on_lost is None or phase in (WAITING_FOR_DATA, FINISHED):
            return
        if self._raises and phase not in PATIENT:
            return
        error = self._watch.look(self._step, phase, phase_s, phase == WAITING_FOR_DEVICE)
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


def is_peer_trouble(error: BaseException) -> bool:
    """Whether a collective failed because of another rank, going by type or gloo's wording.

    The collective may be inside of something that failed for it, as FSDP's are in a stage's
    backward: causes count.
    """
    return _peer_trouble(error) is not None


def _peer_trouble(error: BaseException | None) -> BaseException | None:
    """The error or, nearest first, the cause of it that comes from another rank."""
    while error is not None:
        if isinstance(error, dist.DistError) or _PEER_TROUBLE.search(str(error)):
            return error
        error = error.__cause__
    return None


@contextmanager
def peer_errors(rank: int) -> Iterator[None]:
    """Failed communication inside becomes a PeerError: for the time before there is a `Health`."""
    try:
        yield
    except RuntimeError as error:
        if not is_peer_trouble(error):
            raise
        raise PeerError(
            f"rank {rank} lost a peer, or could not connect to it, during the start: "
            f"{_first_line(error)}. Check for a rank that exited, started late, or has "
            "another MASTER_ADDR; parallel.timeout_s sets the timeout"
        ) from error


def check_finite(step: int, names: Sequence[str], values_RN: Sequence[Sequence[float]]) -> None:
    """Raise on all ranks if a value is NaN or infinite.

    Args:
        step: number of the step, for the message.
        names: names of the columns, for example ("loss", "grad_norm").
        values_RN: values by rank, see `parallel.gather.gather_floats`. Columns without a name are
            ignored.

    Raises:
        NonFiniteError: A value is not finite. The message has step, values and ranks.
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
    error = _peer_trouble(error) or error
    return str(error).strip().partition("\n")[0]
