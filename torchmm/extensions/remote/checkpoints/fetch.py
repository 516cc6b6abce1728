"""Brings a checkpoint from a store to where it can be loaded, on every node that needs a copy.

The ranks that see the same directory divide the files among themselves. Nothing is called "step-N"
before each of its bytes was compared with the manifest, so what was fetched is a checkpoint like
any other. Rejected: reading tensors out of the store, by which damage would be found in the middle
of loading, and only by the ranks that read the damaged part.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from uuid import uuid4

from torchmm.common.errors import CheckpointError
from torchmm.common.files import sync_directory, write_synced
from torchmm.extensions.remote.checkpoints.remote import RemoteCheckpoints, StoreError
from torchmm.parallel.health.peers import SideGroup
from torchmm.training.checkpoint.directory import CheckpointDirectory
from torchmm.training.checkpoint.manifest import MANIFEST_NAME, NewerFormatError
from torchmm.training.checkpoint.site import Site


def fetch_checkpoint(
    remote: RemoteCheckpoints,
    folder: str,
    directory: CheckpointDirectory,
    site: Site,
    group: SideGroup,
) -> tuple[Path, list[str]]:
    """Copies a checkpoint into the directory of every site; where it is then, and what is wrong
    with it, in which case it is nowhere. Collective; all ranks return or raise the same.

    Raises:
        NewerFormatError: a newer version has written it.
        CheckpointError: the store does not give it, or there is no room here.
    """
    try:
        data, manifest = group.on_rank_0(lambda: remote.manifest(folder))
    except (NewerFormatError, StoreError):
        raise
    except CheckpointError as error:
        return directory.path, [str(error)]
    final = directory.path / f"step-{manifest['step']}"
    temporary = final.with_name(group.on_rank_0(lambda: f"{final.name}.tmp-{uuid4().hex}"))
    site.on_leaders(temporary.mkdir)
    names = sorted(manifest["files"])[site.rank :: site.size]
    told = group.gather(_fetch_files(remote, folder, manifest["files"], names, temporary))
    failure = next((error for _, error in told if error is not None), None)
    problems = sorted({problem for found, _ in told for problem in found})
    if failure is not None or problems:
        site.on_leaders(lambda: shutil.rmtree(temporary, ignore_errors=True))
        if failure is not None:
            raise CheckpointError(f"cannot fetch {remote.address}/{folder}: {failure}")
        return final, problems

    def commit() -> None:
        write_synced(temporary / MANIFEST_NAME, data)
        sync_directory(temporary)
        directory.replace(temporary)

    site.on_leaders(commit)
    return final, []


def _fetch_files(
    remote: RemoteCheckpoints,
    folder: str,
    files: dict[str, Any],
    names: list[str],
    temporary: Path,
) -> tuple[list[str], str | None]:
    """What is wrong with these files, and why they could not be had."""
    present = temporary.with_name(temporary.name.partition(".tmp-")[0])
    problems = []
    try:
        for name in names:
            problem = remote.fetch(folder, files[name], temporary / name, present / name)
            problems += [problem] if problem is not None else []
    except (StoreError, OSError) as error:
        return problems, str(error)
    return problems, None
