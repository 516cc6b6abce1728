"""Sources with random access: local files, remote files and datasets of the Hugging Face Hub.

    source = open_map_source(config, data.index_cache_dir, open_file_system(config.path, data))
    source.read(index)

`resolve_files` finds the format and the files of a source. `open_file_source` opens the formats
that torchmm reads without `datasets`: text, tar, Parquet, folders with metadata, and the formats of
extensions. These readers support local and remote files (`open_regular`).

`datasets` reads Hub datasets, Arrow files, folders without metadata and local Parquet files. Rows
are raw Arrow values, so `datasets` does not decode images or audio. It converts local Parquet files
to Arrow files once. Remote Parquet files are not converted, because this would require disk space
for all files.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets.data_files import NON_WORDS_CHARS, SPLIT_KEYWORDS

from torchmm.common.errors import DataError
from torchmm.common.extensions import find_entry
from torchmm.data.files.offset_cache import OffsetCache
from torchmm.data.files.remote_files import (
    AnyFile,
    FileSystem,
    RemoteFile,
    RemotePath,
)
from torchmm.data.files.sample_files import read_row
from torchmm.data.files.urls import glob_directory, is_glob
from torchmm.data.record_formats.sample import Record, Root
from torchmm.data.sources.decompress import COMPRESSIONS, decompress_to_cache, uncompressed_suffix
from torchmm.data.sources.folders import FolderSource, metadata_files
from torchmm.data.sources.formats import (
    SourceFormat,
    check_hub_keys,
    check_train_split,
    find_format,
    url_with_revision,
)
from torchmm.data.sources.parquet_rows import ParquetSource, count_group_rows
from torchmm.data.sources.source_options import ConfiguredSource, MapSource, SelectedRows, Split
from torchmm.data.sources.tar_samples import WebdatasetSource
from torchmm.data.sources.text_files import CsvFile, TextSource, is_array, open_json
from torchmm.recipe.data_section import DataConfig, SourceConfig, is_address

SUFFIXES = {
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "json": (".jsonl", ".ndjson", ".json"),
    "webdataset": (".tar",),
    "csv": (".csv", ".tsv"),
    "imagefolder": (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
    "videofolder": (".mp4", ".webm", ".mkv", ".mov", ".avi"),
}
TEXT_READERS = {"json": open_json, "csv": CsvFile}
"""Formats whose files may be compressed."""
INDEX_CACHE = DataConfig().index_cache_dir
FOLDER_FORMATS = ("imagefolder", "videofolder")
"""Formats of folders that may have a metadata.jsonl."""

_SPLIT_KEYWORDS = {word: str(split) for split, words in SPLIT_KEYWORDS.items() for word in words}
_SPLIT_NAME = re.compile(
    rf"(?:^|[{NON_WORDS_CHARS}])({'|'.join(_SPLIT_KEYWORDS)})(?=[{NON_WORDS_CHARS}]|$)"
)
"""Pattern of a split in the name of a directory or file, as in `datasets`."""
_COMMIT = re.compile(r"@([0-9a-f]{40})/")

logger = logging.getLogger(__name__)


class ArrowSource:
    """Source of the rows of a `datasets.Dataset` as raw Arrow values.

    Args:
        dataset: Rows of all files.
        root: Directory that image paths are relative to.
        fingerprint: Fingerprint of the files.
        files: Files and their numbers of rows, for messages. Empty if unknown.
    """

    def __init__(
        self,
        dataset: datasets.Dataset,
        root: Root,
        fingerprint: str,
        files: Sequence[tuple[AnyFile, int]] = (),
    ) -> None:
        self._rows = dataset.with_format("arrow")
        self._root = root
        self.fingerprint = fingerprint
        self._files = [str(file) for file, _ in files]
        self._ends = np.cumsum([rows for _, rows in files])

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> Record:
        """Return record `index`."""
        columns = read_row(self._rows[index])
        location = sample_key(columns)
        number = int(np.searchsorted(self._ends, index, side="right"))
        if not location and number < len(self._files):
            before = int(self._ends[number - 1]) if number else 0
            location = f"{self._files[number]} row {index - before}"
        return Record(columns, self._root, location=location)


def sample_key(columns: dict[str, Any]) -> str:
    """Return "SHARD:KEY" of a WebDataset sample, or an empty string for other samples."""
    return f"{columns['__url__']}:{columns['__key__']}" if "__url__" in columns else ""


def open_map_source(
    config: SourceConfig, cache: str = INDEX_CACHE, storage: FileSystem | None = None
) -> MapSource:
    """Open a source for random access.

    Args:
        config: The source.
        cache: Directory for decompressed files (`data.index_cache_dir`).
        storage: File system of the source (`open_file_system`). None if the source is local.

    Raises:
        ConfigError: The cache cannot be written.
        DataError: The source has no readable files, or lacks columns that the recipe requires.
    """
    kind, files = resolve_files(config, storage)
    source: MapSource
    if has_native_reader(kind, files):
        source = open_file_source(config, kind, files, cache)
    else:
        # Checks the footers before `datasets` converts the files.
        rows = [sum(groups) for groups in count_group_rows(files)] if kind == "parquet" else []
        root = source_root(config, files)
        try:
            dataset = load_with_datasets(config, kind, files, streaming=False)
            fingerprint = files_fingerprint(files) if files else str(dataset._fingerprint)
            source = ArrowSource(dataset, root, fingerprint, list(zip(files, rows, strict=False)))
        except DataError as error:
            if kind != "parquet":
                raise
            text = "%s. Its row groups are read one at a time, which is slow; repair the file"
            logger.warning(text, error)
            source = ParquetSource(files, root, files_fingerprint(files))
    # For Hub datasets, `datasets` has already applied the slices.
    if kind != "hub" and Split.of(config).rows is not None:
        source = SelectedRows(source, config)
    return ConfiguredSource(source, config)


def has_native_reader(kind: str, files: Sequence[AnyFile]) -> bool:
    """Return True if torchmm reads the files without `datasets`."""
    return (
        kind in (*TEXT_READERS, "webdataset")
        or find_entry("source_formats", kind) is not None
        or (kind in FOLDER_FORMATS and bool(metadata_files(files)))
        or any(isinstance(file, RemoteFile) for file in files)
    )


def open_file_source(
    config: SourceConfig, kind: str, files: Sequence[AnyFile], cache: str
) -> MapSource:
    """Open a source that torchmm reads without `datasets`.

    Raises:
        ConfigError: The cache cannot be written.
        DataError: A file cannot be read.
    """
    offset_cache = OffsetCache(cache)
    fingerprint = files_fingerprint(files)
    if (entry := find_entry("source_formats", kind)) is not None:
        reader: SourceFormat = entry.load()()
        return reader.open(config, list(files), fingerprint, offset_cache)
    if kind == "webdataset":
        return WebdatasetSource(files, fingerprint, offset_cache)
    root = source_root(config, files)
    if kind == "parquet":
        return ParquetSource(files, root, fingerprint)
    try:
        if kind in FOLDER_FORMATS:
            return FolderSource(kind, files, root, fingerprint)
        opened = [
            TEXT_READERS[kind](f, decompressed_text(f, kind, cache), offset_cache) for f in files
        ]
    except OSError as error:
        text = f"source {config.path!r}: cannot read {error.filename}: {error.strerror}"
        raise DataError(text) from error
    return TextSource(opened, fingerprint)


def decompressed_text(file: AnyFile, kind: str, cache: str) -> AnyFile:
    """Return a file, or its copy in the cache if it is compressed.

    Remote CSV files and JSON arrays are also copied, because they are searched as one text.
    """
    content = decompress_to_cache(file, Path(cache))
    whole = isinstance(content, RemoteFile) and (kind == "csv" or is_array(content))
    return decompress_to_cache(file, Path(cache), whole=True) if whole else content


def load_with_datasets(
    config: SourceConfig, kind: str, files: Sequence[AnyFile], streaming: bool
) -> Any:
    """Return a `datasets.Dataset` or `IterableDataset` of a local source or of the Hub.

    The commit of a Hub dataset is logged, so that users can pin the recipe to it.

    Raises:
        DataError: `datasets` cannot read the source.
    """
    names = [glob.escape(str(f)) for f in files]  # `datasets` expects patterns
    options: dict[str, Any] = {}
    if kind == "hub":
        options = {"split": config.split, "revision": config.revision}
    else:
        if kind in FOLDER_FORMATS:
            names = [glob.escape(str(source_root(config, files))) + "/**"]
            options["drop_labels"] = True
        # Otherwise, `datasets` would infer splits from file names.
        options |= {"data_files": {"train": names}, "split": "train"}
    path = config.path if kind == "hub" else kind
    try:
        dataset: Any = datasets.load_dataset(path, config.config, streaming=streaming, **options)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        origin = (
            "not a local path, so requested from the Hugging Face Hub" if kind == "hub" else kind
        )
        raise DataError(
            f"source {config.path!r} ({origin}, split {config.split!r}) cannot be read: "
            f"{type(error).__name__}: {error}"
        ) from error
    addresses = (getattr(dataset.info, "download_checksums", None) or {}) if kind == "hub" else {}
    commits = [match[1] for match in map(_COMMIT.search, addresses) if match is not None]
    if commits and commits[0] != config.revision:
        text = 'source %r has no fixed revision; the current revision is "%s"'
        logger.info(text, config.path, commits[0])
    return dataset


def resolve_files(
    config: SourceConfig, storage: FileSystem | None = None
) -> tuple[str, list[AnyFile]]:
    """Return the format of a source and its sorted files, which are empty for a Hub dataset.

    Raises:
        ConfigError: A key applies only to Hub datasets.
        DataError: The path looks local but has no readable files, or a store does not respond.
    """
    if (found := find_format(config, storage)) is not None:
        return found
    candidates = _list_files(config, storage)
    if config.format == "hub" or (candidates is None and config.format == "auto"):
        return "hub", []
    check_hub_keys(config)
    if not candidates:
        raise DataError(
            f"source {config.path!r}: no such file, directory or glob. Prepare it "
            "(torchmm prepare-data --help) or correct `path` in [[data.sources]]"
        )
    # A metadata file next to images or videos describes a folder.
    metadata = [file for file in candidates if file.stem == "metadata"]
    kinds = [*FOLDER_FORMATS, *SUFFIXES] if metadata else list(SUFFIXES)
    for kind in kinds if config.format == "auto" else [config.format]:
        may_be_packed = kind in TEXT_READERS
        suffixes = [
            uncompressed_suffix(f) if may_be_packed else f.suffix.lower() for f in candidates
        ]
        known = [suffix in SUFFIXES[kind] for suffix in suffixes]
        files = list(itertools.compress(candidates, known))
        if not files:
            continue
        if kind in FOLDER_FORMATS:
            files += metadata
        needs_datasets = kind == "arrow" or (kind in FOLDER_FORMATS and not metadata_files(files))
        if needs_datasets and is_address(config.path):
            raise DataError(
                f"source {config.path!r}: {kind} files are supported only on local disks; use "
                "parquet, tar or JSON lines, or a metadata.jsonl next to images and videos"
            )
        return kind, _files_of_split(config, kind, files)
    raise DataError(
        f"source {config.path!r}: none of its {len(candidates)} files has a suffix of "
        f"{config.format if config.format != 'auto' else 'a supported format'}; supported "
        f"suffixes are {', '.join(s for suffixes in SUFFIXES.values() for s in suffixes)}"
    )


def _list_files(config: SourceConfig, storage: FileSystem | None) -> list[AnyFile] | None:
    """Return the sorted visible files of a source, or None if the path may be a Hub dataset.

    If a directory has a subdirectory with the name of the split, only its files are returned.
    """
    if is_address(config.path):
        assert storage is not None, "see open_file_system"
        url = url_with_revision(config)
        listed = storage.list(url)
        inside = f"{url.rstrip('/')}/{Split.of(config).name}/"
        of_split = [file for file in listed if file.url.startswith(inside)]
        return list(of_split if of_split and not is_glob(url) else listed)
    path = Path(config.path).expanduser()
    if (root := _split_directory(config)) is not None:
        files = [file for file in root.rglob("*") if file.is_file()]
        names = [file.relative_to(root).parts for file in files]
        visible = [not any(part.startswith(".") for part in parts) for parts in names]
        return sorted(file.absolute() for file in itertools.compress(files, visible))
    if path.is_file():
        return [path.absolute()]
    matches = sorted(Path(m).absolute() for m in glob.glob(str(path), recursive=True))  # noqa: PTH207
    if matches:
        return [m for m in matches if m.is_file()]
    # NAME or OWNER/NAME may be a Hub dataset, unless OWNER is a local directory.
    has_known_suffix = path.suffix in COMPRESSIONS or any(
        path.suffix in s for s in SUFFIXES.values()
    )
    is_local = (
        config.format not in ("auto", "hub")
        or config.path.startswith((".", "/", "~"))
        or len(path.parts) > 2
        or has_known_suffix
        or is_glob(config.path)
        or (len(path.parts) == 2 and path.parent.is_dir())
    )
    return [] if is_local else None


def _split_directory(config: SourceConfig) -> Path | None:
    """Return the directory of a local source, or the subdirectory with the name of the split.

    Returns None if the source is not a local directory.
    """
    path = Path(config.path).expanduser()
    inside = path / Split.of(config).name
    return inside if inside.is_dir() else path if path.is_dir() else None


def _files_of_split(config: SourceConfig, kind: str, files: list[AnyFile]) -> list[AnyFile]:
    """Return the files of the split of a source.

    The names of directories and files determine the split, with the keywords of `datasets`
    ("data/validation-00000.parquet"). If no file has the keyword "train", files without a keyword
    are training data. A single file and a glob have the split "train" only.

    Raises:
        DataError: The source does not have the split.
    """
    names = _relative_names(config, files)
    if names is None:
        check_train_split(config, "a file or glob")
        return files
    name = Split.of(config).name
    split_name = _SPLIT_KEYWORDS.get(name, name)
    # The metadata files of a folder determine the split, and not the names of images.
    records = metadata_files(files) if kind in FOLDER_FORMATS else []
    split_by_file = {
        file: _find_split(names[file], name, kind)
        for file in records or files
        if not (kind in FOLDER_FORMATS and not records and file.stem == "metadata")
    }
    selected = {file for file in split_by_file if split_by_file[file] == split_name}
    if not selected and split_name == "train":
        selected = {file for file in split_by_file if split_by_file[file] is None}
    if not selected:
        known = sorted({split for split in split_by_file.values() if split is not None})
        if not known:
            check_train_split(config, "a directory without subdirectories or files named as splits")
        raise DataError(
            f"source {config.path!r}: split = {config.split!r}, but its files belong to the "
            f"splits {', '.join(known)}; set `split` to one of these, or set `path` to files"
        )
    if len(selected) == len(split_by_file):
        return files
    if kind in FOLDER_FORMATS and not records:  # `datasets` reads the whole directory
        raise DataError(
            f"source {config.path!r}: {len(split_by_file) - len(selected)} of "
            f"{len(split_by_file)} files are in "
            f"directories of other splits than {name!r}; set `path` to one directory"
        )
    logger.info(
        "source %r: %d of %d files are in split %r",
        config.path,
        len(selected),
        len(split_by_file),
        name,
    )
    return [file for file in files if file in selected or file not in split_by_file]


def _relative_names(
    config: SourceConfig, files: Sequence[AnyFile]
) -> dict[AnyFile, tuple[str, ...]] | None:
    """Return the parts of file names relative to the directory of a source.

    Returns None if the source is a file or glob.
    """
    if not is_address(config.path):
        directory = Path(config.path).expanduser().absolute()
        local = [file for file in files if isinstance(file, Path)]
        if not directory.is_dir():
            return None
        return {file: file.relative_to(directory).parts for file in local}
    url = url_with_revision(config).rstrip("/")
    remote = [file for file in files if isinstance(file, RemoteFile)]
    if is_glob(url) or any(file.url == url for file in remote):
        return None
    return {f: tuple(f.url.removeprefix(url).strip("/").split("/")) for f in remote}


def _find_split(parts: Sequence[str], name: str, kind: str) -> str | None:
    """Return the split in the name of a file, or None."""
    for part in parts[:-1] if kind in FOLDER_FORMATS else parts:
        if part == name:
            return _SPLIT_KEYWORDS.get(name, name)
        if (match := _SPLIT_NAME.search(part)) is not None:
            return _SPLIT_KEYWORDS[match[1]]
    return None


def source_root(config: SourceConfig, files: Sequence[AnyFile]) -> Root:
    """Return the directory that must contain all images, or None without files."""
    if not files:
        return None
    if isinstance(files[0], RemoteFile):
        url = glob_directory(url_with_revision(config)).rstrip("/")
        single = any(f.url == url for f in files if isinstance(f, RemoteFile))
        return RemotePath(url.rpartition("/")[0] if single else url, files[0].storage)
    if (directory := _split_directory(config)) is not None:
        return str(directory.absolute())
    return os.path.commonpath([str(file.parent) for file in files])


def files_fingerprint(files: Sequence[AnyFile]) -> str:
    """Return a digest of the names, sizes and versions of files."""
    digest = hashlib.sha256()
    for file in files:
        if isinstance(file, RemoteFile):
            digest.update(f"{file.key}\n".encode())
            continue
        stat = file.stat()
        digest.update(f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()
