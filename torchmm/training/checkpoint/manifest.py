"""MANIFEST.json: the files of a complete checkpoint, and the check that they are intact.

The manifest has the size and SHA-256 of every other file, computed from memory during the write,
and a SHA-256 of itself. A directory without a manifest is an incomplete save. A directory whose
files differ from its manifest was damaged later. File sizes and the metadata of DCP are not
sufficient, because flipped bits, zeroed pages and swapped shards would be loaded without an error.
This module does not import torch, so that `scripts/verify_checkpoint.py` runs anywhere.

All formats, including future formats, have the keys "format" and "manifest_sha256". An older
version can therefore distinguish an unsupported checkpoint from a damaged one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchmm.common.errors import CheckpointError
from torchmm.common.files import (
    UnsafeNameError,
    canonical_json,
    check_relative_name,
    sync_directory,
    write_synced,
)

FORMAT = 1
MANIFEST_NAME = "MANIFEST.json"
_DIGEST_KEY = "manifest_sha256"
_FACTS: dict[str, type] = {
    "files": dict,
    "layout": dict,
    "recipe_sha256": str,
    "step": int,
    "torch": str,
    "world_size": int,
}
"""Keys of every manifest, besides its format."""
_STEP_DIRECTORY = re.compile(r"step-(\d+)")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class NewerFormatError(CheckpointError):
    """Error of a checkpoint that a newer version saved. It may be intact."""


@dataclass(frozen=True)
class WrittenFile:
    """Name, size and hash of a file of a checkpoint, as it was written."""

    name: str
    size_bytes: int
    sha256: str


def write_manifest(directory: Path, files: Iterable[WrittenFile], facts: dict[str, Any]) -> None:
    """Write MANIFEST.json and sync the directory, which may be renamed after that.

    Args:
        directory: Directory of the checkpoint.
        files: All other files of the checkpoint.
        facts: JSON with layout, step and so on, see `_FACTS`.
    """
    table = {f.name: {"bytes": f.size_bytes, "sha256": f.sha256} for f in files}
    manifest = {"format": FORMAT, "files": table, **facts}
    manifest[_DIGEST_KEY] = hashlib.sha256(canonical_json(manifest)).hexdigest()
    write_synced(directory / MANIFEST_NAME, canonical_json(manifest))
    sync_directory(directory)


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, a directory named "step-N".

    Raises:
        NewerFormatError: A newer version wrote the manifest.
        CheckpointError: The manifest is missing, altered, incomplete or of another step.
    """
    file = path / MANIFEST_NAME
    try:
        data = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}: not a complete checkpoint") from None
    manifest = parse_manifest(data, str(file))
    if step_of(path) != manifest["step"]:
        raise CheckpointError(
            f"{path} contains step {manifest['step']}; the directory may have been renamed"
        )
    return manifest


def parse_manifest(data: bytes, file: str) -> dict[str, Any]:
    """Return the manifest in `data`, in which every value has its type and every name is safe.

    All readers of a manifest call this function before they join a file name to a path.

    Args:
        data: Content of the file.
        file: Name of the file in error messages.

    Raises:
        NewerFormatError: A newer version wrote the manifest.
        CheckpointError: The manifest is altered or incomplete, or an entry is not valid.
    """
    try:
        manifest = json.loads(data)
        digest = manifest.pop(_DIGEST_KEY)
        content = canonical_json(manifest)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{file} is not a valid manifest: {error!r}") from None
    expected = canonical_json({**manifest, _DIGEST_KEY: digest})
    if data != expected or hashlib.sha256(content).hexdigest() != digest:
        raise CheckpointError(f"{file} was modified: its SHA-256 does not match")
    version = manifest.get("format")
    if isinstance(version, int) and version > FORMAT:
        raise NewerFormatError(
            f"{file} has format {version}, but this version of torchmm reads format {FORMAT}: a "
            "newer version saved it. Continue with that version, or set checkpoint.resume to "
            "an older checkpoint"
        )
    if version != FORMAT:
        raise CheckpointError(
            f"{file} has format {version}, but this version reads format {FORMAT}"
        )
    _validate_content(manifest, file)
    return manifest


def _validate_content(manifest: dict[str, Any], file: str) -> None:
    """Raise CheckpointError if a fact is missing, has another type, or names an unsafe file."""
    if missing := [k for k, kind in _FACTS.items() if type(manifest.get(k)) is not kind]:
        raise CheckpointError(f"{file} is incomplete: {', '.join(missing)} is missing")
    if manifest["step"] < 0:
        raise CheckpointError(f"{file}: step = {manifest['step']} is negative")
    for name, entry in manifest["files"].items():
        _validate_entry(name, entry, file)
    for key in ("figures", "recipe", "versions"):
        if not isinstance(manifest.get(key, {}), dict):
            raise CheckpointError(f"{file}: {key} is not an object")
    for key, value in manifest.get("figures", {}).items():
        if type(value) not in (int, float):
            raise CheckpointError(f"{file}: figures.{key} = {value!r} is not a number")


def _validate_entry(name: str, entry: Any, file: str) -> None:
    """Raise CheckpointError if the writer cannot have written this entry of "files"."""
    try:
        check_relative_name(name, file)
    except UnsafeNameError as error:
        raise CheckpointError(f"{error}. Do not use this checkpoint") from None
    if not _FILE_NAME.fullmatch(name) or name == MANIFEST_NAME:
        raise CheckpointError(f"{file}: {name!a} is not a valid file name of a checkpoint")
    try:
        size = entry["bytes"]
        digest = entry["sha256"]
        valid = type(size) is int and size >= 0 and _SHA256.fullmatch(digest) is not None
    except (KeyError, TypeError):
        valid = False
    if not valid:
        raise CheckpointError(
            f"{file}: the entry of {name} is {str(entry)[:200]!a}; it must contain bytes (an "
            "integer >= 0) and sha256 (64 hexadecimal digits)"
        )


def manifest_digest(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest, which identifies the checkpoint and its files."""
    return hashlib.sha256(canonical_json(manifest)).hexdigest()


def reject_newer_format(path: Path) -> None:
    """Raise NewerFormatError if a newer version wrote the checkpoint.

    Damaged checkpoints are accepted. `find_problems` finds them.
    """
    try:
        read_manifest(path)
    except NewerFormatError:
        raise
    except CheckpointError:
        return


def read_json(file: Path) -> Any:
    """Return the content of a JSON file of a checkpoint.

    Raises:
        CheckpointError: The file cannot be read.
    """
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error!r}") from None


def find_problems(path: Path, share: int = 0, shares: int = 1) -> list[str]:
    """Return the problems of a checkpoint, or an empty list if it is intact.

    Args:
        path: The checkpoint.
        share: Index of the fraction of files to hash. Ranks divide the files.
        shares: Number of fractions.
    """
    try:
        files = read_manifest(path)["files"]
    except CheckpointError as error:
        return [str(error)]
    names = sorted(files)[share::shares]
    problems = (file_problem(path / name, files[name]) for name in names)
    return [problem for problem in problems if problem]


def step_of(path: Path) -> int | None:
    """Return N of a directory named "step-N", or None for other names, such as temporary ones."""
    match = _STEP_DIRECTORY.fullmatch(path.name)
    return int(match[1]) if match else None


def list_steps(directory: Path) -> list[Path]:
    """Return the step directories in `directory`, valid or not, newest first."""
    steps = [(step_of(p), p) for p in directory.glob("step-*") if p.is_dir()]
    numbered = [(step, path) for step, path in steps if step is not None]
    return [path for _, path in sorted(numbered, reverse=True)]


def checkpoints_at(path: Path) -> list[Path]:
    """Return a checkpoint, or all checkpoints in a directory or of a run, newest first."""
    if step_of(path.resolve()) is not None:
        return [path.resolve()]
    return list_steps(path) or list_steps(path / "checkpoints")


def file_problem(file: Path, entry: dict[str, Any]) -> str | None:
    """Return how a file differs from its entry in the manifest, or None if it does not."""
    try:
        size_bytes = file.stat().st_size
        if size_bytes != entry["bytes"]:
            return f"{file} has {size_bytes} bytes, but the manifest lists {entry['bytes']}"
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        return f"{file}: {error.strerror}"
    if digest != entry["sha256"]:
        return f"{file} was modified: SHA-256 {digest[:16]}..., expected {entry['sha256'][:16]}..."
    if file.suffix == ".json":
        try:
            read_json(file)
        except CheckpointError as error:
            return str(error)
    return None
