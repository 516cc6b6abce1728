"""Photographs and illustrations of tuxpaint-stamps-default, with captions in many languages.

Every stamp is NAME.png with NAME.txt, whose first line is English and whose other lines have the
form `LANG.utf8=text`. Stamps that exist only as SVG are omitted, because Pillow does not support
SVG.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets

from torchmm.extensions.demo_data.manifest import new_directory, record_data_set
from torchmm.extensions.demo_data.packages import download_debian_package, extract_debian
from torchmm.extensions.demo_data.parquet_files import write_splits

PACKAGE = "tuxpaint-stamps-default"
LICENSE = "GPL-2"
TRANSLATION = re.compile(r"([\w@]+)\.utf8=(.+)")
FEATURES = datasets.Features(
    {
        "image": datasets.Image(),
        "text": datasets.Value("string"),
        "language": datasets.Value("string"),
        "file": datasets.Value("string"),
    }
)


def prepare(output: Path, packages: Path, options: dict[str, Any]) -> None:
    """Make `output`/tuxpaint_stamps: caption samples, split by image.

    Args:
        output: Directory of all sets.
        packages: Directory of downloaded packages.
        options: `languages` is a list of codes, in which "en" is the English line.
    """
    package = download_debian_package(PACKAGE, packages)
    with tempfile.TemporaryDirectory() as unpacked:
        root = Path(unpacked)
        extract_debian(package, root)
        rows = list(_rows(root / "usr/share/tuxpaint/stamps", options["languages"]))
        with new_directory(output / "tuxpaint_stamps") as directory:
            counts = write_splits(directory, rows, FEATURES)
            shutil.copy(root / f"usr/share/doc/{PACKAGE}/copyright", directory / "COPYRIGHT")
    counts["images"] = len({row["file"] for row in rows})
    details = {"options": options, "counts": counts}
    record_data_set(output, "tuxpaint_stamps", [package], LICENSE, details)


def _rows(stamps: Path, languages: Sequence[str]) -> Iterator[dict[str, Any]]:
    for text_file in sorted(stamps.rglob("*.txt")):
        image = text_file.with_suffix(".png")
        if not image.exists():
            continue
        texts = captions(text_file.read_text("utf-8", errors="replace"))
        for language in languages:
            if texts.get(language):
                yield {
                    "image": {"bytes": image.read_bytes(), "path": None},
                    "text": texts[language],
                    "language": language,
                    "file": str(image.relative_to(stamps)),
                }


def captions(text: str) -> dict[str, str]:
    """Return the captions by language code."""
    first, *translations = text.splitlines() or [""]
    matches = (TRANSLATION.match(line) for line in translations)
    return {"en": first.strip()} | {m[1]: m[2].strip() for m in matches if m}
