"""Tiling schemes: split an image into tiles, with markers between them.

Sizes are from the header of the file. Schemes call methods of the Hugging Face image processor with
an array that has a shape and no memory (`shape_array`), so that its size computation is not
duplicated. The processor runs once per image for the pixels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from transformers.models.idefics3.image_processing_pil_idefics3 import get_resize_output_image_size

from torchmm.common.batch import MarkerText, TextSpec
from torchmm.common.tiles import TileRegion
from torchmm.data.media.uint8_pixels import RAW_SETTINGS, shape_array, to_uint8

MAX_CROPS_KEY = "pan_and_scan_max_num_crops"
FIRST_IMAGE_TEXT = "Here is the original image "
CROPS_TEXT = " and here are some crops to help you see better "


class TileGrid(NamedTuple):
    """Tiling of one image."""

    markers: tuple[MarkerText, ...]
    """Markers before, between and after the tiles, one entry more than tiles."""
    settings: dict[str, Any]
    """Additional settings of the image processor that enforce a limit on tiles."""
    kept: tuple[TileRegion, ...] | None = None
    """Used tokens of each tile. None for all tokens."""
    token_offsets: tuple[np.ndarray, ...] | None = None
    """Offsets of the tokens of each tile, relative to its first placeholder."""
    placeholders: tuple[int, ...] | None = None
    """Number of placeholders of each tile. None for the number of tokens."""

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return len(self.markers) - 1


class TilingScheme(ABC):
    """Tiling of one type of Hugging Face image processor.

    Args:
        processor: Image processor with the settings of the checkpoint.
        text: Markers around single images.
        vocabulary: Vocabulary of the tokenizer. Missing markers are written as plain text.
        rows: Number of rows and of columns of the tokens of a tile.
    """

    def __init__(
        self, processor: Any, text: TextSpec, vocabulary: Mapping[str, int], rows: int
    ) -> None:
        self.processor = processor
        self.rows = rows
        self.text = text
        self.vocabulary = vocabulary

    max_anyres_tiles = 0
    """See `TileSpec.most_tiles`."""

    @abstractmethod
    def make_grid(self, width_px: int, height_px: int, max_tiles: int) -> TileGrid:
        """Return the tiling of an upright image.

        It is the tiling of the processor, for a lower resolution if the limit requires it.

        Args:
            width_px: Width in pixels.
            height_px: Height in pixels.
            max_tiles: Maximum number of tiles.
        """

    def pixels(self, image: Image.Image, grid: TileGrid, raw: bool = False) -> np.ndarray:
        """Return the tiles of an RGB image: (tiles, C, H, W), float32, or uint8 if `raw` is set."""
        settings = grid.settings | (RAW_SETTINGS if raw else {})
        outputs = self.processor(images=[image], return_tensors="np", **settings)
        values = np.asarray(outputs["pixel_values"])
        values = to_uint8(values) if raw else np.asarray(values, np.float32)
        return values.reshape(-1, *values.shape[-3:])


class InternVLTiling(TilingScheme):
    """Tiling of InternVL: a grid with the closest aspect ratio, followed by a thumbnail.

    There are markers before the first and after the last tile only. It is the
    `GotOcr2ImageProcessor` with `crop_to_patches` and `min_patches` to `max_patches` tiles.
    """

    def make_grid(self, width_px: int, height_px: int, max_tiles: int) -> TileGrid:
        settings = {}
        if max_tiles <= self.processor.max_patches:
            # One tile is the thumbnail, unless the image has a single tile.
            limit = max(1, max_tiles - 1)
            settings = {
                "max_patches": limit,
                "min_patches": min(limit, self.processor.min_patches),
            }
        tiles = self.processor.get_number_of_image_patches(height_px, width_px, settings)
        return TileGrid(
            (self.text.image_prefix, *[()] * (tiles - 1), self.text.image_suffix), settings
        )


class Idefics3Tiling(TilingScheme):
    """Tiling of Idefics3 and SmolVLM: a grid of tiles with a token each, then a thumbnail.

    Each image is resized to `size.longest_edge`, and both sides are rounded to multiples of
    `max_image_size.longest_edge`. It is the `Idefics3ImageProcessor` or `SmolVLMImageProcessor`
    with `do_image_splitting`.
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

    def make_grid(self, width_px: int, height_px: int, max_tiles: int) -> TileGrid:
        # Start with the resolution of the processor, then reduce tiles along the longer side.
        lower = range(-(-self._longest // self._side) - 1, 0, -1)
        for longest in (self._longest, *(self._side * tiles for tiles in lower)):
            rows, columns = self._grid(width_px, height_px, longest)
            if rows * columns + 1 <= max_tiles:
                break
        settings = {} if longest == self._longest else {"size": {"longest_edge": longest}}
        return TileGrid(self._make_markers(rows, columns), settings)

    def _grid(self, width_px: int, height_px: int, longest: int) -> tuple[int, int]:
        """Return rows and columns, which are 0 if the thumbnail is the only tile."""
        image = shape_array(width_px, height_px)
        if self.processor.do_resize:
            image = shape_array(*reversed(get_resize_output_image_size(image, longest)))
        image = self._sizes.resize_for_vision_encoder(image, self._side)
        _, rows, columns = self._sizes.split_images(image, self.processor.max_image_size)
        return rows, columns

    def _make_markers(self, rows: int, columns: int) -> tuple[MarkerText, ...]:
        prefix = self.text.image_prefix
        suffix = self.text.image_suffix
        if rows * columns == 0:
            return prefix, suffix
        markers: list[MarkerText] = []
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                name = f"<row_{row}_col_{column}>"
                line_feed = ("\n",) if column == 1 and row > 1 else ()
                markers.append((*line_feed, prefix[0], self.vocabulary.get(name, name)))
        return (*markers, ("\n\n", *prefix), suffix)


def _resize_shape(processor: Any, image: np.ndarray, size: Any, **_: Any) -> np.ndarray:
    """Replace the `resize` method of a processor that only computes sizes."""
    return shape_array(size.width, size.height)


class PanAndScanTiling(TilingScheme):
    """Pan and scan of Gemma 3: the full image, then crops if it is far from square.

    It is the `Gemma3ImageProcessor` with `do_pan_and_scan`.
    """

    def make_grid(self, width_px: int, height_px: int, max_tiles: int) -> TileGrid:
        prefix = self.text.image_prefix
        suffix = self.text.image_suffix
        settings: dict[str, Any] = {}
        if max_tiles <= self.processor.pan_and_scan_max_num_crops:
            # A single crop would repeat the image.
            off = max_tiles < 3
            settings = {"do_pan_and_scan": False} if off else {MAX_CROPS_KEY: max_tiles - 1}
        crops = 0
        if settings.get("do_pan_and_scan", True):
            names = (
                "pan_and_scan_min_crop_size",
                MAX_CROPS_KEY,
                "pan_and_scan_min_ratio_to_activate",
            )
            limits = {name: settings.get(name, getattr(self.processor, name)) for name in names}
            image = shape_array(width_px, height_px)
            crops = len(self.processor.pan_and_scan(image=image, **limits))
        if not crops:
            return TileGrid((prefix, suffix), settings)
        first = join_markers((FIRST_IMAGE_TEXT,), prefix)
        second = join_markers(suffix, (CROPS_TEXT,), prefix)
        further = join_markers(suffix, (" ",), prefix)
        return TileGrid((first, second, *[further] * (crops - 1), suffix), settings)


def join_markers(*parts: MarkerText) -> MarkerText:
    """Concatenate markers, and join adjacent text, which is tokenized together."""
    markers: list[int | str] = []
    for marker in (marker for part in parts for marker in part):
        last = markers[-1] if markers else None
        if isinstance(marker, str) and isinstance(last, str):
            markers[-1] = last + marker
        else:
            markers.append(marker)
    return tuple(markers)
