"""Sources with random access: files of this machine or elsewhere, and hub data sets.

Arrow-backed formats go through Hugging Face `datasets` and are read as raw Arrow rows, so that it
never decodes an image or a sound: bytes stay bytes until a worker needs the pixels. JSON and CSV
have a reader of their own (`text_files.py`), because rows of one file may have different types
("content" is a string in one message and a list in the next), because a broken line must cost one
sample and not the file, and because image paths are relative to the file a row came from. So have
tar files, Energon's folders included (`tar_samples.py`, `energon.py`), whose samples may have
different parts.

Files elsewhere (`s3://` and others) have the same readers, which open them as they open paths
(`torchmm.extensions.remote.storage`); only parquet has one of its own (`row_groups.py`), since what
`datasets` does, converting all of it, needs room for all of it.

Every source of a recipe is opened on every rank; nothing here knows ranks.
"""

from __future__ import annotations

import glob
import hashlib
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
from torchmm.data.files.addresses import fixed_part, is_pattern
from torchmm.data.files.places import Places
from torchmm.data.files.remote import (
    AnyFile,
    FileSystem,
    RemoteFile,
    RemotePath,
)
from torchmm.data.files.sample_files import row_of
from torchmm.data.layouts.sample import Record, Root
from torchmm.data.sources.configured import MapSource, SelectedRows, SourceAsConfigured, Split
from torchmm.data.sources.folders import FolderSource, described
from torchmm.data.sources.formats import (
    SourceFormat,
    check_hub_keys,
    check_only_split,
    find_format,
    pinned,
)
from torchmm.data.sources.packed import PACKED, plain_suffix, unpacked
from torchmm.data.sources.parquet_rows import RowGroups, rows_of_groups
from torchmm.data.sources.tar_samples import WebdatasetSource
from torchmm.data.sources.text_files import Table, TextSource, is_array, open_json
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
TEXT_FILES = {"json": open_json, "csv": Table}
"""Formats of files that may be packed."""
INDEX_CACHE = DataConfig().index_cache
FOLDERS = ("imagefolder", "videofolder")
"""Formats of files that a metadata.jsonl describes."""

_SPLIT_OF = {word: str(split) for split, words in SPLIT_KEYWORDS.items() for word in words}
_SPLIT_NAME = re.compile(
    rf"(?:^|[{NON_WORDS_CHARS}])({'|'.join(_SPLIT_OF)})(?=[{NON_WORDS_CHARS}]|$)"
)
"""A split in the name of a directory or file, as `datasets` recognizes it."""
_COMMIT = re.compile(r"@([0-9a-f]{40})/")

logger = logging.getLogger(__name__)


class ArrowSource:
    """Records of a `datasets.Dataset` as raw Arrow values.

    Args:
        dataset: the rows of all files, one file after another.
        root: directory that image paths are relative to.
        fingerprint: of the files.
        files: where the rows are, as far as it is known: files and their numbers of rows.
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
        """Record `index`."""
        columns = row_of(self._rows[index])
        return Record(columns, self._root, where=sample_key(columns) or self._row(index))

    def _row(self, index: int) -> str:
        number = int(np.searchsorted(self._ends, index, side="right"))
        if number >= len(self._files):
            return ""
        before = int(self._ends[number - 1]) if number else 0
        return f"{self._files[number]} row {index - before}"


def sample_key(columns: dict[str, Any]) -> str:
    """ "SHARD:KEY" of a webdataset's sample; empty for others."""
    return f"{columns['__url__']}:{columns['__key__']}" if "__url__" in columns else ""


def open_map_source(
    config: SourceConfig, cache: str = INDEX_CACHE, storage: FileSystem | None = None
) -> MapSource:
    """Open a source for random access.

    Args:
        config: the source.
        cache: directory in which packed files are unpacked.
        storage: of files elsewhere; see `open_file_system`.

    Raises:
        ConfigError: the cache cannot be written.
        DataError: nothing readable there, or no such columns.
    """
    return SourceAsConfigured(_open(config, cache, storage), config)


def _open(config: SourceConfig, cache: str, storage: FileSystem | None) -> MapSource:
    kind, files = resolve_files(config, storage)
    source = _open_all_rows(config, kind, files, cache)
    # `datasets` has applied the slices to a data set of the hub.
    sliced = kind != "hub" and Split.of(config).rows is not None
    return SelectedRows(source, config) if sliced else source


def _open_all_rows(
    config: SourceConfig, kind: str, files: Sequence[AnyFile], cache: str
) -> MapSource:
    if has_own_reader(kind, files):
        return open_file_source(config, kind, files, cache)
    root = source_root(config, files)
    rows = [sum(groups) for groups in rows_of_groups(files)] if kind == "parquet" else []
    try:
        dataset = load(config, kind, files, streaming=False)
    except DataError as error:
        if kind != "parquet":
            raise
        logger.warning("%s. Its row groups are read one by one, which is slow: repair it", error)
        return RowGroups(files, root, files_fingerprint(files))
    fingerprint = files_fingerprint(files) if files else str(dataset._fingerprint)
    return ArrowSource(dataset, root, fingerprint, list(zip(files, rows, strict=False)))


def has_own_reader(kind: str, files: Sequence[AnyFile]) -> bool:
    """Whether this package reads the files without `datasets`."""
    return (
        kind in (*TEXT_FILES, "webdataset")
        or find_entry("source_formats", kind) is not None
        or (kind in FOLDERS and bool(described(files)))
        or any(isinstance(file, RemoteFile) for file in files)
    )


def open_file_source(
    config: SourceConfig, kind: str, files: Sequence[AnyFile], cache: str
) -> MapSource:
    """Open a source that this package reads without `datasets`.

    Raises:
        ConfigError: the cache cannot be written.
        DataError: a file cannot be read.
    """
    places = Places(cache)
    fingerprint = files_fingerprint(files)
    if (entry := find_entry("source_formats", kind)) is not None:
        reader: SourceFormat = entry.load()()
        return reader.open(config, list(files), fingerprint, places)
    if kind == "webdataset":
        return WebdatasetSource(files, fingerprint, places)
    root = source_root(config, files)
    if kind == "parquet":
        return RowGroups(files, root, fingerprint)
    try:
        if kind in FOLDERS:
            return FolderSource(kind, files, root, fingerprint)
        opened = [TEXT_FILES[kind](f, text_of(f, kind, cache), places) for f in files]
    except OSError as error:
        text = f"source {config.path!r}: cannot read {error.filename}: {error.strerror}"
        raise DataError(text) from error
    return TextSource(opened, fingerprint)


def text_of(file: AnyFile, kind: str, cache: str) -> AnyFile:
    """Where the text of a file can be read, or searched as a whole if its format needs that."""
    content = unpacked(file, Path(cache))
    whole = isinstance(content, RemoteFile) and (kind == "csv" or is_array(content))
    return unpacked(file, Path(cache), whole=True) if whole else content


def load(config: SourceConfig, kind: str, files: Sequence[AnyFile], streaming: bool) -> Any:
    """A `datasets.Dataset` or `IterableDataset` of a local source or a hub id.

    Raises:
        DataError: `datasets` cannot read it.
    """
    try:
        if kind == "hub":
            return _load_from_hub(config, streaming)
        # Names are patterns to `datasets`. The split is named, or it would guess one from them.
        names = [glob.escape(str(f)) for f in files]
        options: dict[str, Any] = {}
        if kind in FOLDERS:
            names = [glob.escape(str(source_root(config, files))) + "/**"]
            options["drop_labels"] = True
        return datasets.load_dataset(
            kind, data_files={"train": names}, split="train", streaming=streaming, **options
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        looked_for = "no local path, so looked for on the hub" if kind == "hub" else kind
        raise DataError(
            f"source {config.path!r} ({looked_for}, split {config.split!r}) cannot be read: "
            f"{type(error).__name__}: {error}"
        ) from error


def _load_from_hub(config: SourceConfig, streaming: bool) -> Any:
    """A data set of the hub; which commit of it was found is logged."""
    dataset = datasets.load_dataset(
        config.path,
        config.config,
        split=config.split,
        streaming=streaming,
        revision=config.revision,
    )
    commit = _commit_of(dataset)
    if commit and commit != config.revision:
        logger.info(
            'source %r is not pinned: revision = "%s" is what was found now', config.path, commit
        )
    return dataset


def _commit_of(dataset: Any) -> str | None:
    """The commit that a hub data set's files are of, where it says so."""
    for name in getattr(dataset.info, "download_checksums", None) or {}:
        if (found := _COMMIT.search(name)) is not None:
            return found[1]
    return None


def resolve_files(
    config: SourceConfig, storage: FileSystem | None = None
) -> tuple[str, list[AnyFile]]:
    """Format of a source and its files, sorted; no files for a hub data set.

    Raises:
        ConfigError: keys of hub data sets at a source that is none.
        DataError: the path looks local but has no readable files; a store does not answer.
    """
    if (found := find_format(config, storage)) is not None:
        return found
    if is_address(config.path):
        candidates: list[AnyFile] | None = _remote_candidates(config, storage)
    else:
        candidates = _local_candidates(config)
    if config.format == "hub" or (candidates is None and config.format == "auto"):
        return "hub", []
    check_hub_keys(config)
    if not candidates:
        raise DataError(
            f"source {config.path!r}: no such file, directory or glob. Prepare it "
            "(torchmm prepare-data --help) or correct `path` in [[data.sources]]"
        )
    kinds = [config.format] if config.format != "auto" else _kinds_by_suffix(candidates)
    for kind in kinds:
        files = [f for f in candidates if _suffix(f, kind) in SUFFIXES[kind]]
        if files and kind in FOLDERS:
            files += [f for f in candidates if _is_metadata(f)]
        if files:
            _check_elsewhere(config, kind, files)
            return kind, _files_of_split(config, kind, files)
    raise DataError(
        f"source {config.path!r}: none of its {len(candidates)} files has a suffix of "
        f"{config.format if config.format != 'auto' else 'a known format'}; known are "
        f"{', '.join(s for suffixes in SUFFIXES.values() for s in suffixes)}"
    )


def _files_of_split(config: SourceConfig, kind: str, files: list[AnyFile]) -> list[AnyFile]:
    """Return the files of the split of a source.

    A file of a directory belongs to the split that a directory or the file is named after, by the
    keywords of `datasets` ("data/validation-00000.parquet"). Files without a keyword are training
    data if no file is named so. A single file and a glob have the split "train" only.

    Raises:
        DataError: the source has no such split.
    """
    names = _names_below(config, files)
    if names is None:
        check_only_split(config, "a file or glob")
        return files
    name = Split.of(config).name
    wanted = _SPLIT_OF.get(name, name)
    # Metadata has the records of a folder; names of images and clips say nothing of splits.
    records = described(files) if kind in FOLDERS else []
    found = {
        file: _split_of_file(names[file], name, kind)
        for file in records or files
        if not (kind in FOLDERS and not records and _is_metadata(file))
    }
    chosen = {file for file in found if found[file] == wanted}
    if not chosen and wanted == "train":
        chosen = {file for file in found if found[file] is None}
    if not chosen:
        known = sorted({split for split in found.values() if split is not None})
        if not known:
            check_only_split(config, "a directory without directories or files named as splits")
        raise DataError(
            f"source {config.path!r}: split = {config.split!r}, but its files are named as the "
            f"splits {', '.join(known)}; set `split` to one of these, or name files in `path`"
        )
    if len(chosen) == len(found):
        return files
    if kind in FOLDERS and not records:  # `datasets` reads the whole directory
        raise DataError(
            f"source {config.path!r}: {len(found) - len(chosen)} of {len(found)} files are in "
            f"directories of other splits than {name!r}; name one directory in `path`"
        )
    logger.info(
        "source %r: %d of %d files are in split %r", config.path, len(chosen), len(found), name
    )
    return [file for file in files if file in chosen or file not in found]


def _names_below(
    config: SourceConfig, files: Sequence[AnyFile]
) -> dict[AnyFile, tuple[str, ...]] | None:
    """Return the parts of file names relative to the directory of a source.

    None if the source is not a directory but a file or glob.
    """
    if not is_address(config.path):
        directory = Path(config.path).expanduser().absolute()
        local = [file for file in files if isinstance(file, Path)]
        if not directory.is_dir():
            return None
        return {file: file.relative_to(directory).parts for file in local}
    address = pinned(config).rstrip("/")
    remote = [file for file in files if isinstance(file, RemoteFile)]
    if is_pattern(address) or any(file.address == address for file in remote):
        return None
    return {f: tuple(f.address.removeprefix(address).strip("/").split("/")) for f in remote}


def _split_of_file(parts: Sequence[str], name: str, kind: str) -> str | None:
    """Return the split that a file is named after; None if it has no such name."""
    for part in parts[:-1] if kind in FOLDERS else parts:
        if part == name:
            return _SPLIT_OF.get(name, name)
        if (match := _SPLIT_NAME.search(part)) is not None:
            return _SPLIT_OF[match[1]]
    return None


def _check_elsewhere(config: SourceConfig, kind: str, files: Sequence[AnyFile]) -> None:
    """Raises DataError for files elsewhere that only `datasets` could read."""
    if not is_address(config.path):
        return
    if kind == "arrow" or (kind in FOLDERS and not described(files)):
        raise DataError(
            f"source {config.path!r}: {kind} files are read on this machine alone; write parquet, "
            "tar or JSON lines, or a metadata.jsonl beside images and clips"
        )


def _remote_candidates(config: SourceConfig, storage: FileSystem | None) -> list[AnyFile]:
    """Files at an address; those of the split alone if there is a folder of its name."""
    assert storage is not None, "see open_file_system"
    address = pinned(config)
    found: list[AnyFile] = list(storage.list(address))
    if is_pattern(address):
        return found
    inside = f"{address.rstrip('/')}/{Split.of(config).name}/"
    of_split = [f for f in found if isinstance(f, RemoteFile) and f.address.startswith(inside)]
    return list(of_split) or found


def _suffix(path: AnyFile, kind: str) -> str:
    return plain_suffix(path) if kind in TEXT_FILES else path.suffix.lower()


def _kinds_by_suffix(files: Sequence[AnyFile]) -> list[str]:
    """Formats to try, best first. A metadata.jsonl next to images or clips describes a folder."""
    return [*FOLDERS, *SUFFIXES] if any(map(_is_metadata, files)) else list(SUFFIXES)


def _is_metadata(path: AnyFile) -> bool:
    return path.stem == "metadata"


def _local_candidates(config: SourceConfig) -> list[AnyFile] | None:
    """Files of a local path, [] if it should exist and does not, None if it may be a hub id."""
    path = Path(config.path).expanduser()
    if path.is_dir():
        inside = path / Split.of(config).name
        root = inside if inside.is_dir() else path
        return sorted(f.absolute() for f in root.rglob("*") if _is_visible_file(f, root))
    if path.is_file():
        return [path.absolute()]
    matches = sorted(Path(m).absolute() for m in glob.glob(str(path), recursive=True))  # noqa: PTH207
    if matches:
        return [m for m in matches if m.is_file()]
    return None if config.format in ("auto", "hub") and _may_be_hub_id(config.path) else []


def _may_be_hub_id(name: str) -> bool:
    """NAME or OWNER/NAME, and OWNER is no directory here."""
    path = Path(name)
    known_suffix = path.suffix in PACKED or any(path.suffix in s for s in SUFFIXES.values())
    is_pattern = any(c in name for c in "*?[")
    if name.startswith((".", "/", "~")) or len(path.parts) > 2 or known_suffix or is_pattern:
        return False
    return len(path.parts) == 1 or not path.parent.is_dir()


def _is_visible_file(path: Path, root: Path) -> bool:
    return path.is_file() and not any(p.startswith(".") for p in path.relative_to(root).parts)


def source_root(config: SourceConfig, files: Sequence[AnyFile]) -> Root:
    """Directory that image paths may not leave."""
    if not files:
        return None
    if isinstance(files[0], RemoteFile):
        address = fixed_part(pinned(config)).rstrip("/")
        single = any(f.address == address for f in files if isinstance(f, RemoteFile))
        return RemotePath(address.rpartition("/")[0] if single else address, files[0].storage)
    path = Path(config.path).expanduser()
    if path.is_dir():
        inside = path / Split.of(config).name
        return str((inside if inside.is_dir() else path).absolute())
    return os.path.commonpath([str(f.parent) for f in files])


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
