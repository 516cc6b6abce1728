"""Source formats of extensions, and checks that are common to all formats.

An extension adds a format with an entry of the table "source_formats". The name of the entry is a
value of `format` in [[data.sources]], and its target a class that implements `SourceFormat`. The
argument of `is_used` is a `SourceConfig`. It returns True if the source may have this format.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torchmm.common.errors import ConfigError, DataError
from torchmm.common.extensions import NOT_INSTALLED, find_entries
from torchmm.data.files.offset_cache import OffsetCache
from torchmm.data.files.remote_files import AnyFile, FileSystem, RemotePath
from torchmm.data.files.urls import is_glob, parse_url
from torchmm.data.sources.source_options import MapSource, Split
from torchmm.recipe.data_section import SourceConfig, is_address

ENERGON_META = ".nv-meta"
"""Directory that identifies an Energon dataset."""


class SourceFormat(Protocol):
    """Source format of an extension."""

    def find_files(self, config: SourceConfig, storage: FileSystem | None) -> list[AnyFile] | None:
        """Return the files of a source, or None if the source does not have this format.

        The list may be empty if `open` finds the files.

        Args:
            config: The source.
            storage: File system of the source. None if the source is local.

        Raises:
            ConfigError: A key of the source does not apply to this format.
            DataError: The source cannot be read.
        """
        ...

    def open(
        self,
        config: SourceConfig,
        files: Sequence[AnyFile],
        fingerprint: str,
        offset_cache: OffsetCache,
    ) -> MapSource:
        """Open a source for random access.

        Args:
            config: The source.
            files: Result of `find_files`.
            fingerprint: Fingerprint of the files.
            offset_cache: Cache of the positions of records.

        Raises:
            DataError: The source cannot be read.
        """
        ...


def find_format(
    config: SourceConfig, storage: FileSystem | None
) -> tuple[str, list[AnyFile]] | None:
    """Return the extension format and files of a source, or None if no format matches.

    Raises:
        ConfigError: The required extension is not installed, or a key does not apply.
        DataError: The source cannot be read.
    """
    for entry in find_entries("source_formats"):
        if entry.is_used(config):
            reader: SourceFormat = entry.load()()
            files = reader.find_files(config, storage)
            if files is not None:
                return entry.name, files
    _check_installed(config, storage)
    return None


def _check_installed(config: SourceConfig, storage: FileSystem | None) -> None:
    """Raise ConfigError if a source requires the extension "formats", which is not installed.

    Without this check, an Energon dataset would be read as plain tar files.
    """
    missing = {"energon", "lance"} - {entry.name for entry in find_entries("source_formats")}
    name = config.format
    if name == "auto" and "lance" in missing and config.path.rstrip("/").endswith(".lance"):
        name = "lance"
    elif name == "auto" and "energon" in missing and not is_glob(config.path):
        name = "energon" if is_energon(source_directory(config, storage)) else "auto"
    if name in missing:
        text = NOT_INSTALLED.format("formats")
        raise ConfigError(f"source {config.path!r}: format = {name!r}: {text}")


def is_energon(directory: Path | RemotePath) -> bool:
    """Return True if a directory is an Energon dataset."""
    if isinstance(directory, Path):
        return (directory / ENERGON_META).is_dir()
    file = directory.join(f"{ENERGON_META}/dataset.yaml")
    return file is not None and file.find() is not None


def source_directory(config: SourceConfig, storage: FileSystem | None) -> Path | RemotePath:
    """Return the path of a source."""
    if is_address(config.path):
        assert storage is not None, "see open_file_system"
        return RemotePath(url_with_revision(config), storage)
    return Path(config.path).expanduser()


def url_with_revision(config: SourceConfig) -> str:
    """Return the URL of a source, with `revision` inserted into hf:// URLs."""
    if config.revision is None or not config.path.startswith("hf://"):
        return config.path
    url = parse_url(config.path)
    parts = url.path.split("/")
    at = 1 if url.bucket in ("datasets", "spaces", "buckets") else 0
    if at >= len(parts) or "@" in parts[at]:
        raise ConfigError(
            f"source {config.path!r}: revision = {config.revision!r}, but the path has its "
            "own revision or is not a Hub data set; keep one revision"
        )
    parts[at] += f"@{config.revision.replace('/', '%2F')}"
    return f"{url.root}/{'/'.join(parts)}"


def check_hub_keys(config: SourceConfig) -> None:
    """Raise ConfigError if a source that is not a Hub dataset has keys of Hub datasets."""
    if config.config is not None:
        raise ConfigError(
            f"source {config.path!r}: config = {config.config!r} selects a subset of a Hub "
            "data set, but this source is local; remove it, or set `path` to the directory "
            "or files of the subset"
        )
    if config.revision is not None and not config.path.startswith("hf://"):
        raise ConfigError(
            f"source {config.path!r}: revision = {config.revision!r} applies only to Hub data "
            "sets, but this source is local; remove it"
        )


def check_train_split(config: SourceConfig, source: str) -> None:
    """Raise DataError for a split other than "train", the only split of files without one."""
    name = Split.of(config).name
    if name != "train":
        raise DataError(
            f"source {config.path!r}: split = {config.split!r}, but {source} has only the "
            'split "train"; remove `split`, or hold out samples by slices: split = '
            '"train[:90%]" for training, "train[90%:]" for validation'
        )
