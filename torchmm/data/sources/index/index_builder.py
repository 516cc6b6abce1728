"""Build the index of a source in a run, in worker processes, or in a job array before the run.

    index = IndexBuilder(name, source, reader, directory, workers).load()      every rank
    building.measure(numbers); building.finish()                           scripts/index_data.py

If no rank finds a manifest, one rank builds the index, and the remaining ranks wait for it. The
building process owns `building.lock`, a file with its host and process id whose modification time
it updates. If the process exits, or makes no progress for `STALE_S`, another process continues with
the missing shards. On an error the process releases the lock, so that each process reports it.

The lock only avoids duplicate work. Each process writes the same bytes for a shard to a temporary
file and renames it. Therefore two lock owners do no harm, for example on network file systems that
show new files late. Collectives are not an option, because producers and `index_data.py` have no
process group. Kernel locks do not work on most network file systems.
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
from torchmm.common.log import ProgressReport, report_progress
from torchmm.common.processes import kill_workers, make_worker_setup, start_fork_server
from torchmm.data.sources.decompress import convert_cache_errors
from torchmm.data.sources.index.length_index import MANIFEST, LengthIndex, read_index
from torchmm.data.sources.index.measure_shards import measure_shard, read_shard, split_into_shards
from torchmm.data.sources.reader import SampleReader
from torchmm.data.sources.source_options import MapSource

LOCK_FILE = "building.lock"
STALE_S = 120.0
"""Seconds without progress after which another process takes over."""
POLL_S = 0.2
"""Seconds between checks for the manifest."""
HEARTBEAT_S = 10.0
"""Seconds between updates of the lock file."""
MIN_SAMPLES_FOR_WORKERS = 20_000
"""Minimum number of samples for which worker processes are started."""


@dataclass
class IndexBuilder:
    """Index of one source, to be built or loaded.

    Attributes:
        name: Name of the source, for messages.
        source: Records of the source.
        reader: Reader that measures records.
        directory: Directory of the index.
        workers: Number of worker processes for a large source. With 0, this process measures.
    """

    name: str
    source: MapSource
    reader: SampleReader
    directory: Path
    workers: int = 0

    def __post_init__(self) -> None:
        self.ranges = split_into_shards(len(self.source))

    def prepare(self) -> None:
        """Create the directory. Raise ConfigError if it cannot be written."""
        with convert_cache_errors(self.directory.parent):
            self.directory.mkdir(parents=True, exist_ok=True)
            check_writable(self.directory)  # before hours of work

    def load(self) -> LengthIndex:
        """Return the index. If it is missing, build it or wait for the process that builds it.

        Raises:
            ConfigError: The index is missing and cannot be written.
            DataError: A worker process crashed, or the source changed while it was read.
        """
        index = read_index(self.directory)
        if index is None:
            self.prepare()
            lock = BuildLock(self.directory / LOCK_FILE)
            waiting = ProgressReport(f"waiting for the index of source {self.name}")
            with convert_cache_errors(self.directory.parent):
                while (index := read_index(self.directory)) is None:
                    if lock.try_acquire():
                        with lock.release_on_exit():
                            self.measure(range(len(self.ranges)))
                            self.finish()
                        continue
                    waiting.report(f"{lock.owner()} is indexing it")
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
        """Measure missing shards among `numbers`. Raise DataError if a worker process crashes."""
        missing = [n for n in numbers if read_shard(self.directory, n, self.ranges[n]) is None]
        samples = sum(self.ranges[n].samples for n in missing)
        done = 0
        with report_progress(f"indexing source {self.name}", samples, "samples") as work:
            if self.workers and len(missing) > 1 and samples >= MIN_SAMPLES_FOR_WORKERS:
                measured = self._measure_in_workers(missing)
            else:
                measured = self._measure_in_process(missing, work)
            for number in measured:
                done += self.ranges[number].samples
                work.set_completed(done)

    def finish(self) -> bool:
        """Write the manifest if no shard is missing, and return True if it was written."""
        shards = [read_shard(self.directory, n, r) for n, r in enumerate(self.ranges)]
        complete = [shard for shard in shards if shard is not None]
        if len(complete) < len(shards):
            return False
        manifest = canonical_json({"shards": [dataclasses.asdict(shard) for shard in complete]})
        replace_atomically(self.directory / MANIFEST, manifest)
        return True

    def _measure_in_process(self, missing: list[int], work: ProgressReport) -> Iterator[int]:
        heartbeat = Heartbeat(self.directory / LOCK_FILE)
        before = 0
        for number in missing:

            def on_progress(measured: int, before: int = before) -> None:
                heartbeat()
                work.set_completed(before + measured)

            measure_shard(
                self.source, self.reader, self.ranges[number], self.directory, number, on_progress
            )
            before += self.ranges[number].samples
            yield number

    def _measure_in_workers(self, missing: list[int]) -> Iterator[int]:
        count = min(self.workers, len(missing))
        setup = make_worker_setup()
        pool = ProcessPoolExecutor(count, start_fork_server(), _start_worker, (setup, self))
        try:
            futures = {pool.submit(_measure_in_worker, number): number for number in missing}
            for future in as_completed(futures):
                future.result()
                yield futures[future]
        except BrokenProcessPool as error:
            raise DataError(
                f"source {self.name!r}: an indexing process exited unexpectedly. If memory "
                "ran out, lower data.workers; finished shards are kept"
            ) from error
        except BaseException:
            kill_workers(list(pool._processes.values()))  # the exit would wait for them
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class Heartbeat:
    """Callable that updates the modification time of a file, at most every `HEARTBEAT_S`.

    Args:
        path: The file, which may not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._last > HEARTBEAT_S:
            self._last = time.monotonic()
            with suppress(OSError):
                os.utime(self._path)


class BuildLock:
    """Lock file with the host and process id of its owner.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[bytes, int] | None = None
        self._since_s = 0.0

    def try_acquire(self) -> bool:
        """Try to acquire the lock, and return True on success."""
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            if self._is_abandoned():
                # Only one process can rename the file.
                with suppress(FileNotFoundError):
                    removed = self._path.with_name(f".{self._path.name}.{uuid4().hex}")
                    self._path.rename(removed)
                    removed.unlink()
            return False
        with os.fdopen(descriptor, "w") as file:
            json.dump({"host": socket.gethostname(), "pid": os.getpid()}, file)
        return True

    @contextmanager
    def release_on_exit(self) -> Iterator[None]:
        """Return a context that releases the lock at its end."""
        try:
            yield
        finally:
            self._path.unlink(missing_ok=True)

    def owner(self) -> str:
        """Return a description of the owner, for messages."""
        owner = self._read()
        return f"process {owner.get('pid')} of {owner.get('host')}" if owner else "another process"

    def _read(self) -> dict[str, Any]:
        try:
            owner = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        return owner if isinstance(owner, dict) else {}

    def _is_abandoned(self) -> bool:
        """Return True if the owner has exited, or has not updated the file for `STALE_S`.

        Only the clock of this process is used, because clocks of nodes and file servers differ.
        """
        try:
            seen = self._path.read_bytes(), self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return False
        if seen != self._seen:
            self._seen = seen
            self._since_s = time.monotonic()
        owner = self._read()
        if owner.get("host") == socket.gethostname() and isinstance(owner.get("pid"), int):
            try:
                os.kill(owner["pid"], 0)
            except ProcessLookupError:
                return True
            except PermissionError:
                pass  # the process runs as another user
        return time.monotonic() - self._since_s > STALE_S


_worker_builder: list[IndexBuilder] = []
"""Index that this worker process measures, set by `_start_worker`."""


def _start_worker(setup: Any, building: IndexBuilder) -> None:
    setup(0)
    _worker_builder.append(building)


def _measure_in_worker(number: int) -> None:
    building = _worker_builder[0]
    heartbeat = Heartbeat(building.directory / LOCK_FILE)
    measure_shard(
        building.source,
        building.reader,
        building.ranges[number],
        building.directory,
        number,
        lambda measured: heartbeat(),
    )
