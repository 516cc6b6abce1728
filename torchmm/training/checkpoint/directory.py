"""The `checkpoints` directory of a run: who may write to it, and what stays in it.

Names: "step-N" is a committed checkpoint, "step-N.tmp-ID" one being written, "step-N.set-aside-ID"
one of a course of training that was given up. Only rank 0 writes here. No torch.
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
    refuse_newer_format,
    step_of,
)

_CLAIM_WAIT_S = 10.0
_CLAIM_RETRY_S = 0.2


class InUseError(CheckpointError):
    """Another run, which is alive, has the run directory; all in it is that run's."""


class CheckpointDirectory:
    """Rank 0's view of `path`, or that of one rank of each node on whose own disk it is.

    Args:
        partial: it has what one node's ranks have written; the whole is elsewhere.
    """

    def __init__(self, path: Path, logger: logging.Logger, partial: bool = False) -> None:
        self.path = path
        self._logger = logger
        self._partial = partial
        self._lock: int | None = None
        self._known_valid: set[Path] = set()

    def try_claim(self) -> bool:
        """Makes this process the only writer, unless another one is; whether it is now.

        A POSIX record lock vanishes with its process, however that ends, also on a network file
        system, and is not inherited by forked data workers.
        """
        if self._lock is None:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._lock_file, os.O_RDWR | os.O_CREAT, 0o644)
            if not self._try_lock(lock):
                os.close(lock)
                return False
            self._lock = lock
            holder = f"process {os.getpid()} on {os.uname().nodename}{_meeting_place()}\n"
            with suppress(OSError):  # no room for it on a full disk, and the lock is what counts
                os.truncate(lock, 0)
                os.pwrite(lock, holder.encode(), 0)
        return True

    def claim(self) -> None:
        """`try_claim` that waits briefly for a predecessor that is just dying.

        Then removes what dead writers left half done: holding the lock proves that no temporary
        directory belongs to a live run.

        Raises:
            InUseError: another process holds the lock.
        """
        deadline = time.monotonic() + _CLAIM_WAIT_S
        while not self.try_claim():
            if time.monotonic() > deadline:
                raise InUseError(
                    f"{self.path} is in use by another run ({self._holder()}); stop it, or set "
                    "another name"
                )
            time.sleep(_CLAIM_RETRY_S)
        for stale in self.path.glob("step-*.tmp-*"):
            self._logger.warning("removing %s, left by a save that did not finish", stale)
            shutil.rmtree(stale)

    def is_of_this_run(self) -> bool:
        """Whether this process has claimed it, or one that it meets, going by the lock file.

        No two live runs meet at the same address.
        """
        place = _meeting_place()
        return self._lock is not None or (bool(place) and self._holder().endswith(place))

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

    def replace(self, temporary: Path) -> Path:
        """`commit`; what has that name already is set aside."""
        final = temporary.with_name(temporary.name.partition(".tmp-")[0])
        if final.exists():
            self._set_aside(final, "a whole copy came in its place")
        return self.commit(temporary)

    def best(self, of: BestConfig | None) -> list[int]:
        """Steps of the best valid checkpoints, by the figures in their manifests; the earlier of
        two that are equally good."""
        if of is None:
            return []
        found = []
        for path in list_steps(self.path):
            with suppress(CheckpointError):
                value = read_manifest(path).get("figures", {}).get(of.metric)
                if value is not None and self._is_valid(path):
                    found.append((of.badness(value), step_of(path) or 0))
        return [step for _, step in sorted(found)[: of.count]]

    def retain(self, keep: int, in_use: Path | None = None, best: Collection[int] = ()) -> None:
        """Removes checkpoints older than the `keep` newest valid ones.

        Damaged ones count for nothing: they cannot push out the last good one. A checkpoint that
        this process did not write is hashed once. What a newer version wrote neither counts nor
        goes.

        Args:
            in_use: is being copied, and goes another time.
            best: steps of those that stay.
        """
        valid = 0
        for path in list_steps(self.path):
            if path not in self._known_valid and _is_of_newer_format(path):
                continue
            if valid >= keep and path != in_use and step_of(path) not in best:
                self._remove(path)
            elif self._is_valid(path):
                valid += 1

    def set_aside_after(self, step: int) -> None:
        """Renames checkpoints of later steps, so that they are neither resumed nor counted, and
        what else has their names."""
        for path in self.path.glob("step-*"):
            if (found := step_of(path)) is not None and found > step:
                self._set_aside(path, "training goes on before it")
        sync_directory(self.path)

    def _set_aside(self, path: Path, why: str) -> None:
        aside = path.with_name(f"{path.name}.set-aside-{uuid4().hex[:8]}")
        path.rename(aside)
        self._known_valid.discard(path)
        self._logger.warning("renamed %s to %s: %s", path, aside, why)

    def _is_valid(self, path: Path) -> bool:
        if path not in self._known_valid:
            problems = _manifest_problems(path) if self._partial else find_problems(path)
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

    @property
    def _lock_file(self) -> Path:
        return self.path / ".lock"

    def _holder(self) -> str:
        """Who has the lock, or had it last. Not for who has it: closing the file gives it up."""
        assert self._lock is None
        try:
            return self._lock_file.read_text(errors="replace").strip()
        except OSError:
            return "unknown"

    @staticmethod
    def _try_lock(descriptor: int) -> bool:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _meeting_place() -> str:
    """Where the ranks of this run meet, if there are several."""
    address = os.environ.get("MASTER_ADDR")
    port = os.environ.get("MASTER_PORT")
    return f", ranks meet at {address}:{port}" if address and port else ""


def _manifest_problems(path: Path) -> list[str]:
    try:
        read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    return []


def _is_of_newer_format(path: Path) -> bool:
    try:
        refuse_newer_format(path)
    except NewerFormatError:
        return True
    return False
