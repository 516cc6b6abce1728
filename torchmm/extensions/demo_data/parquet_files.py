"""Write records with images to parquet files, split by source file.

The split is by file and not by record, because the same image has captions in many languages and
must not be in both splits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets

VALIDATION_PERCENT = 10
ROWS_PER_FILE = 2000


def assign_split(source_file: str) -> str:
    """Return "train" or "validation", a pure function of the file name."""
    number = int.from_bytes(hashlib.sha256(source_file.encode()).digest()[:8], "big")
    return "validation" if number % 100 < VALIDATION_PERCENT else "train"


def write_splits(
    directory: Path, rows: Sequence[dict[str, Any]], features: datasets.Features
) -> dict[str, int]:
    """Write records (each with its `file`) to `train/` and `validation/`. Return the counts."""
    counts = {}
    for split in ("train", "validation"):
        part = [row for row in rows if assign_split(row["file"]) == split]
        counts[split] = len(part)
        write_rows(directory / split, part, features)
    return counts


def write_rows(
    directory: Path, rows: Sequence[dict[str, Any]], features: datasets.Features
) -> None:
    """Write the records of one split."""
    directory.mkdir(parents=True)
    for start in range(0, len(rows), ROWS_PER_FILE):
        table = datasets.Dataset.from_list(rows[start : start + ROWS_PER_FILE], features)
        path = directory / f"part-{start // ROWS_PER_FILE:05d}.parquet"
        table.to_parquet(str(path), batch_size=100)
