"""Generated files of a run directory: samples, generated images and timelines.

A file may be missing, incomplete after a crash, or written by another version or program. Values of
unexpected types are skipped with a note. Only regular files inside the directory are read, so that
a link cannot expose other files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torchmm.common.files import check_relative_name

SAMPLES_FILE = "samples.json"
"""Generated text of held-out samples."""
SAMPLES_FOLDER = "samples"
"""Thumbnails of the images of these samples."""
GENERATED_IMAGES_FOLDER = "generated_images"
"""Generated images, in one image file per step."""
FORMER_IMAGES_FOLDER = "drawings"
"""Former name of `GENERATED_IMAGES_FOLDER`, in runs of earlier versions."""
TIMELINE_FOLDER = "timeline"
"""Timelines of pipeline steps."""

MAX_BYTES = 1 << 30
"""Size limit of a file that is read."""
MAX_COUNT = 2**63
MAX_SKIPPED = 200
"""Limit on the number of notes."""
CONTENT_ERRORS = (ValueError, KeyError, TypeError, RecursionError, OverflowError)
"""Errors of files with unexpected content."""


@dataclass(frozen=True)
class GeneratedSample:
    """Generated text of a held-out sample at one step."""

    step: int
    source: str
    index: int
    prompt: str
    generated: str
    truth: str
    references: tuple[str, ...]
    picture: str | None
    """File name of the image of the sample in `SAMPLES_FOLDER`."""

    @classmethod
    def from_entry(cls, entry: Any) -> GeneratedSample:
        """Return an entry of samples.json. Raise one of `CONTENT_ERRORS` if types differ."""
        step = entry["step"]
        index = entry["index"]
        picture = entry.get("picture")
        if not is_count(step) or not is_count(index):
            raise ValueError("step and index must be integers >= 0")
        if picture is not None:
            check_relative_name(picture, SAMPLES_FILE)
        return cls(
            step,
            str(entry["source"]),
            index,
            prompt=str(entry.get("prompt", "")).strip(),
            generated=str(entry.get("generated", "")).strip(),
            truth=str(entry.get("truth", "")).strip(),
            references=tuple(str(text).strip() for text in entry.get("references") or ()),
            picture=picture,
        )

    @property
    def is_correct(self) -> bool:
        """True if the text equals the truth or a reference."""
        return self.generated in {self.truth, *self.references}


@dataclass(frozen=True)
class RunDirectory:
    """A run directory.

    Attributes:
        directory: Path as the user specified it.
        skipped: Notes on skipped files and values, in the order in which they were read.
    """

    directory: Path
    skipped: list[str] = field(default_factory=list, kw_only=True)

    @cached_property
    def samples(self) -> dict[tuple[str, int], list[GeneratedSample]]:
        """Generated text by source and index of the held-out sample, in step order."""
        by_sample: dict[tuple[str, int], list[GeneratedSample]] = {}
        for sample in sorted(self._samples(), key=lambda sample: sample.step):
            by_sample.setdefault((sample.source, sample.index), []).append(sample)
        return by_sample

    def _samples(self) -> Iterator[GeneratedSample]:
        entries = self.read_json(SAMPLES_FILE)
        if not isinstance(entries, list):
            if entries is not None:
                self.skip(SAMPLES_FILE, "it is not a list")
            return
        for number, entry in enumerate(entries):
            try:
                yield GeneratedSample.from_entry(entry)
            except (*CONTENT_ERRORS, AttributeError) as error:
                self.skip(f"{SAMPLES_FILE}: entry {number}", error)

    def timelines(self) -> Iterator[tuple[str, str]]:
        """Yield (file name, SVG) of the pipeline timelines, in step order."""
        files = (self.directory / TIMELINE_FOLDER).glob("step-*.svg")
        for file in sorted(files, key=lambda f: (len(f.name), f.name)):
            svg = self.read_text(f"{TIMELINE_FOLDER}/{file.name}")
            if "<svg" in svg:
                yield file.name, svg[svg.index("<svg") :]

    def generated_images(self) -> list[Path]:
        """Return the files of generated images, in step order."""
        folders = (self.directory / FORMER_IMAGES_FOLDER, self.directory / GENERATED_IMAGES_FOLDER)
        files = [file for folder in folders for file in folder.glob("step-*.png")]
        return sorted(files, key=lambda f: (len(f.name), f.name))

    def skip(self, what: str, why: object) -> None:
        """Add a note on a file or a value that is skipped."""
        if len(self.skipped) < MAX_SKIPPED:
            self.skipped.append(f"{what} is skipped: {why!r}"[:500])

    def read_json(self, name: str) -> Any:
        """Return the content of a JSON file, or None if it is missing or cannot be read."""
        text = self.read_text(name)
        try:
            return json.loads(text) if text else None
        except CONTENT_ERRORS as error:
            self.skip(name, error)
            return None

    def read_text(self, name: str) -> str:
        """Return the text of a file inside the directory, or "" if it cannot be read."""
        return self.read_bytes(name).decode(errors="replace")

    def read_bytes(self, name: object) -> bytes:
        """Return the content of a file inside the directory, or b"" if it cannot be read."""
        try:
            return read_inside(self.directory, name)
        except FileNotFoundError:
            return b""
        except (OSError, ValueError) as error:
            self.skip(f"{name!a}", error)
            return b""


def read_inside(directory: Path, name: object) -> bytes:
    """Return the content of a regular file of a run directory, at most `MAX_BYTES`.

    Raises:
        FileNotFoundError: The file does not exist.
        OSError: It cannot be read.
        ValueError: The name, or a symbolic link, leads out of the directory, or the file is too
            large or not a regular one.
    """
    file = directory / check_relative_name(name, str(directory))
    if not file.resolve(strict=True).is_relative_to(directory.resolve()):
        raise ValueError(f"{file} is a link to a file outside {directory}")
    if not file.is_file():  # a named pipe would block
        raise ValueError(f"{file} is not a regular file")
    if file.stat().st_size > MAX_BYTES:
        raise ValueError(f"{file} has more than {MAX_BYTES} bytes")
    return file.read_bytes()


def is_count(value: object) -> bool:
    """Return True for integers from 0 to `MAX_COUNT`."""
    return type(value) is int and 0 <= value <= MAX_COUNT
