"""Plot held-out samples: thumbnails, captions, and generated images."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

import xxhash
from PIL import Image

from torchmm.common.files import replace_atomically
from torchmm.data.media.images import png_thumbnail
from torchmm.training.console import make_figure

THUMBNAIL_PX = 192


def write_thumbnail(
    folder: Path, source: str, index: int, image: Image.Image | None = None
) -> str | None:
    """Write a small PNG of a sample into a folder, unless it exists, and return its name.

    Args:
        folder: Folder of thumbnails.
        source: Name of the source.
        index: Index of the sample in its source.
        image: Image of the sample. If None, the result is None.
    """
    if image is None:
        return None
    # Source names are set by users, and may be invalid as file names.
    name = f"{xxhash.xxh64_hexdigest(source.encode())[:8]}-{index}.png"
    if not (folder / name).exists():
        folder.mkdir(exist_ok=True)
        replace_atomically(folder / name, png_thumbnail(image.convert("RGB"), THUMBNAIL_PX))
    return name


def plot_captions(
    samples: Sequence[tuple[Image.Image, str, str]], title: str, image_file: Path
) -> None:
    """Plot images with generated and reference captions to a PNG file.

    Args:
        samples: Tuples of image, generated text and reference text.
        title: Title of the figure.
        image_file: Path of the PNG file.
    """
    columns = min(3, len(samples))
    rows = math.ceil(len(samples) / columns)
    figure = make_figure(3.2 * columns, 3.2 * rows + 0.4)
    figure.suptitle(title)
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in grid:
        axes.set_axis_off()
    for axes, (image, generated, truth) in zip(grid, samples, strict=False):
        axes.imshow(image)
        written, caption = (textwrap.shorten(t, 120) or "(nothing)" for t in (generated, truth))
        label = f"model: {textwrap.fill(written, 38)}\nreference: {textwrap.fill(caption, 38)}"
        axes.set_title(label.replace("$", r"\$"), fontsize=8, loc="left")
    figure.savefig(image_file, dpi=110)


def plot_generated_images(
    samples: Sequence[tuple[Sequence[Image.Image], Sequence[Image.Image], str]],
    title: str,
    image_file: Path,
) -> None:
    """Plot generated images above reference images to a PNG file, videos as rows of frames.

    Args:
        samples: Tuples of reference frames, generated frames and the text of the prompt.
        title: Title of the figure.
        image_file: Path of the PNG file.
    """
    frames = max(len(generated) for _, generated, _ in samples)
    columns = min(len(samples), max(1, 8 // frames))
    rows = math.ceil(len(samples) / columns)
    figure = make_figure(1.7 * columns * frames, 4.0 * rows + 0.4)
    figure.suptitle(title, fontsize=10)
    grid = figure.subplots(2 * rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for number, (truth, generated, text) in enumerate(samples):
        row, column = divmod(number, columns)
        caption = textwrap.fill(textwrap.shorten(text, 90) or "(nothing)", 22 * frames)
        grid[2 * row][column].set_title(caption.replace("$", r"\$"), fontsize=7)
        for row_index, shown in enumerate((generated, truth)):
            grid[2 * row + row_index][column].imshow(_side_by_side(shown))
    figure.savefig(image_file, dpi=110)


def _side_by_side(frames: Sequence[Image.Image]) -> Image.Image:
    width, height = frames[0].size
    strip = Image.new("RGB", (len(frames) * (width + 1) - 1, height), "white")
    for number, frame in enumerate(frames):
        strip.paste(frame, (number * (width + 1), 0))
    return strip
