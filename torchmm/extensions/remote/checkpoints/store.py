"""Copies of checkpoints at addresses; see `CheckpointStore`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path

from torchmm.extensions.remote.checkpoints.fetch import fetch_checkpoint
from torchmm.extensions.remote.checkpoints.remote import RemoteCheckpoints
from torchmm.extensions.remote.checkpoints.upload import UPLOAD_TIMEOUT_S, BackgroundUploads
from torchmm.extensions.remote.section import StorageConfig
from torchmm.parallel.health.peers import SideGroup
from torchmm.recipe.data_section import DataConfig
from torchmm.training.checkpoint.directory import CheckpointDirectory
from torchmm.training.checkpoint.figures import SaveMeter
from torchmm.training.checkpoint.site import Site


class StoredCheckpoints(RemoteCheckpoints):
    """The checkpoints of one run in a store, with the operations of all ranks."""

    def __init__(self, address: str, data: DataConfig, logger: logging.Logger) -> None:
        super().__init__(address, StorageConfig.of(data).give_up_s, logger)

    def fetch_checkpoint(
        self, folder: str, directory: CheckpointDirectory, site: Site, group: SideGroup
    ) -> tuple[Path, list[str]]:
        """Copy a checkpoint into the directory of every site; see `CheckpointStore`."""
        return fetch_checkpoint(self, folder, directory, site, group)

    def start_uploads(
        self, keep: int, best: Callable[[], Collection[int]], meter: SaveMeter
    ) -> BackgroundUploads:
        """Return the copies of this run; see `CheckpointStore`."""
        group = SideGroup.create(UPLOAD_TIMEOUT_S)
        return BackgroundUploads(self, keep, best, group, meter, self._logger)
