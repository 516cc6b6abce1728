"""The entry of "checkpoint_stores": uploaded checkpoints of a run, as all ranks use them.

A checkpoint is downloaded to every node that requires it. The ranks that share a directory divide
the files. A directory is renamed to "step-N" when all of its bytes match the manifest, so that a
downloaded checkpoint is the same as any other. Tensors are not loaded directly from remote storage,
because damage would be detected during loading, and only on the ranks that read the damaged files.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from uuid import uuid4

from torchmm.common.errors import CheckpointError
from torchmm.common.files import sync_directory, write_synced
from torchmm.extensions.remote.checkpoints.background_uploads import (
    UPLOAD_TIMEOUT_S,
    BackgroundUploads,
)
from torchmm.extensions.remote.checkpoints.remote_checkpoints import RemoteCheckpoints, StoreError
from torchmm.extensions.remote.section import StorageConfig
from torchmm.parallel.health.peers import SideGroup
from torchmm.recipe.data_section import DataConfig
from torchmm.training.checkpoint.directory import CheckpointDirectory
from torchmm.training.checkpoint.manifest import MANIFEST_NAME, NewerFormatError
from torchmm.training.checkpoint.save_metrics import SaveMeter
from torchmm.training.checkpoint.shared_filesystem import DirectoryGroup


class StoredCheckpoints(RemoteCheckpoints):
    """The uploaded checkpoints of one run, with the collective operations."""

    def __init__(self, address: str, data: DataConfig, logger: logging.Logger) -> None:
        super().__init__(address, StorageConfig.from_parent(data).retry_timeout_s, logger)

    def fetch_checkpoint(
        self, folder: str, directory: CheckpointDirectory, site: DirectoryGroup, group: SideGroup
    ) -> tuple[Path, list[str]]:
        """Download a checkpoint into the directory of every site, see `CheckpointStore`.

        All ranks return or raise the same.

        Raises:
            NewerFormatError: A newer version wrote the checkpoint.
            CheckpointError: The remote storage does not respond, or the disk is full.
        """
        try:
            data, manifest = group.run_on_rank_zero(lambda: self.manifest(folder))
        except (NewerFormatError, StoreError):
            raise
        except CheckpointError as error:
            return directory.path, [str(error)]
        final = directory.path / f"step-{manifest['step']}"
        temporary = final.with_name(
            group.run_on_rank_zero(lambda: f"{final.name}.tmp-{uuid4().hex}")
        )
        site.run_on_local_leaders(temporary.mkdir)

        failure: str | None = None
        problems: list[str] = []
        try:
            for name in sorted(manifest["files"])[site.rank :: site.size]:
                entry = manifest["files"][name]
                problem = self.fetch(folder, entry, temporary / name, final / name)
                problems += [] if problem is None else [problem]
        except (StoreError, OSError) as error:
            failure = str(error)
        of_ranks = group.gather((problems, failure))
        failure = next((error for _, error in of_ranks if error is not None), None)
        problems = sorted({problem for found, _ in of_ranks for problem in found})
        if failure is not None or problems:
            site.run_on_local_leaders(lambda: shutil.rmtree(temporary, ignore_errors=True))
            if failure is not None:
                raise CheckpointError(f"cannot download {self.address}/{folder}: {failure}")
            return final, problems

        def commit() -> None:
            write_synced(temporary / MANIFEST_NAME, data)
            sync_directory(temporary)
            directory.replace(temporary)

        site.run_on_local_leaders(commit)
        return final, []

    def start_uploads(
        self, keep: int, best: Callable[[], Collection[int]], meter: SaveMeter
    ) -> BackgroundUploads:
        """Return the uploads of this run, see `CheckpointStore`."""
        group = SideGroup.create(UPLOAD_TIMEOUT_S)
        return BackgroundUploads(self, keep, best, group, meter, self._logger)
