"""The `checkpoints` directory of a run: its lock, commits and retention.

"step-N" is a committed checkpoint, and "step-N.tmp-ID" is a checkpoint that is being written.
"step-N.set-aside-ID" is a checkpoint of a later step than the resumed one, which is never loaded.
Only rank 0 writes to the directory. This module does not import torch.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from torchmm.common.errors import CheckpointError
from torchmm.common.files import sync_directory
from torchmm.recipe.training_section import BestConfig
from torchmm.training.checkpoint.manifest import (
    NewerFormatError,
    find_problems,
    list_steps,
    read_manifest,
    reject_newer_format,
    step_of,
)

_LOCK_WAIT_S = 10.0
_LOCK_RETRY_S = 0.2


class InUseError(CheckpointError):
    """Error of a run directory that another active run uses."""


class CheckpointDirectory:
    """A directory of checkpoints on rank 0, or on one rank of each node with a local disk.

    Args:
        path: The directory.
        logger: Logger of the run.
        partial: Whether the directory has only the files of one node.
    """

    def __init__(self, path: Path, logger: logging.Logger, partial: bool = False) -> None:
        self.path = path
        self._logger = logger
        self._partial = partial
        self._lock: int | None = None
        self._lock_file = path / ".lock"
        self._validated: set[Path] = set()

    def try_lock(self) -> bool:
        """Lock the directory for this process. Return False if another process has the lock.

        The operating system releases a POSIX record lock whenever its process exits, also on a
        network file system. Forked data workers do not inherit it.
        """
        if self._lock is None:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._lock_file, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                return False
            self._lock = lock
            holder = f"process {os.getpid()} on {os.uname().nodename}{_rendezvous_address()}\n"
            with suppress(OSError):  # a full disk cannot store the text, but can store the lock
                os.truncate(lock, 0)
                os.pwrite(lock, holder.encode(), 0)
        return True

    def acquire_lock(self) -> None:
        """Claim the directory. Wait briefly for a previous run that is exiting.

        Then remove incomplete saves. No other run is active while this process has the lock.

        Raises:
            InUseError: Another process has the lock.
        """
        deadline = time.monotonic() + _LOCK_WAIT_S
        while not self.try_lock():
            if time.monotonic() > deadline:
                raise InUseError(
                    f"{self.path} is in use by another run ({self._lock_holder()}); stop that run, "
                    "or set another name"
                )
            time.sleep(_LOCK_RETRY_S)
        for stale in self.path.glob("step-*.tmp-*"):
            self._logger.warning("removing %s from an incomplete save", stale)
            shutil.rmtree(stale)

    def is_locked_by_this_run(self) -> bool:
        """Return True if a rank of this run has claimed the directory, according to the lock file.

        Active runs have different rendezvous addresses.
        """
        rendezvous = _rendezvous_address()
        return self._lock is not None or (
            bool(rendezvous) and self._lock_holder().endswith(rendezvous)
        )

    def release(self) -> None:
        """Release the lock, so that other processes can claim the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def commit(self, temporary: Path) -> Path:
        """Rename a complete temporary directory atomically and durably, and return its path."""
        final = temporary.with_name(temporary.name.partition(".tmp-")[0])
        temporary.rename(final)
        sync_directory(self.path)
        self._validated.add(final)
        return final

    def replace(self, temporary: Path) -> Path:
        """Commit a temporary directory, and rename an existing checkpoint of the same step."""
        final = temporary.with_name(temporary.name.partition(".tmp-")[0])
        if final.exists():
            self._set_aside(final, "replaced by a complete copy")
        return self.commit(temporary)

    def best(self, of: BestConfig | None) -> list[int]:
        """Return the steps of the best valid checkpoints, by the metrics in their manifests.

        Of two equally good checkpoints, the earlier one is better.
        """
        if of is None:
            return []
        candidates = []
        for path in list_steps(self.path):
            with suppress(CheckpointError):
                value = read_manifest(path).get("figures", {}).get(of.metric)
                if value is not None and self._is_valid(path):
                    candidates.append((of.sort_key(value), step_of(path) or 0))
        return [step for _, step in sorted(candidates)[: of.count]]

    def retain(self, keep: int, in_use: Path | None = None, best: Collection[int] = ()) -> None:
        """Remove checkpoints older than the `keep` newest valid checkpoints.

        Damaged checkpoints are not counted, so they cannot displace the last valid one. Checkpoints
        that another process wrote are hashed once. Checkpoints of newer versions are neither
        counted nor removed.

        Args:
            keep: Number of newest checkpoints to retain.
            in_use: Checkpoint that is being uploaded, which is removed later.
            best: Steps of further checkpoints to retain.
        """
        valid = 0
        for path in list_steps(self.path):
            if path not in self._validated and _is_of_newer_format(path):
                continue
            if valid >= keep and path != in_use and step_of(path) not in best:
                self._remove(path)
            elif self._is_valid(path):
                valid += 1

    def set_aside_after(self, step: int) -> None:
        """Rename checkpoints of later steps, so that they are neither resumed nor counted."""
        for path in self.path.glob("step-*"):
            if (later_step := step_of(path)) is not None and later_step > step:
                self._set_aside(path, "training continues from an earlier step")
        sync_directory(self.path)

    def _set_aside(self, path: Path, why: str) -> None:
        aside = path.with_name(f"{path.name}.set-aside-{uuid4().hex[:8]}")
        path.rename(aside)
        self._validated.discard(path)
        self._logger.warning("renamed %s to %s: %s", path, aside, why)

    def _is_valid(self, path: Path) -> bool:
        if path in self._validated:
            return True
        problems = [] if self._partial else find_problems(path)
        if self._partial:
            try:
                read_manifest(path)
            except CheckpointError as error:
                problems = [str(error)]
        if problems:
            self._logger.error("corrupt checkpoint %s: %s", path, "; ".join(problems))
            return False
        self._validated.add(path)
        return True

    def _remove(self, path: Path) -> None:
        # Renamed first: an interrupted removal must not leave a damaged "step-N".
        doomed = path.with_name(f"{path.name}.tmp-{uuid4().hex}")
        try:
            path.rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            # The new checkpoint is safe, and an extra old one does not matter.
            self._logger.error("cannot remove the old checkpoint %s: %s", path, error)
        self._validated.discard(path)

    def _lock_holder(self) -> str:
        """Return the process that has or had the lock.

        Call it only if this process does not have the lock, because closing the file would release
        it.
        """
        assert self._lock is None
        try:
            return self._lock_file.read_text(errors="replace").strip()
        except OSError:
            return "unknown"


def _rendezvous_address() -> str:
    """Return the rendezvous address of this run, or "" for a single rank."""
    address = os.environ.get("MASTER_ADDR")
    port = os.environ.get("MASTER_PORT")
    return f", rendezvous at {address}:{port}" if address and port else ""


def _is_of_newer_format(path: Path) -> bool:
    try:
        reject_newer_format(path)
    except NewerFormatError:
        return True
    return False
