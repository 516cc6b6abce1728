"""Tiled images: each tile is a separate image of the encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from PIL import Image

from torchmm.common.batch import ImageMeta, TextSpec
from torchmm.common.errors import ConfigError
from torchmm.common.tiles import TileRegion, TileSpec
from torchmm.data.media.anyres import AnyResTiling
from torchmm.data.media.images import ImagePreprocessor, decode_rgb, make_processor, read_size
from torchmm.data.media.tile_schemes import (
    Idefics3Tiling,
    InternVLTiling,
    PanAndScanTiling,
    TileGrid,
    TilingScheme,
)
from torchmm.data.media.uint8_pixels import noise_image

TILING_SCHEMES: dict[str, type[TilingScheme]] = {
    "GotOcr2ImageProcessor": InternVLTiling,
    "Idefics3ImageProcessor": Idefics3Tiling,
    "SmolVLMImageProcessor": Idefics3Tiling,
    "Gemma3ImageProcessor": PanAndScanTiling,
    "LlavaNextImageProcessor": AnyResTiling,
    "LlavaOnevisionImageProcessor": AnyResTiling,
}
"""Tiling schemes by image processor."""


class TiledMedia:
    """Preprocessor of tiled images for one encoder.

    Args:
        spec: Image processor for the tiling.
        images: Preprocessor of single images.
        text: Markers around images.
        vocabulary: Vocabulary of the tokenizer.
        max_pixels: Maximum number of pixels of an image.

    Raises:
        ConfigError: The image processor does not match the encoder.
    """

    def __init__(
        self,
        spec: TileSpec,
        images: ImagePreprocessor,
        text: TextSpec,
        vocabulary: Mapping[str, int],
        max_pixels: int,
    ) -> None:
        encoder = images.spec.encoder
        processor = make_processor(encoder, spec.processor_class, spec.processor)
        rows = images.grid(0, 0).rows // images.spec.merge
        self.scheme = TILING_SCHEMES[spec.processor_class](processor, text, vocabulary, rows)
        self.scheme.max_anyres_tiles = spec.most_tiles
        self.images = images
        self.max_pixels = max_pixels
        probe = Image.new("RGB", (600, 200))
        grid = self.scheme.make_grid(*probe.size, max_tiles=1000)
        shape = self.scheme.pixels(probe, grid).shape
        expected_shape = (grid.tiles, *images.blank(*probe.size).shape)
        if shape != expected_shape:
            raise ConfigError(
                f"encoder {encoder!r}: {spec.processor_class} returns tiles of shape {shape} "
                f"for an image of 600x200 pixels, but {expected_shape} is required; remove "
                "settings "
                "from model.processor"
            )
        # Tiles are stored as bytes only if the result is bitwise identical to the processor.
        for size in ((600, 200), (90, 400), (70, 70)):
            if images.byte_values is None:
                break
            tiled_image = noise_image(size)
            grid = self.scheme.make_grid(*size, max_tiles=UNLIMITED)
            stored = torch.from_numpy(self.scheme.pixels(tiled_image, grid, raw=True))
            values = self.scheme.pixels(tiled_image, grid)
            if not np.array_equal(images.byte_values.look_up(stored).numpy(), values):
                images.byte_values = None

    def open(self, data: bytes) -> TiledImage:
        """Read the header, and compute the tiling. May raise CorruptSampleError."""
        width, height = read_size(data, self.max_pixels)
        return TiledImage(
            self, data, width, height, self.scheme.make_grid(width, height, UNLIMITED)
        )


@dataclass(frozen=True)
class TiledImage:
    """Image file with its tiling."""

    media: TiledMedia
    data: bytes
    width_px: int
    height_px: int
    grid: TileGrid

    def limit_tiles(self, max_tiles: int) -> TiledImage:
        """Return the image with at most `max_tiles` tiles."""
        return replace(
            self, grid=self.media.scheme.make_grid(self.width_px, self.height_px, max_tiles)
        )

    @property
    def metas(self) -> list[ImageMeta]:
        """Metadata of each tile."""
        meta = self.media.images.meta(self.width_px, self.height_px)
        if self.grid.kept is None:
            return [meta] * self.grid.tiles
        return [replace(meta, tokens=kept.tokens) for kept in self.grid.kept]

    @property
    def placeholders(self) -> list[int]:
        """Number of placeholders of each tile."""
        return list(self.grid.placeholders or (meta.tokens for meta in self.metas))

    @property
    def tiles(self) -> list[Tile]:
        """Tiles in the order of their tokens."""
        return [Tile(self, number) for number in range(self.grid.tiles)]

    def image(self) -> Image.Image:
        """Return the upright RGB image. May raise CorruptSampleError."""
        return decode_rgb(self.data, self.media.max_pixels)

    @cached_property
    def pixels(self) -> np.ndarray:
        """Stored inputs of all tiles, (tiles, C, H, W). May raise CorruptSampleError."""
        raw = self.media.images.byte_values is not None
        return self.media.scheme.pixels(self.image(), self.grid, raw)


@dataclass(frozen=True)
class Tile:
    """Tile of an image."""

    parent: TiledImage
    number: int

    def pixels(self) -> np.ndarray:
        """Return the inputs of the tile: (C, H, W). May raise CorruptSampleError."""
        return self.parent.pixels[self.number]

    @property
    def kept(self) -> TileRegion | None:
        """Tokens of the tile that the LLM receives. None for all tokens."""
        kept = self.parent.grid.kept
        return kept[self.number] if kept is not None else None

    @property
    def placeholders(self) -> int:
        """Number of placeholders of the tile in the text."""
        return self.parent.placeholders[self.number]

    @property
    def token_offsets(self) -> np.ndarray:
        """Offsets of the tokens, relative to the first placeholder of the tile."""
        if self.parent.grid.token_offsets is None:
            return np.arange(self.parent.metas[self.number].tokens)
        return self.parent.grid.token_offsets[self.number]


def limit_total_tiles(
    images_of_sample: Sequence[TiledImage], budget: int | None
) -> list[TiledImage]:
    """Return the images of a sample with at most `budget` tiles in total.

    All images have the same limit, the largest one within the budget. Each image has at least one
    tile, also if the sample has more images than the budget.
    """
    limited = list(images_of_sample)
    max_tiles = 0 if budget is None else max(1, budget - len(limited) + 1)
    while budget is not None and max_tiles and sum(each.grid.tiles for each in limited) > budget:
        limited = [tiled_image.limit_tiles(max_tiles) for tiled_image in images_of_sample]
        max_tiles -= 1
    return limited


UNLIMITED = 1 << 30
"""Limit above the number of tiles of any image."""
