"""Upload committed checkpoints during training, and report failures.

Every rank uploads files of its node. Then rank 0 uploads the manifest, so that an upload is
complete or ignored. One checkpoint is uploaded at a time. Checkpoints that are saved during an
upload are skipped, except the last one: slow remote storage receives every second or third
checkpoint, and the newest at the end of training. A failed upload is logged and counted, and
training continues with its local checkpoints. Ranks communicate over a separate group, as for
saves.

Rank 0 does not upload all files, because it has the network link of one node and only the files of
its node. Saves and uploads have separate threads, because the next save would wait for slow
storage.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from torchmm.common.errors import CheckpointError
from torchmm.extensions.remote.checkpoints.remote_checkpoints import RemoteCheckpoints
from torchmm.parallel.health.peers import SideGroup, is_peer_failure
from torchmm.training.checkpoint.manifest import MANIFEST_NAME, parse_manifest
from torchmm.training.checkpoint.save_metrics import SaveMeter
from torchmm.training.checkpoint.storage import rank_file_name
from torchmm.training.checkpoint.store import upload_folder_name

UPLOAD_TIMEOUT_S = 86_400.0
"""Time limit of the wait for the slowest upload of a file. A lost peer stops the wait."""


class BackgroundUploads:
    """The uploads of the checkpoints of one run. All ranks call all methods in the same order.

    Args:
        remote: Remote storage.
        keep: Number of uploaded checkpoints to retain.
        best: Function that returns the steps of further checkpoints to retain.
        group: Side group that only uploads use.
        meter: Receives durations and sizes.
        logger: Logger of the run.
    """

    def __init__(
        self,
        remote: RemoteCheckpoints,
        keep: int,
        best: Callable[[], Collection[int]],
        group: SideGroup,
        meter: SaveMeter,
        logger: logging.Logger,
    ) -> None:
        self._remote = remote
        self._keep = keep
        self._best = best
        self._group = group
        self._meter = meter
        self._logger = logger
        self._thread: threading.Thread | None = None
        self._newest: Path | None = None
        self._last_upload: Path | None = None
        self._failed = 0
        self.status_warning = ""
        """Checkpoint that could not be uploaded, and the reason. Empty without failures."""

    @property
    def in_use(self) -> Path | None:
        """Checkpoint that is being uploaded, as far as this rank has been notified."""
        return self._last_upload if self._thread is not None and self._thread.is_alive() else None

    def committed(self, path: Path, now: bool) -> None:
        """Register a new checkpoint.

        Args:
            path: The checkpoint.
            now: Whether to upload it now. True only if no rank is uploading.
        """
        self._newest = path
        if now:
            self._start(path)

    def resumed(self, path: Path) -> None:
        """Upload the checkpoint that training resumes from, unless it is stored. Collective.

        The last run may have exited before the upload was complete. A folder is complete if its
        manifest is intact and its files have the listed sizes. Its name alone is not sufficient.
        """
        file = path / MANIFEST_NAME

        def find_folder() -> str:
            return upload_folder_name(parse_manifest(file.read_bytes(), str(file)))

        folder = self._group.run_on_rank_zero(find_folder)
        if self._group.run_on_rank_zero(lambda: self._remote.is_committed(folder)):
            self._newest = self._last_upload = path
        else:
            self.committed(path, now=True)

    def finish(self) -> None:
        """Wait for the current upload, then upload the newest checkpoint if it was skipped."""
        self.wait()
        if self._newest is not None and self._newest != self._last_upload:
            self._start(self._newest)
        self.wait()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the current upload."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _start(self, path: Path) -> None:
        assert self.in_use is None
        self._last_upload = path
        self._thread = threading.Thread(target=self._run, args=(path,), daemon=True)
        self._thread.start()

    def _run(self, path: Path) -> None:
        start_s = time.perf_counter()
        size_bytes = 0
        try:
            size_bytes, problem = self._copy(path)
        except Exception as error:  # counted below, because a failed upload does not stop the run
            problem = "a rank was lost" if is_peer_failure(error) else _single_line(error)
        duration_s = time.perf_counter() - start_s
        if problem is None:
            self.status_warning = ""
            self._meter.record(
                checkpoint_upload_ms=duration_s * 1e3, checkpoint_upload_bytes=size_bytes
            )
            if self._group.rank == 0:
                message = "uploaded %s to %s (%d bytes in %.1f s)"
                self._logger.info(message, path, self._remote.address, size_bytes, duration_s)
            return
        self._failed += 1
        self._meter.record(checkpoint_upload_failures=self._failed)
        self.status_warning = f"{path.name} was not uploaded to {self._remote.address}: {problem}"
        if self._group.rank == 0:
            self._logger.warning(
                "%s. Training continues without this upload; the next checkpoint is uploaded "
                "again (%d failed so far)",
                self.status_warning,
                self._failed,
            )

    def _copy(self, path: Path) -> tuple[int, str | None]:
        """Upload a checkpoint. Return the bytes of all ranks, and the problem. Collective."""
        file = path / MANIFEST_NAME

        def read() -> bytes | str:
            try:
                return file.read_bytes()
            except OSError as error:
                return f"{file}: {error.strerror}"

        data = self._group.run_on_rank_zero(read)
        if isinstance(data, str):
            return 0, data
        manifest = parse_manifest(data, str(file))
        folder = upload_folder_name(manifest)
        names = sorted(manifest["files"])
        local_files = [name for name in names if (path / name).is_file()]
        parts = assign_uploads(names, self._group.gather(local_files))
        sent_bytes = 0
        problem: str | None = None
        try:
            for name in parts[self._group.rank]:
                sent_bytes += self._remote.put(folder, path / name)
        except Exception as error:  # counted by `_run`, on all ranks, so that no rank waits
            problem = _single_line(error)
        outcomes = self._group.gather((sent_bytes, problem))
        problems = [f"rank {r}: {found}" for r, (_, found) in enumerate(outcomes) if found]
        missing = sorted(set(names) - {name for part in parts for name in part})
        if missing:
            problems.append(f"no node has {missing[0]}")
        problem = self._group.run_on_rank_zero(lambda: self._commit(folder, data, problems))
        return sum(sent for sent, _ in outcomes), problem

    def _commit(self, folder: str, data: bytes, problems: list[str]) -> str | None:
        """Commit an upload on rank 0 after all ranks have finished. Return the problem, or None."""
        try:
            if problems:
                self._remote.discard(folder)
                return problems[0]
            self._remote.commit(folder, data)
        except CheckpointError as error:
            return problems[0] if problems else _single_line(error)
        try:
            self._remote.retain(self._keep, folder, self._best())
        except CheckpointError as error:
            message = "cannot remove old checkpoints from %s: %s"
            self._logger.error(message, self._remote.address, _single_line(error))
        return None


def assign_uploads(names: Sequence[str], local_files: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the files that each rank uploads: its file, and further files in round-robin order.

    Args:
        names: Names of all files.
        local_files: Names of the files on the node of each rank.
    """
    files_by_rank = [set(files) for files in local_files]
    parts: list[list[str]] = [[] for _ in local_files]
    for number, name in enumerate(names):
        ranks = [rank for rank, files in enumerate(files_by_rank) if name in files]
        owners = [rank for rank in ranks if name == rank_file_name(rank)]
        if ranks:
            parts[owners[0] if owners else ranks[number % len(ranks)]].append(name)
    return parts


def _single_line(error: Exception) -> str:
    return " ".join(str(error).split())
