"""Entries of MANIFEST.json next to prepared data sets, and atomic creation of directories."""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchmm.common.files import PREPARED_FILE, read_prepared_manifest, replace_atomically
from torchmm.extensions.demo_data.packages import Package


def is_current(output: Path, name: str, options: dict[str, Any]) -> bool:
    """Return True if a set was made with these options and its files are unmodified."""
    entry = read_prepared_manifest(output).get(name)
    if entry is None or entry["options"] != options:
        return False
    return all(
        (output / path).is_file() and sha256(output / path) == digest
        for path, digest in entry["sha256"].items()
    )


def record_data_set(
    output: Path, name: str, packages: list[Package], license: str, details: dict[str, Any]
) -> None:
    """Add or replace the entry of a finished set.

    Args:
        output: Directory of all sets.
        name: Name of the set and its directory.
        packages: Packages with the content of the set.
        license: License of the content.
        details: `options` of the set, and `counts`.
    """
    files = sorted(f for f in (output / name).rglob("*") if f.is_file())
    entries = read_prepared_manifest(output)
    entries[name] = {
        "packages": [
            {"name": p.name, "version": p.version, "sha256": sha256(p.file)} for p in packages
        ],
        "license": license,
        **details,
        "sha256": {str(f.relative_to(output)): sha256(f) for f in files},
    }
    text = json.dumps(entries, indent=2, sort_keys=True) + "\n"
    replace_atomically(output / PREPARED_FILE, text.encode())


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yield a directory that replaces `target` if no error occurs."""
    temporary = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sha256(path: Path) -> str:
    """Return the hex digest of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
