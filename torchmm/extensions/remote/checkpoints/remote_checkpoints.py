"""Checkpoints at a URL: upload, download and retention.

    ADDRESS/step-200-1f3a5c7e9b0d/
      rank-00000.safetensors ...  the files of step-200, unchanged
      index.json, state.json
      MANIFEST.json               written last, marks the checkpoint as complete

The name of a folder ends with the first digits of the SHA-256 of the manifest. Two checkpoints
therefore never share a folder, regardless of interrupted uploads by this run or another run of the
same name. An interrupted upload starts again and overwrites its files. Object stores cannot rename
objects. If a checkpoint is set aside, its manifest, a few kilobytes, is copied to another name
instead.

This module is the view of one process and does not import torch. It uses the same clients as the
data loader (`torchmm/extensions/remote/storage/store_client.py`). Local paths are supported like
URLs.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from torchmm.common.errors import CheckpointError, DataError
from torchmm.common.files import add_path_to_os_errors
from torchmm.data.files.urls import parse_url, redact_urls
from torchmm.extensions.remote.storage.store_client import LOCAL_ROOT, MissingError, StoreClient
from torchmm.recipe.data_section import is_address, local_path
from torchmm.training.checkpoint.manifest import (
    MANIFEST_NAME,
    NewerFormatError,
    file_problem,
    parse_manifest,
)
from torchmm.training.checkpoint.store import (
    is_upload_folder,
    step_of_upload_folder,
    upload_folder_name,
)

_SET_ASIDE_INFIX = "set-aside"
_REQUEST_BYTES = 16 << 20

Folders = dict[str, dict[str, int]]
"""Maps a folder to the sizes of its objects in bytes."""


class StoreError(CheckpointError):
    """Error of remote storage that rejects a request, is full or does not respond.

    The uploaded checkpoints may be intact.
    """


class RemoteCheckpoints:
    """The uploaded checkpoints of one run, as one process uses them.

    Args:
        address: Folder of the checkpoints: `s3://bucket/runs/NAME`, `file:///PATH` or a path.
        retry_timeout_s: Time in seconds after which a failing request is not repeated.
        logger: Logger of the run.

    Raises:
        ConfigError: The library that reads the URL is not installed.
        ValueError: It is a `file://` URL of another host.
    """

    def __init__(self, address: str, retry_timeout_s: float, logger: logging.Logger) -> None:
        target_path = address
        if not is_address(address):
            target_path = f"{LOCAL_ROOT}{local_path(address).absolute()}"
        where = parse_url(target_path)
        self.address = redact_urls(address)
        self._path = where.path
        self._client = StoreClient(where.root, retry_timeout_s, "checkpoint.remote_dir")
        self._logger = logger

    def committed(self) -> list[str]:
        """Return the folders that have a manifest, which may be damaged, newest first."""
        return _committed_folders(self._folders())

    def manifest(self, folder: str) -> tuple[bytes, dict[str, Any]]:
        """Return the manifest of a checkpoint as bytes and as an object.

        Raises:
            NewerFormatError: A newer version wrote the manifest.
            StoreError: The remote storage does not respond.
            CheckpointError: The manifest is missing, altered, or of another checkpoint.
        """
        name = f"{self.address}/{folder}/{MANIFEST_NAME}"
        with _convert_store_errors():
            try:
                info = self._client.stat(self._object(folder, MANIFEST_NAME))
                data = self._client.read(info.path, 0, info.size, info.version)
            except MissingError:
                raise CheckpointError(f"{name} is missing") from None
        manifest = parse_manifest(data, name)
        if upload_folder_name(manifest) != folder:
            raise CheckpointError(
                f"{name} belongs to {upload_folder_name(manifest)}; the folder may have been "
                "renamed"
            )
        return data, manifest

    def fetch(self, folder: str, entry: dict[str, Any], target: Path, present: Path) -> str | None:
        """Download a file of a checkpoint. Return its problem, or None.

        Args:
            folder: Folder of the checkpoint.
            entry: Entry of the file in the manifest.
            target: Path to write.
            present: Path that may have the same file, which is then linked.

        Raises:
            StoreError: The remote storage does not respond.
            OSError: The file cannot be written.
        """
        if file_problem(present, entry) is None:
            with suppress(OSError):  # the paths are on different file systems
                os.link(present, target)
                return None
        target_path = self._object(folder, target.name)
        name = f"{self.address}/{folder}/{target.name}"
        with _convert_store_errors():
            try:
                info = self._client.stat(target_path)
                if info.size != entry["bytes"]:
                    return f"{name} has {info.size} bytes, but the manifest lists {entry['bytes']}"
                with add_path_to_os_errors(target, info.size), target.open("xb") as file:
                    for start in range(0, info.size, _REQUEST_BYTES):
                        end = min(start + _REQUEST_BYTES, info.size)
                        file.write(self._client.read(target_path, start, end, info.version))
                    file.flush()
                    os.fsync(file.fileno())
            except MissingError:
                return f"{name} is missing"
        problem = file_problem(target, entry)
        return None if problem is None else f"{name} after download: {problem}"

    def put(self, folder: str, file: Path) -> int:
        """Upload a file of a checkpoint, and return its size in bytes.

        Raises:
            StoreError: The remote storage rejects the file.
            OSError: The file cannot be read.
        """
        with _convert_store_errors():
            self._client.write(self._object(folder, file.name), file)
        return file.stat().st_size

    def commit(self, folder: str, data: bytes) -> None:
        """Upload the manifest of a checkpoint after all of its files, whose sizes are checked.

        If that fails, no manifest remains, so that the folder is not committed.

        Args:
            folder: Folder of the checkpoint.
            data: Content of the manifest.

        Raises:
            StoreError: The remote storage rejects the manifest, or an uploaded file has a different
                size.
        """
        files = parse_manifest(data, folder)["files"]
        uploaded = self._folders().get(folder, {})
        for name, entry in files.items():
            if uploaded.get(name) != entry["bytes"]:
                raise StoreError(
                    f"{self.address}/{folder}/{name} has {uploaded.get(name, 'no')} bytes after "
                    f"an upload of {entry['bytes']}"
                )
        target_path = self._object(folder, MANIFEST_NAME)
        with _convert_store_errors():
            try:
                self._client.write(target_path, data)
            except DataError:
                with suppress(DataError):  # the first error has the reason
                    self._client.remove(target_path)
                raise
            for name in uploaded:
                if name.startswith("."):  # from a process that was killed during a write
                    self._client.remove(self._object(folder, name))

    def is_committed(self, folder: str) -> bool:
        """Return True if the manifest is intact and all files have the sizes that it lists.

        The SHA-256 of the files is compared when they are downloaded.

        Raises:
            NewerFormatError: A newer version wrote the manifest.
            StoreError: The remote storage does not respond.
        """
        uploaded = self._folders().get(folder, {})
        return MANIFEST_NAME in uploaded and self._has_all_files(folder, uploaded)

    def retain(self, keep: int, newest_folder: str, best: Collection[int] = ()) -> None:
        """Remove checkpoints older than the `keep` newest complete ones, and unfinished uploads.

        A checkpoint is complete if all files have the sizes of its manifest. Checkpoints of newer
        versions and checkpoints that were set aside are neither counted nor removed.

        Args:
            keep: Number of checkpoints to retain.
            newest_folder: Folder that was committed last, whose files need not be compared.
            best: Steps of further checkpoints to retain.

        Raises:
            StoreError: The remote storage rejects a request. Too many checkpoints may remain, never
                too few.
        """
        folders = self._folders()
        newest_first = _committed_folders(folders)
        num_complete = 0
        for folder in newest_first:
            if folder == newest_folder:
                num_complete += 1
                continue
            try:
                is_complete = self._has_all_files(folder, folders[folder])
            except NewerFormatError:
                continue
            if num_complete >= keep and step_of_upload_folder(folder) not in best:
                self.discard(folder, folders)
            num_complete += is_complete
        for folder in set(folders) - set(newest_first) - {newest_folder}:
            if not any(_SET_ASIDE_INFIX in name for name in folders[folder]):
                self._logger.warning("removing %s/%s, an incomplete upload", self.address, folder)
                self.discard(folder, folders)

    def set_aside_after(self, step: int, but: str | None) -> None:
        """Rename the manifests of this step and later steps, except in folder `but`.

        Raises:
            StoreError: The remote storage rejects a request.
        """
        for folder in self.committed():
            if step_of_upload_folder(folder) < step or folder == but:
                continue
            name = MANIFEST_NAME.replace(".", f".{_SET_ASIDE_INFIX}-{uuid4().hex[:8]}.")
            with _convert_store_errors():
                info = self._client.stat(self._object(folder, MANIFEST_NAME))
                data = self._client.read(info.path, 0, info.size, info.version)
                self._client.write(self._object(folder, name), data)
                self._client.remove(self._object(folder, MANIFEST_NAME))
            self._logger.warning(
                "renamed %s of %s/%s to %s, because training continues from an earlier step",
                MANIFEST_NAME,
                self.address,
                folder,
                name,
            )

    def discard(self, folder: str, folders: Folders | None = None) -> None:
        """Remove all objects of a folder, the manifest first. May raise StoreError."""
        names = (self._folders() if folders is None else folders).get(folder, {})
        with _convert_store_errors():
            for name in sorted(names, key=lambda name: name != MANIFEST_NAME):
                self._client.remove(self._object(folder, name))

    def _has_all_files(self, folder: str, uploaded: dict[str, int]) -> bool:
        try:
            _, manifest = self.manifest(folder)
        except (NewerFormatError, StoreError):
            raise
        except CheckpointError as error:
            self._logger.error("corrupt checkpoint: %s", error)
            return False
        return all(
            uploaded.get(name) == entry["bytes"] for name, entry in manifest["files"].items()
        )

    def _folders(self) -> Folders:
        folders: Folders = defaultdict(dict)
        with _convert_store_errors():
            for info in self._client.list(self._path):
                inside = info.path.removeprefix(f"{self._path}/")
                folder, _, name = inside.partition("/")
                if name and is_upload_folder(folder):
                    folders[folder][name] = info.size
        return folders

    def _object(self, folder: str, name: str) -> str:
        return f"{self._path}/{folder}/{name}"


def _committed_folders(folders: Folders) -> list[str]:
    committed = [folder for folder, objects in folders.items() if MANIFEST_NAME in objects]
    return sorted(
        committed, key=lambda folder: (step_of_upload_folder(folder), folder), reverse=True
    )


@contextmanager
def _convert_store_errors() -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise StoreError(str(error)) from error
