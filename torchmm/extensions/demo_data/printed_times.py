"""Images of printed times, to be read (OCR) digit by digit.

An image shows the hours of a time and below them its minutes, printed in one of several fonts and
grays. The text is the time ("14:37"). One in five times is held out: training shows every hour and
every minute, but never the combination. A model therefore has to read, in fonts of the training
data.

The fonts (DejaVu) are included in the wheel of matplotlib, which is a dependency. Dates and times
at half the size are not used, because a small model learned only the date in 400 steps, with a
token per letter or per hour and minute (one run each).
"""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import datasets
import matplotlib
from PIL import Image, ImageDraw, ImageFont

from torchmm.extensions.demo_data.manifest import new_directory, record_data_set
from torchmm.extensions.demo_data.parquet_files import write_rows

NAME = "printed_times"
LICENSE = "none on printed times; fonts: DejaVu, free (license of Bitstream Vera)"
TIMES = {"train": 4800, "validation": 200}
HELD_OUT_PERCENT = 20
SIDE_PX = 64
MAX_SHIFT_PX = 2
"""Maximum distance from the center in pixels."""
FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono", "DejaVuSerif")
FONT_SIZE_PX = (28, 32)
BACKGROUND_GRAY, MAX_TEXT_GRAY = 128, 40
"""Gray values of the background, 0 for an encoder of values from -1 to 1, and of text."""
FEATURES = datasets.Features(
    {
        "image": datasets.Image(),
        "text": datasets.Value("string"),
        "file": datasets.Value("string"),
    }
)


def prepare(output: Path, packages: Path, options: dict[str, Any]) -> None:
    """Make `output`/printed_times: `train` and `validation`.

    Args:
        output: Directory of all sets.
        packages: Not needed.
        options: `times` per split.
    """
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    fonts = [
        ImageFont.truetype(str(folder / f"{name}.ttf"), size)
        for name in FONTS
        for size in range(FONT_SIZE_PX[0], FONT_SIZE_PX[1] + 1)
    ]
    with new_directory(output / NAME) as directory:
        for split, count in options["times"].items():
            write_rows(directory / split, list(_rows(split, count, fonts)), FEATURES)
    counts = {**options["times"], "fonts": len(FONTS)}
    record_data_set(output, NAME, [], LICENSE, {"options": options, "counts": counts})


def is_held_out(time: str) -> bool:
    """Return True if a time occurs only in validation."""
    digest = hashlib.sha256(time.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < HELD_OUT_PERCENT


def _rows(split: str, count: int, fonts: list[ImageFont.FreeTypeFont]) -> Iterator[dict[str, Any]]:
    """Yield the times of a split. All times occur before a time repeats in a new image."""
    split_rng = random.Random(split)
    times = [f"{hour:02}:{minute:02}" for hour in range(24) for minute in range(60)]
    times_of_split = [time for time in times if is_held_out(time) == (split != "train")]
    split_rng.shuffle(times_of_split)
    for number, time in zip(range(count), cycle(times_of_split), strict=False):
        stream = io.BytesIO()
        render_time(time, split_rng.choice(fonts), split_rng).save(stream, "PNG")
        yield {
            "image": {"bytes": stream.getvalue(), "path": None},
            "text": time,
            "file": f"{split}-{number}.png",
        }


def render_time(time: str, font: ImageFont.FreeTypeFont, rng: random.Random) -> Image.Image:
    """Return an image of hours above minutes. `rng` samples position and gray value."""
    image = Image.new("RGB", (SIDE_PX, SIDE_PX), (BACKGROUND_GRAY,) * 3)
    pen = ImageDraw.Draw(image)
    color = (rng.randint(0, MAX_TEXT_GRAY),) * 3
    for line, text in enumerate(time.split(":")):
        x = SIDE_PX // 2 + rng.randint(-MAX_SHIFT_PX, MAX_SHIFT_PX)
        y = SIDE_PX // 4 + line * SIDE_PX // 2 + rng.randint(-MAX_SHIFT_PX, MAX_SHIFT_PX)
        pen.text((x, y), text, color, font, anchor="mm")
    return image
