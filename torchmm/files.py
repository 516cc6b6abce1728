"""Writing small files so that a reader, or a crash, never sees half of one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from uuid import uuid4


def canonical_json(value: Any) -> bytes:
    """The one spelling of a JSON value: sorted keys, no blanks, NaN refused.

    Raises:
        TypeError, ValueError: the value is not JSON.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def write_synced(path: Path, data: bytes) -> None:
    """Writes a new file and forces it to the disk; the directory entry is the caller's part."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_atomically(path: Path, data: bytes) -> None:
    """Writes `path` by renaming a finished file over it; its directory must exist."""
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        write_synced(temporary, data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Forces created, renamed and removed entries of a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
