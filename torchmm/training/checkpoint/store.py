"""Interface for uploaded checkpoints in remote storage, and the names of their folders.

An extension provides remote storage with an entry of the table "checkpoint_stores". The name of the
entry is "addresses". Its target is a class that implements `CheckpointStore` and has the parameters
of `open_store`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

from torchmm.common.errors import CheckpointError
from torchmm.common.extensions import load_entry
from torchmm.parallel.health.peers import SideGroup
from torchmm.recipe.data_section import DataConfig, is_address
from torchmm.training.checkpoint.directory import CheckpointDirectory
from torchmm.training.checkpoint.manifest import manifest_digest
from torchmm.training.checkpoint.save_metrics import SaveMeter
from torchmm.training.checkpoint.shared_filesystem import DirectoryGroup

_FOLDER = re.compile(r"step-(\d+)-([0-9a-f]{12})")


class Uploads(Protocol):
    """Uploads that run in the background. All ranks call all methods in the same order."""

    status_warning: str
    """Checkpoint that could not be uploaded, and the reason. Empty without failures."""

    @property
    def in_use(self) -> Path | None:
        """Checkpoint that is being uploaded, as far as this rank has been notified."""
        ...

    def committed(self, path: Path, now: bool) -> None:
        """Register a new checkpoint.

        Args:
            path: The checkpoint.
            now: Whether to upload it now. True only if no rank is uploading.
        """
        ...

    def resumed(self, path: Path) -> None:
        """Upload the checkpoint that training resumes from, unless it is stored. Collective."""
        ...

    def finish(self) -> None:
        """Wait for the current upload, then upload the newest checkpoint if it was skipped."""
        ...

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the current upload."""
        ...


class CheckpointStore(Protocol):
    """The uploaded checkpoints of one run.

    All methods raise CheckpointError if the remote storage rejects a request or does not respond.
    """

    address: str
    """URL or path without credentials, for logs."""

    def committed(self) -> list[str]:
        """Return the folders that have a manifest, which may be damaged, newest first."""
        ...

    def set_aside_after(self, step: int, but: str | None) -> None:
        """Rename the manifests of this step and later steps, except in folder `but`."""
        ...

    def fetch_checkpoint(
        self, folder: str, directory: CheckpointDirectory, site: DirectoryGroup, group: SideGroup
    ) -> tuple[Path, list[str]]:
        """Download a checkpoint into the directory of every site. Collective.

        Returns:
            The path of the checkpoint, and its problems. It is not downloaded if there are
            problems.
        """
        ...

    def start_uploads(
        self, keep: int, best: Callable[[], Collection[int]], meter: SaveMeter
    ) -> Uploads:
        """Return the uploads of this run. Collective.

        Args:
            keep: Number of newest uploaded checkpoints to retain.
            best: Function that returns the steps of further checkpoints to retain.
            meter: Receives durations and sizes.
        """
        ...


def open_store(address: str, data: DataConfig, logger: logging.Logger) -> CheckpointStore:
    """Return the uploaded checkpoints at a URL or path.

    Args:
        address: Folder of the checkpoints: a URL or a local path.
        data: Section of the recipe with the settings of remote storage.
        logger: Logger of the run.

    Raises:
        ConfigError: The library that reads the URL is not installed.
        ValueError: It is a `file://` URL of another host.
    """
    store: CheckpointStore = load_entry("checkpoint_stores", "addresses")(address, data, logger)
    return store


def upload_folder_name(manifest: dict[str, Any]) -> str:
    """Return the folder name of an uploaded checkpoint."""
    return f"step-{manifest['step']}-{manifest_digest(manifest)[:12]}"


def is_uploaded_checkpoint(address: str) -> bool:
    """Return True if `checkpoint.resume` names an uploaded checkpoint, including local folders."""
    return is_address(address) or is_upload_folder(address.rstrip("/").rpartition("/")[2])


def is_upload_folder(name: str) -> bool:
    """Return True if a name is the folder name of an uploaded checkpoint."""
    return _FOLDER.fullmatch(name) is not None


def step_of_upload_folder(folder: str) -> int:
    """Return the step of an uploaded checkpoint. Raise CheckpointError for other folder names."""
    match = _FOLDER.fullmatch(folder)
    if match is None:
        raise CheckpointError(
            f"{folder} is not a checkpoint folder; use a folder named step-N-DIGITS"
        )
    return int(match[1])
