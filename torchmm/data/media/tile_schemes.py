"""Into which tiles a picture of some size is cut, and what is written between them: a scheme for
each way in which checkpoints were trained.

Sizes come from the header alone. Schemes call methods of the image processor with an array that has
a shape and no memory (`shape_only`), so that Hugging Face's arithmetic is not copied. Pixels come
from one call of the processor per image.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from transformers.models.idefics3.image_processing_pil_idefics3 import get_resize_output_image_size

from torchmm.common.batch import Marks, TextSpec
from torchmm.common.tiles import Kept
from torchmm.data.media.stored_pixels import RAW, as_bytes, shape_only

CROPS = "pan_and_scan_max_num_crops"
FIRST = "Here is the original image "
THEN = " and here are some crops to help you see better "


class Cut(NamedTuple):
    """How one picture is cut."""

    marks: tuple[Marks, ...]
    """Before, between and after its tiles: one more than tiles."""
    settings: dict[str, Any]
    """What the image processor is asked for besides its own settings, to stay within a limit."""
    kept: tuple[Kept, ...] | None = None
    """What is kept of every tile, if that is not everything."""
    places: tuple[np.ndarray, ...] | None = None
    """Where the tokens of every tile are, relative to its first placeholder."""
    placeholders: tuple[int, ...] | None = None
    """Of every tile, if they are not as many as its tokens."""

    @property
    def tiles(self) -> int:
        """How many."""
        return len(self.marks) - 1


class Scheme(ABC):
    """Cuts pictures as one Hugging Face processor does.

    Args:
        processor: the image processor, with the checkpoint's settings.
        text: what stands beside single images.
        vocabulary: of the tokenizer; what it lacks is spelled as plain text.
        rows: of a tile's tokens, which has as many columns.
    """

    def __init__(
        self, processor: Any, text: TextSpec, vocabulary: Mapping[str, int], rows: int
    ) -> None:
        self.processor = processor
        self.rows = rows
        self.text = text
        self.vocabulary = vocabulary

    most_tiles = 0
    """As `TileSpec.most_tiles`."""

    @abstractmethod
    def cut(self, width_px: int, height_px: int, most: int) -> Cut:
        """The tiles of an upright picture, at most `most`: the processor's own choice if that is
        within the limit, otherwise its choice for a smaller resolution."""

    def pixels(self, image: Image.Image, cut: Cut, raw: bool = False) -> np.ndarray:
        """(tiles, C, H, W) of an RGB image: float32, or uint8 before they are rescaled."""
        settings = cut.settings | (RAW if raw else {})
        outputs = self.processor(images=[image], return_tensors="np", **settings)
        values = np.asarray(outputs["pixel_values"])
        values = as_bytes(values) if raw else np.asarray(values, np.float32)
        return values.reshape(-1, *values.shape[-3:])


class InternTiles(Scheme):
    """InternVL: a grid whose sides are closest to the picture's, and a thumbnail behind it.

    All tiles stand between one pair of markers, without anything between them.
    `GotOcr2ImageProcessor` with `crop_to_patches`: `min_patches` to `max_patches` tiles.
    """

    def cut(self, width_px: int, height_px: int, most: int) -> Cut:
        settings = {}
        if most <= self.processor.max_patches:
            # One of them is the thumbnail, which a picture of a single tile does not have.
            limit = max(1, most - 1)
            settings = {
                "max_patches": limit,
                "min_patches": min(limit, self.processor.min_patches),
            }
        tiles = self.processor.get_number_of_image_patches(height_px, width_px, settings)
        return Cut((self.text.image_prefix, *[()] * (tiles - 1), self.text.image_suffix), settings)


class SplitTiles(Scheme):
    """Idefics3, SmolVLM: rows and columns, each tile named by a token, then the whole picture.

    A picture is resized until its longer side has `size.longest_edge` pixels, small ones too, and
    both sides are whole tiles of `max_image_size.longest_edge`. `Idefics3ImageProcessor` and
    `SmolVLMImageProcessor` with `do_image_splitting`.
    """

    def __init__(
        self, processor: Any, text: TextSpec, vocabulary: Mapping[str, int], rows: int
    ) -> None:
        super().__init__(processor, text, vocabulary, rows)
        self._side: int = processor.max_image_size["longest_edge"]
        self._longest: int = processor.size["longest_edge"]
        kind = type(processor)
        sizes_only = type(f"{kind.__name__}Sizes", (kind,), {"resize": _resize_shape})
        self._sizes = sizes_only(**processor.to_dict())

    def cut(self, width_px: int, height_px: int, most: int) -> Cut:
        # The processor's own resolution, then fewer and fewer whole tiles along the longer side.
        lower = range(-(-self._longest // self._side) - 1, 0, -1)
        for longest in (self._longest, *(self._side * tiles for tiles in lower)):
            rows, columns = self._grid(width_px, height_px, longest)
            if rows * columns + 1 <= most:
                break
        settings = {} if longest == self._longest else {"size": {"longest_edge": longest}}
        return Cut(self._marks(rows, columns), settings)

    def _grid(self, width_px: int, height_px: int, longest: int) -> tuple[int, int]:
        """Rows and columns; none if the whole picture is the only tile."""
        image = shape_only(width_px, height_px)
        if self.processor.do_resize:
            image = shape_only(*reversed(get_resize_output_image_size(image, longest)))
        image = self._sizes.resize_for_vision_encoder(image, self._side)
        _, rows, columns = self._sizes.split_images(image, self.processor.max_image_size)
        return rows, columns

    def _marks(self, rows: int, columns: int) -> tuple[Marks, ...]:
        prefix = self.text.image_prefix
        suffix = self.text.image_suffix
        if rows * columns == 0:
            return prefix, suffix
        marks: list[Marks] = []
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                name = f"<row_{row}_col_{column}>"
                line_feed = ("\n",) if column == 1 and row > 1 else ()
                marks.append((*line_feed, prefix[0], self.vocabulary.get(name, name)))
        return (*marks, ("\n\n", *prefix), suffix)


def _resize_shape(processor: Any, image: np.ndarray, size: Any, **_: Any) -> np.ndarray:
    """Replace the `resize` method of a processor of which only sizes are needed."""
    return shape_only(size.width, size.height)


class PanAndScan(Scheme):
    """Gemma 3's pan and scan: the whole picture, then crops of it if it is far from square.

    `Gemma3ImageProcessor` with `do_pan_and_scan`.
    """

    def cut(self, width_px: int, height_px: int, most: int) -> Cut:
        prefix = self.text.image_prefix
        suffix = self.text.image_suffix
        settings: dict[str, Any] = {}
        if most <= self.processor.pan_and_scan_max_num_crops:
            # A single crop would be the whole picture once more.
            off = most < 3
            settings = {"do_pan_and_scan": False} if off else {CROPS: most - 1}
        crops = 0
        if settings.get("do_pan_and_scan", True):
            names = ("pan_and_scan_min_crop_size", CROPS, "pan_and_scan_min_ratio_to_activate")
            limits = {name: settings.get(name, getattr(self.processor, name)) for name in names}
            image = shape_only(width_px, height_px)
            crops = len(self.processor.pan_and_scan(image=image, **limits))
        if not crops:
            return Cut((prefix, suffix), settings)
        first = joined((FIRST,), prefix)
        second = joined(suffix, (THEN,), prefix)
        further = joined(suffix, (" ",), prefix)
        return Cut((first, second, *[further] * (crops - 1), suffix), settings)


def joined(*parts: Marks) -> Marks:
    """One after another, with adjacent texts as one: they are tokenised together."""
    marks: list[int | str] = []
    for mark in (mark for part in parts for mark in part):
        last = marks[-1] if marks else None
        if isinstance(mark, str) and isinstance(last, str):
            marks[-1] = last + mark
        else:
            marks.append(mark)
    return tuple(marks)
