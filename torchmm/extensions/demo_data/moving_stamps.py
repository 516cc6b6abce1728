"""Videos for text-to-video: every stamp moves over a white square, and its caption describes how.

The images are real and the motion is generated. The videos are small enough for a CPU. A model can
only generate them by relating the frames to each other and to the text. Videos are lossless
animated PNGs.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow.parquet as pq
from PIL import Image

from torchmm.common.errors import DataError
from torchmm.common.files import read_prepared_manifest
from torchmm.data.media.images import to_rgb
from torchmm.extensions.demo_data.manifest import new_directory, record_data_set
from torchmm.extensions.demo_data.parquet_files import write_splits

FRAMES = 8
SIZE_PX = 64
FRAME_MS = 120
FEATURES = datasets.Features(
    {
        "clip": datasets.Value("binary"),
        "text": datasets.Value("string"),
        "file": datasets.Value("string"),
    }
)


class Motion(NamedTuple):
    """Center and side of the stamp in the first and the last frame, as fractions of the square."""

    sentence: str
    start: tuple[float, float, float]
    end: tuple[float, float, float]


MOTIONS = (
    Motion("It moves to the right.", (0.3, 0.5, 0.5), (0.7, 0.5, 0.5)),
    Motion("It moves to the left.", (0.7, 0.5, 0.5), (0.3, 0.5, 0.5)),
    Motion("It moves up.", (0.5, 0.7, 0.5), (0.5, 0.3, 0.5)),
    Motion("It moves down.", (0.5, 0.3, 0.5), (0.5, 0.7, 0.5)),
    Motion("It grows.", (0.5, 0.5, 0.3), (0.5, 0.5, 0.9)),
    Motion("It shrinks.", (0.5, 0.5, 0.9), (0.5, 0.5, 0.3)),
)


def prepare(output: Path, packages: Path, options: dict[str, Any]) -> None:
    """Make `output`/moving_stamps from tuxpaint_stamps, with its split and two motions per stamp.

    Args:
        output: Directory of all sets.
        packages: Not used.
        options: `source` has the hashes of the stamp files, and `frames` and `size_px` describe a
            video.

    Raises:
        DataError: The stamps are missing.
    """
    files = sorted((output / "tuxpaint_stamps").rglob("*.parquet"))
    if not files:
        raise DataError(f"{output}/tuxpaint_stamps is missing; prepare tuxpaint_stamps first")
    rows = [row for file in files for row in _rows(file, options)]
    with new_directory(output / "moving_stamps") as directory:
        counts = write_splits(directory, rows, FEATURES)
    license = read_prepared_manifest(output)["tuxpaint_stamps"]["license"]
    record_data_set(output, "moving_stamps", [], license, {"options": options, "counts": counts})


def _rows(file: Path, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for stamp in pq.read_table(file, columns=["image", "text", "file"]).to_pylist():
        image = to_rgb(Image.open(io.BytesIO(stamp["image"]["bytes"])))
        first = hashlib.sha256(f"{stamp['file']} {stamp['text']}".encode()).digest()[0]
        for number in (first, first + 1 + first // len(MOTIONS) % (len(MOTIONS) - 1)):
            motion = MOTIONS[number % len(MOTIONS)]
            yield {
                "clip": _animation(image, motion, options["frames"], options["size_px"]),
                "text": f"{stamp['text']} {motion.sentence}",
                "file": stamp["file"],
            }


def _animation(image: Image.Image, motion: Motion, frames: int, size_px: int) -> bytes:
    """Return an animated PNG."""
    frame_images = [
        frame_at(image, motion, number / (frames - 1), size_px) for number in range(frames)
    ]
    stream = io.BytesIO()
    options: dict[str, Any] = {"save_all": True, "append_images": frame_images[1:]}
    frame_images[0].save(stream, "PNG", duration=FRAME_MS, loop=0, **options)
    return stream.getvalue()


def frame_at(image: Image.Image, motion: Motion, time: float, size_px: int) -> Image.Image:
    """Return the frame at a time from 0 to 1."""
    x, y, side = (a + (b - a) * time for a, b in zip(motion.start, motion.end, strict=True))
    scale = side * size_px / max(image.size)
    width, height = (max(1, round(scale * length)) for length in image.size)
    displayed = image.resize((width, height), Image.Resampling.LANCZOS)
    frame = Image.new("RGB", (size_px, size_px), "white")
    frame.paste(displayed, (round(x * size_px - width / 2), round(y * size_px - height / 2)))
    return frame
