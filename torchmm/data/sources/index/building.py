"""Sees to it that an index is measured: by one process, its helpers, or a job array before the run.

    index = load_or_build(name, source, reader, directory, workers)       every rank
    Building(...).measure(numbers); Building(...).finish()                scripts/index_data.py

Of all ranks that find no manifest one measures, in worker processes if there is much to measure;
the others wait for the manifest. Who measures holds `building.lock`, a file that names host and
process and is touched as samples are measured. If that process is gone, or nothing was measured for
`STALE_S`, the next one takes over and goes on with the shards that are missing. An error of who
measures ends it with that error, gives the lock free, and meets the others in the same way.

The lock saves work, and nothing depends on it: whoever writes a shard writes the same bytes, under
another name first. So two processes that both believe to hold it, as on file systems that show new
files late, do no harm. Rejected: a collective, which producers, inspection and `index_data.py` have
no process group for; locks of the kernel, which few network file systems have.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from torchmm.common.errors import DataError
from torchmm.common.files import check_writable, replace_atomically
from torchmm.common.log import Work, working
from torchmm.common.processes import end_workers, fork_server, make_worker_setup
from torchmm.data.sources.configured import MapSource
from torchmm.data.sources.index.length_index import MANIFEST, LengthIndex, read_index
from torchmm.data.sources.index.measuring import cut, manifest_of, measure_shard, read_shard
from torchmm.data.sources.packed import naming_the_cache
from torchmm.data.sources.reader import SampleReader

LOCK = "building.lock"
STALE_S = 120.0
"""Who has measured nothing for so long is believed to be gone, or stuck in a read."""
POLL_S = 0.2
TOLD_S = 10.0
"""Between touches of the lock."""
WORKERS_FROM = 20_000
"""Samples from which on starting worker processes, which takes seconds, is worth it."""


def load_or_build(
    name: str, source: MapSource, reader: SampleReader, directory: Path, workers: int = 0
) -> LengthIndex:
    """The index in a directory; measured now where it is not there.

    Args:
        name: the source's name, for messages.
        source: its records.
        reader: measures records.
        directory: of the index.
        workers: processes that measure large sources; 0: this one does.

    Raises:
        ConfigError: there is none, and none can be written.
        DataError: a record ended a worker process, or the source has changed while it was read.
    """
    index = read_index(directory)
    if index is None:
        building = Building(name, source, reader, directory, workers)
        building.prepare()
        with naming_the_cache(directory.parent):
            index = building.build_or_wait()
    if len(index) != len(source):
        raise DataError(
            f"source {name!r} has {len(source)} records, its index {directory} {len(index)}: its "
            f"files changed while they were read. Remove the index and start again"
        )
    return index


@dataclass
class Building:
    """The index of one source while it is measured; arguments as of `load_or_build`."""

    name: str
    source: MapSource
    reader: SampleReader
    directory: Path
    workers: int = 0

    def __post_init__(self) -> None:
        self.ranges = cut(len(self.source))

    def prepare(self) -> None:
        """Makes the directory.

        Raises:
            ConfigError: it cannot be written.
        """
        with naming_the_cache(self.directory.parent):
            self.directory.mkdir(parents=True, exist_ok=True)
            check_writable(self.directory)  # measuring may take hours, in vain

    def build_or_wait(self) -> LengthIndex:
        """The index, as soon as this process or another one has measured what is missing."""
        lock = Lock(self.directory / LOCK)
        waiting = Work(f"waiting for sizes of source {self.name}")
        while True:
            index = read_index(self.directory)
            if index is not None:
                waiting.end("measured")
                return index
            if lock.take():
                with lock.held():
                    self.measure(range(len(self.ranges)))
                    self.finish()
                continue
            waiting.tell(f"{lock.owner()} measures it")
            time.sleep(POLL_S)

    def missing(self, numbers: Iterable[int]) -> list[int]:
        """Which of these shards are not there."""
        return [n for n in numbers if read_shard(self.directory, n, self.ranges[n]) is None]

    def measure(self, numbers: Iterable[int]) -> None:
        """Measures those of these shards that are not there.

        Raises:
            DataError: a worker process died.
        """
        missing = self.missing(numbers)
        samples = sum(self.ranges[n].samples for n in missing)
        done = 0
        with working(f"measuring source {self.name}", samples, "samples") as work:
            if self.workers and len(missing) > 1 and samples >= WORKERS_FROM:
                measured = self._in_workers(missing)
            else:
                measured = self._here(missing, work)
            for number in measured:
                done += self.ranges[number].samples
                work.at(done)

    def finish(self) -> bool:
        """Writes the manifest if all shards are there; returns whether they are."""
        shards = [read_shard(self.directory, n, r) for n, r in enumerate(self.ranges)]
        found = [shard for shard in shards if shard is not None]
        if len(found) < len(shards):
            return False
        replace_atomically(self.directory / MANIFEST, manifest_of(found))
        return True

    def _here(self, missing: list[int], work: Work) -> Iterator[int]:
        beat = Heartbeat(self.directory / LOCK)
        before = 0
        for number in missing:

            def tell(measured: int, before: int = before) -> None:
                beat()
                work.at(before + measured)

            measure_shard(
                self.source, self.reader, self.ranges[number], self.directory, number, tell
            )
            before += self.ranges[number].samples
            yield number

    def _in_workers(self, missing: list[int]) -> Iterator[int]:
        count = min(self.workers, len(missing))
        setup = make_worker_setup()
        pool = ProcessPoolExecutor(count, fork_server(), _begin, (setup, self))
        try:
            futures = {pool.submit(_measure, number): number for number in missing}
            for future in as_completed(futures):
                future.result()
                yield futures[future]
        except BrokenProcessPool as error:
            raise DataError(
                f"source {self.name!r}: a process that measured its records died. If memory ran "
                "out, lower data.workers; shards that are finished stay"
            ) from error
        except BaseException:
            end_workers(list(pool._processes.values()))  # the exit would wait for their shards
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class Heartbeat:
    """Touches a file, at most every `TOLD_S`, while it is there.

    Args:
        path: of it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._last > TOLD_S:
            self._last = time.monotonic()
            with suppress(OSError):
                os.utime(self._path)


class Lock:
    """A file that says who measures.

    Args:
        path: of it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[bytes, int] | None = None
        self._since_s = 0.0

    def take(self) -> bool:
        """Whether this process holds it now."""
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            if self._abandoned():
                # Whoever renames it was the only one: the others do not find it any more.
                with suppress(FileNotFoundError):
                    gone = self._path.with_name(f".{self._path.name}.{uuid4().hex}")
                    self._path.rename(gone)
                    gone.unlink()
            return False
        with os.fdopen(descriptor, "w") as file:
            json.dump({"host": socket.gethostname(), "pid": os.getpid()}, file)
        return True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Gives it free in the end."""
        try:
            yield
        finally:
            self._path.unlink(missing_ok=True)

    def owner(self) -> str:
        """Who holds it, in words."""
        said = self._read()
        return f"process {said.get('pid')} of {said.get('host')}" if said else "another process"

    def _read(self) -> dict[str, Any]:
        try:
            said = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        return said if isinstance(said, dict) else {}

    def _abandoned(self) -> bool:
        """Whether its owner is gone, or has not touched it for long; by this process's clock, as
        those of machines and file servers differ."""
        try:
            seen = self._path.read_bytes(), self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return False
        if seen != self._seen:
            self._seen = seen
            self._since_s = time.monotonic()
        said = self._read()
        if said.get("host") == socket.gethostname() and isinstance(said.get("pid"), int):
            try:
                os.kill(said["pid"], 0)
            except ProcessLookupError:
                return True
            except PermissionError:
                pass  # alive, of another user
        return time.monotonic() - self._since_s > STALE_S


_own: list[Building] = []
"""What this worker process measures for."""


def _begin(setup: Any, building: Building) -> None:
    setup(0)
    _own.append(building)


def _measure(number: int) -> None:
    building = _own[0]
    beat = Heartbeat(building.directory / LOCK)
    measure_shard(
        building.source,
        building.reader,
        building.ranges[number],
        building.directory,
        number,
        lambda measured: beat(),
    )
