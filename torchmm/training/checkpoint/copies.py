"""The interface to copies of checkpoints at addresses, and the names of copies.

An extension adds copies with an entry of the table "checkpoint_stores". The name of the entry is
"addresses", and its target a class with the parameters of `open_store` that implements
`CheckpointStore`.
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
from torchmm.training.checkpoint.figures import SaveMeter
from torchmm.training.checkpoint.manifest import digest_of
from torchmm.training.checkpoint.site import Site

_FOLDER = re.compile(r"step-(\d+)-([0-9a-f]{12})")


class Uploads(Protocol):
    """Copies that run in the background. All ranks call all methods in the same order."""

    complaint: str
    """Checkpoint that could not be copied, and the reason. Empty if there is none."""

    @property
    def in_use(self) -> Path | None:
        """Checkpoint that is being copied, as far as this rank knows."""
        ...

    def committed(self, path: Path, now: bool) -> None:
        """Register a new checkpoint.

        Args:
            path: The checkpoint.
            now: Whether to copy it now. True only if no rank is copying.
        """
        ...

    def resumed(self, path: Path) -> None:
        """Copy the checkpoint that training continues from, unless the store has it. Collective."""
        ...

    def finish(self) -> None:
        """Wait for the current copy, then copy the newest checkpoint if that was skipped."""
        ...

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the current copy."""
        ...


class CheckpointStore(Protocol):
    """The checkpoints of one run at an address.

    All methods raise CheckpointError if the store rejects a request or does not respond.
    """

    address: str
    """Address without credentials, for logs."""

    def committed(self) -> list[str]:
        """Return the folders that have a manifest, which may be damaged, newest first."""
        ...

    def set_aside_after(self, step: int, but: str | None) -> None:
        """Rename the manifests of this step and later steps, except in folder `but`."""
        ...

    def fetch_checkpoint(
        self, folder: str, directory: CheckpointDirectory, site: Site, group: SideGroup
    ) -> tuple[Path, list[str]]:
        """Copy a checkpoint into the directory of every site. Collective.

        Returns:
            The path of the checkpoint, and its problems. It is not copied if there are problems.
        """
        ...

    def start_uploads(
        self, keep: int, best: Callable[[], Collection[int]], meter: SaveMeter
    ) -> Uploads:
        """Return the copies of this run. Collective.

        Args:
            keep: Number of checkpoints to retain in the store.
            best: Function that returns the steps of further checkpoints to retain.
            meter: Receives durations and sizes.
        """
        ...


def open_store(address: str, data: DataConfig, logger: logging.Logger) -> CheckpointStore:
    """Return the checkpoints at an address.

    Args:
        address: Folder of the checkpoints: an address or a local path.
        data: Section of the recipe with the settings of stores.
        logger: Logger of the run.

    Raises:
        ConfigError: The library that reads the address is not installed.
        ValueError: It is a `file://` address of another host.
    """
    store: CheckpointStore = load_entry("checkpoint_stores", "addresses")(address, data, logger)
    return store


def folder_of(manifest: dict[str, Any]) -> str:
    """Return the name of the folder that a copy of a checkpoint has."""
    return f"step-{manifest['step']}-{digest_of(manifest)[:12]}"


def is_in_store(address: str) -> bool:
    """Return True if `checkpoint.resume` names a copy in a store, also one in a local directory."""
    return is_address(address) or is_folder(address.rstrip("/").rpartition("/")[2])


def is_folder(name: str) -> bool:
    """Return True if a name is the name of a copy."""
    return _FOLDER.fullmatch(name) is not None


def step_of_folder(folder: str) -> int:
    """Return the step of the copy in a folder; raise CheckpointError for other names."""
    match = _FOLDER.fullmatch(folder)
    if match is None:
        raise CheckpointError(
            f"{folder} is not a checkpoint folder; use a folder named step-N-DIGITS"
        )
    return int(match[1])
