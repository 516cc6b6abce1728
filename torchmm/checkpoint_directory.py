"""The `checkpoints` directory of a run: who may write to it, and what stays in it.

Names: "step-N" is a committed checkpoint, "step-N.tmp-ID" one being written, "step-N.set-aside-ID"
one of a course of training that was given up. Only rank 0 works here. No torch.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from pathlib import Path
from uuid import uuid4

from torchmm.checkpoint_manifest import (
    NewerFormatError,
    find_problems,
    list_steps,
    refuse_newer_format,
    step_of,
)
from torchmm.errors import CheckpointError
from torchmm.files import sync_directory

_CLAIM_WAIT_S = 10.0
_CLAIM_RETRY_S = 0.2


class CheckpointDirectory:
    """Rank 0's view of `path`."""

    def __init__(self, path: Path, logger: logging.Logger) -> None:
        self.path = path
        self._logger = logger
        self._lock: int | None = None
        self._known_valid: set[Path] = set()

    def claim(self) -> None:
        """Makes this process the only writer and removes what dead writers left half done.

        A POSIX record lock vanishes with its process, however that ends, also on a network file
        system, and is not inherited by forked data workers. Holding it proves that no temporary
        directory belongs to a live run. Waits briefly for a predecessor that is just dying.

        Raises:
            CheckpointError: another process holds the lock.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + _CLAIM_WAIT_S
        while not self._try_lock(self._lock):
            if time.monotonic() > deadline:
                holder = os.read(self._lock, 200).decode(errors="replace").strip()
                self.release()
                raise CheckpointError(
                    f"{self.path} is in use by another run ({holder}); stop it, or set another name"
                )
            time.sleep(_CLAIM_RETRY_S)
        os.truncate(self._lock, 0)
        os.pwrite(self._lock, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        for stale in self.path.glob("step-*.tmp-*"):
            self._logger.warning("removing %s, left by a save that did not finish", stale)
            shutil.rmtree(stale)

    def release(self) -> None:
        """Lets other processes claim the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def commit(self, temporary: Path) -> Path:
        """Gives a finished temporary directory its name, in one step and durably."""
        final = temporary.with_name(temporary.name.partition(".tmp-")[0])
        temporary.rename(final)
        sync_directory(self.path)
        self._known_valid.add(final)
        return final

    def retain(self, keep: int) -> None:
        """Removes checkpoints older than the `keep` newest valid ones.

        Damaged ones count for nothing: they cannot push out the last good one. A checkpoint that
        this process did not write is hashed once. What a newer version wrote neither counts nor
        goes.
        """
        valid = 0
        for path in list_steps(self.path):
            if path not in self._known_valid and _is_of_newer_format(path):
                continue
            if valid >= keep:
                self._remove(path)
            elif self._is_valid(path):
                valid += 1

    def set_aside_after(self, step: int) -> None:
        """Renames checkpoints of later steps, so that they are neither resumed nor counted."""
        for path in list_steps(self.path):
            if (step_of(path) or 0) > step:
                aside = path.with_name(f"{path.name}.set-aside-{uuid4().hex[:8]}")
                path.rename(aside)
                self._logger.warning("renamed %s to %s: training goes on before it", path, aside)
        sync_directory(self.path)

    def _is_valid(self, path: Path) -> bool:
        if path not in self._known_valid:
            problems = find_problems(path)
            if problems:
                self._logger.error("damaged checkpoint %s: %s", path, "; ".join(problems))
                return False
            self._known_valid.add(path)
        return True

    def _remove(self, path: Path) -> None:
        # Renamed first: a removal cut short must not leave a damaged "step-N".
        doomed = path.with_name(f"{path.name}.tmp-{uuid4().hex}")
        try:
            path.rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            # The new checkpoint is safe; one too many is no reason to end a run.
            self._logger.error("cannot remove the old checkpoint %s: %s", path, error)
        self._known_valid.discard(path)

    @staticmethod
    def _try_lock(descriptor: int) -> bool:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _is_of_newer_format(path: Path) -> bool:
    try:
        refuse_newer_format(path)
    except NewerFormatError:
        return True
    return False
