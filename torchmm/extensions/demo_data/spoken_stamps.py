"""Recordings of the captions of tuxpaint-stamps-default, with transcripts.

NAME_desc_LANG.ogg next to NAME.txt is a recording of the line `LANG.utf8=text`. Only languages with
many recordings that match the text are offered (number of characters and seconds correlate). In
other languages, recordings are often incomplete. Most stamps also have an image, so that these
samples have three modalities.
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
from torchmm.extensions.demo_data.stamps import LICENSE, PACKAGE, captions

RECORDING = re.compile(r"(.+)_desc_([\w@]+)\.ogg")
FEATURES = datasets.Features(
    {
        "image": datasets.Value("binary"),
        "audio": datasets.Value("binary"),
        "text": datasets.Value("string"),
        "language": datasets.Value("string"),
        "file": datasets.Value("string"),
    }
)


def prepare(output: Path, packages: Path, options: dict[str, Any]) -> None:
    """Make `output`/spoken_stamps: audio with transcripts and images, split by stamp.

    Args:
        output: Directory of all sets.
        packages: Directory of downloaded packages.
        options: `languages` has the codes of the spoken languages: es, fr, ro, bg, ru.
    """
    package = download_debian_package(PACKAGE, packages)
    with tempfile.TemporaryDirectory() as unpacked:
        root = Path(unpacked)
        extract_debian(package, root)
        rows = list(_rows(root / "usr/share/tuxpaint/stamps", options["languages"]))
        with new_directory(output / "spoken_stamps") as directory:
            counts = write_splits(directory, rows, FEATURES)
            shutil.copy(root / f"usr/share/doc/{PACKAGE}/copyright", directory / "COPYRIGHT")
    counts["with images"] = sum(row["image"] is not None for row in rows)
    details = {"options": options, "counts": counts}
    record_data_set(output, "spoken_stamps", [package], LICENSE, details)


def _rows(stamps: Path, languages: Sequence[str]) -> Iterator[dict[str, Any]]:
    for recording in sorted(stamps.rglob("*_desc_*.ogg")):
        match = RECORDING.fullmatch(recording.name)
        text_file = recording.with_name(f"{match[1]}.txt") if match else recording
        if match is None or match[2] not in languages or not text_file.exists():
            continue
        text = captions(text_file.read_text("utf-8", errors="replace")).get(match[2])
        if not text:
            continue
        image = text_file.with_suffix(".png")
        yield {
            "image": image.read_bytes() if image.exists() else None,
            "audio": recording.read_bytes(),
            "text": text,
            "language": match[2],
            # Same split as tuxpaint_stamps, so that a stamp is held out of both sets or of none.
            "file": str(image.relative_to(stamps)),
        }
