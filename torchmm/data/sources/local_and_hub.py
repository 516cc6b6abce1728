"""Sources with random access: local files and hub data sets.

Arrow-backed formats go through Hugging Face `datasets` and are read as raw Arrow rows, so that it
never decodes an image or a sound: bytes stay bytes until a worker needs the pixels. JSON lines have
a separate reader, because rows of one file may have different types ("content" is a string in one
message and a list in the next), because a broken line must cost one sample and not the file, and
because image paths are relative to the file a row came from.

Every source of a recipe is opened on every rank; nothing here knows ranks.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import datasets
import numpy as np

from torchmm.common.errors import DataError
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.layouts.sample import Record, SampleOptions
from torchmm.data.sources.archives import check_tars
from torchmm.recipe.data_section import SourceConfig

SUFFIXES = {
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "json": (".jsonl", ".ndjson", ".json"),
    "webdataset": (".tar",),
    "imagefolder": (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
    "videofolder": (".mp4", ".webm", ".mkv", ".mov", ".avi"),
}
FOLDERS = ("imagefolder", "videofolder")
"""Formats of files that a metadata.jsonl describes."""


class MapSource(Protocol):
    """Random access to the records of one source."""

    fingerprint: str
    """Changes when the content may have changed."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> Record:
        """Raises CorruptSampleError if this record cannot be read."""
        ...


class ArrowSource:
    """Records of a `datasets.Dataset` as raw Arrow values."""

    def __init__(self, dataset: datasets.Dataset, root: str | None, fingerprint: str) -> None:
        self._rows = dataset.with_format("arrow")
        self._root = root
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> Record:
        """Record `index`."""
        return Record(self._rows[index].to_pylist()[0], self._root)


class JsonLinesSource:
    """Records of JSON-lines files, found by the byte offsets of their lines."""

    def __init__(self, files: Sequence[Path], fingerprint: str) -> None:
        self._files = list(files)
        self.fingerprint = fingerprint
        self._offsets = [_line_offsets(path) for path in self._files]
        self._ends = np.cumsum([len(o) for o in self._offsets])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, index: int) -> Record:
        """Record `index`, counted through all files."""
        file = int(np.searchsorted(self._ends, index, side="right"))
        offsets = self._offsets[file]
        with self._files[file].open("rb") as stream:
            stream.seek(int(offsets[index - int(self._ends[file])]))
            return parse_json_line(stream.readline(), self._files[file])


class SourceAsConfigured:
    """A source whose records know what the recipe says about them."""

    def __init__(self, source: MapSource, options: SampleOptions) -> None:
        self._source = source
        self._options = options
        self.fingerprint = source.fingerprint

    def __len__(self) -> int:
        return len(self._source)

    def read(self, index: int) -> Record:
        """Record `index`."""
        return replace(self._source.read(index), options=self._options)


def parse_json_line(line: bytes, path: Path) -> Record:
    """One line of a JSON-lines file.

    Raises:
        CorruptSampleError: not a JSON object.
    """
    try:
        columns = json.loads(line)
    except ValueError as error:
        raise CorruptSampleError(f"line of {path}: {error}") from error
    if not isinstance(columns, dict):
        raise CorruptSampleError(f"line of {path} is {type(columns).__name__}, not an object")
    return Record(columns, str(path.parent))


def open_map_source(config: SourceConfig) -> MapSource:
    """Open a source for random access.

    Raises:
        DataError: nothing readable there.
    """
    return SourceAsConfigured(_open_map_source(config), SampleOptions.of(config))


def _open_map_source(config: SourceConfig) -> MapSource:
    kind, files = resolve_files(config)
    if kind == "json":
        return JsonLinesSource(files, _files_fingerprint(files))
    dataset = load(config, kind, files, streaming=False)
    fingerprint = _files_fingerprint(files) if files else str(dataset._fingerprint)
    return ArrowSource(dataset, source_root(config, files), fingerprint)


def load(config: SourceConfig, kind: str, files: Sequence[Path], streaming: bool) -> Any:
    """A `datasets.Dataset` or `IterableDataset` of a local source or a hub id.

    Raises:
        DataError: `datasets` cannot read it, or a tar file is cut off.
    """
    if kind == "webdataset":
        check_tars(files)
    try:
        if kind == "hub":
            return datasets.load_dataset(config.path, split=config.split, streaming=streaming)
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


def resolve_files(config: SourceConfig) -> tuple[str, list[Path]]:
    """Format of a source and its local files, sorted; no files for a hub data set.

    Raises:
        DataError: the path looks local but has no readable files.
    """
    candidates = _local_candidates(config)
    if config.format == "hub" or (candidates is None and config.format == "auto"):
        return "hub", []
    if not candidates:
        raise DataError(
            f"source {config.path!r}: no such file, directory or glob. Prepare it "
            "(python scripts/prepare_data.py --help) or correct `path` in [[data.sources]]"
        )
    kinds = [config.format] if config.format != "auto" else _kinds_by_suffix(candidates)
    for kind in kinds:
        files = [f for f in candidates if f.suffix.lower() in SUFFIXES[kind]]
        if files and kind in FOLDERS:
            files += [f for f in candidates if _is_metadata(f)]
        if files:
            return kind, files
    raise DataError(
        f"source {config.path!r}: none of its {len(candidates)} files has a suffix of "
        f"{config.format if config.format != 'auto' else 'a known format'}; known are "
        f"{', '.join(s for suffixes in SUFFIXES.values() for s in suffixes)}"
    )


def _kinds_by_suffix(files: Sequence[Path]) -> list[str]:
    """Formats to try, best first. A metadata.jsonl next to images or clips describes a folder."""
    return [*FOLDERS, *SUFFIXES] if any(map(_is_metadata, files)) else list(SUFFIXES)


def _is_metadata(path: Path) -> bool:
    return path.stem == "metadata"


def _local_candidates(config: SourceConfig) -> list[Path] | None:
    """Files of a local path, [] if it should exist and does not, None if it may be a hub id."""
    path = Path(config.path).expanduser()
    if path.is_dir():
        inside = path / config.split
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
    known_suffix = any(path.suffix in suffixes for suffixes in SUFFIXES.values())
    is_pattern = any(c in name for c in "*?[")
    if name.startswith((".", "/", "~")) or len(path.parts) > 2 or known_suffix or is_pattern:
        return False
    return len(path.parts) == 1 or not path.parent.is_dir()


def _is_visible_file(path: Path, root: Path) -> bool:
    return path.is_file() and not any(p.startswith(".") for p in path.relative_to(root).parts)


def source_root(config: SourceConfig, files: Sequence[Path]) -> str | None:
    """Directory that image paths may not leave."""
    if not files:
        return None
    path = Path(config.path).expanduser()
    if path.is_dir():
        inside = path / config.split
        return str((inside if inside.is_dir() else path).absolute())
    return os.path.commonpath([str(f.parent) for f in files])


def unique_names(configs: Sequence[SourceConfig]) -> list[str]:
    """One name per source, from the recipe or the path, numbered where they repeat."""
    names: list[str] = []
    for config in configs:
        parts = [p for p in Path(config.path).parts if "*" not in p]
        name = config.name or "/".join(parts[-2:])
        copies = sum(n == name or n.startswith(f"{name}#") for n in names)
        names.append(f"{name}#{copies + 1}" if copies else name)
    return names


def _line_offsets(path: Path) -> np.ndarray:
    """int64: start of every line that is not blank."""
    offsets: list[int] = []
    position = 0
    with path.open("rb") as stream:
        for line in stream:
            if not offsets and line.lstrip().startswith(b"["):
                raise DataError(f"{path} is a JSON array; write one object per line (JSONL)")
            if line.strip():
                offsets.append(position)
            position += len(line)
    return np.asarray(offsets, np.int64)


def _files_fingerprint(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        stat = file.stat()
        digest.update(f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()
