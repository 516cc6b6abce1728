"""Measure the index of a source: in one process, in its workers, or in a job array before the run.

    index = Building(name, source, reader, directory, workers).load()      every rank
    building.measure(numbers); building.finish()                           scripts/index_data.py

If ranks find no manifest, one of them measures, in worker processes if the source is large. The
other ranks wait for the manifest. The measuring process holds `building.lock`, a file with its host
and process that it touches while it measures. If that process has ended, or has measured nothing
for `STALE_S`, another process takes over and continues with the missing shards. An error ends the
measuring process and releases the lock, so that other processes find the same error.

The lock saves work, but correctness does not depend on it: every process writes the same bytes for
a shard, under another name first. So two processes that both hold the lock, as on file systems that
show new files late, do no harm. A collective does not work here, because producers, inspection and
`index_data.py` have no process group. Kernel locks do not work on most network file systems.
"""

from __future__ import annotations

import dataclasses
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
from torchmm.common.files import canonical_json, check_writable, replace_atomically
from torchmm.common.log import Work, working
from torchmm.common.processes import end_workers, fork_server, make_worker_setup
from torchmm.data.sources.configured import MapSource
from torchmm.data.sources.index.length_index import MANIFEST, LengthIndex, read_index
from torchmm.data.sources.index.measuring import cut, measure_shard, read_shard
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


@dataclass
class Building:
    """The index of one source, and the process that measures it.

    Args:
        name: Name of the source, for messages.
        source: Its records.
        reader: Measures records.
        directory: Directory of the index.
        workers: Processes that measure a large source. If 0, this process does.
    """

    name: str
    source: MapSource
    reader: SampleReader
    directory: Path
    workers: int = 0

    def __post_init__(self) -> None:
        self.ranges = cut(len(self.source))

    def prepare(self) -> None:
        """Create the directory. Raise ConfigError if it cannot be written."""
        with naming_the_cache(self.directory.parent):
            self.directory.mkdir(parents=True, exist_ok=True)
            check_writable(self.directory)  # measuring may take hours, in vain

    def load(self) -> LengthIndex:
        """Return the index. Measure it, or wait for the process that does, if it is missing.

        Raises:
            ConfigError: The index is missing and cannot be written.
            DataError: A record ended a worker process, or the source changed while it was read.
        """
        index = read_index(self.directory)
        if index is None:
            self.prepare()
            lock = Lock(self.directory / LOCK)
            waiting = Work(f"waiting for the index of source {self.name}")
            with naming_the_cache(self.directory.parent):
                while (index := read_index(self.directory)) is None:
                    if lock.take():
                        with lock.held():
                            self.measure(range(len(self.ranges)))
                            self.finish()
                        continue
                    waiting.tell(f"{lock.owner()} is indexing it")
                    time.sleep(POLL_S)
            waiting.end("measured")
        if len(index) != len(self.source):
            raise DataError(
                f"source {self.name!r} has {len(self.source)} records, but its index "
                f"{self.directory} has {len(index)}, because files changed during indexing. "
                "Remove the index and start again"
            )
        return index

    def measure(self, numbers: Iterable[int]) -> None:
        """Measure the missing ones of these shards. Raise DataError if a worker process dies."""
        missing = [n for n in numbers if read_shard(self.directory, n, self.ranges[n]) is None]
        samples = sum(self.ranges[n].samples for n in missing)
        done = 0
        with working(f"indexing source {self.name}", samples, "samples") as work:
            if self.workers and len(missing) > 1 and samples >= WORKERS_FROM:
                measured = self._measure_in_workers(missing)
            else:
                measured = self._measure_here(missing, work)
            for number in measured:
                done += self.ranges[number].samples
                work.at(done)

    def finish(self) -> bool:
        """Write the manifest if no shard is missing. Return whether it was written."""
        shards = [read_shard(self.directory, n, r) for n, r in enumerate(self.ranges)]
        found = [shard for shard in shards if shard is not None]
        if len(found) < len(shards):
            return False
        manifest = canonical_json({"shards": [dataclasses.asdict(shard) for shard in found]})
        replace_atomically(self.directory / MANIFEST, manifest)
        return True

    def _measure_here(self, missing: list[int], work: Work) -> Iterator[int]:
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

    def _measure_in_workers(self, missing: list[int]) -> Iterator[int]:
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
                f"source {self.name!r}: an indexing process exited unexpectedly. If memory "
                "ran out, lower data.workers; finished shards are kept"
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
