"""Pictures for one encoder, cut by the scheme of its checkpoint; every tile is an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from PIL import Image

from torchmm.common.batch import ImageMeta, TextSpec
from torchmm.common.errors import ConfigError
from torchmm.common.tiles import Kept, TileSpec
from torchmm.data.media.any_resolution import AnyResolution
from torchmm.data.media.images import ImagePreprocessor, decode_rgb, make_processor, read_size
from torchmm.data.media.stored_pixels import noise
from torchmm.data.media.tile_schemes import Cut, InternTiles, PanAndScan, Scheme, SplitTiles

SCHEMES: dict[str, type[Scheme]] = {
    "GotOcr2ImageProcessor": InternTiles,
    "Idefics3ImageProcessor": SplitTiles,
    "SmolVLMImageProcessor": SplitTiles,
    "Gemma3ImageProcessor": PanAndScan,
    "LlavaNextImageProcessor": AnyResolution,
    "LlavaOnevisionImageProcessor": AnyResolution,
}
"""By the image processor that cuts."""


class TiledMedia:
    """Pictures for one encoder.

    Args:
        spec: how they are cut.
        images: the encoder's preprocessing of single images.
        text: what the LLM wants around images.
        vocabulary: of the tokenizer.
        max_pixels: of the largest picture that is decoded.

    Raises:
        ConfigError: the image processor does not fit.
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
        self.scheme = SCHEMES[spec.processor_class](processor, text, vocabulary, rows)
        self.scheme.most_tiles = spec.most_tiles
        self.images = images
        self.max_pixels = max_pixels
        probe = Image.new("RGB", (600, 200))
        cut = self.scheme.cut(*probe.size, most=1000)
        found = self.scheme.pixels(probe, cut).shape
        wanted = (cut.tiles, *images.blank(*probe.size).shape)
        if found != wanted:
            raise ConfigError(
                f"encoder {encoder!r}: {spec.processor_class} returns tiles of shape {found} "
                f"for an image of 600x200 pixels, but {wanted} is required; remove settings "
                "from model.processor"
            )
        # Tiles are stored as bytes only if the bytes give the processor's values.
        for size in ((600, 200), (90, 400), (70, 70)):
            if images.byte_values is None:
                break
            picture = noise(size)
            cut = self.scheme.cut(*size, most=UNLIMITED)
            stored = torch.from_numpy(self.scheme.pixels(picture, cut, raw=True))
            values = self.scheme.pixels(picture, cut)
            if not np.array_equal(images.byte_values.look_up(stored).numpy(), values):
                images.byte_values = None

    def open(self, data: bytes) -> TiledPicture:
        """Read the header and cut the image as the processor does. Raises CorruptSampleError."""
        width, height = read_size(data, self.max_pixels)
        return TiledPicture(self, data, width, height, self.scheme.cut(width, height, UNLIMITED))


@dataclass(frozen=True)
class TiledPicture:
    """An image file and its tiles."""

    media: TiledMedia
    data: bytes
    width_px: int
    height_px: int
    cut: Cut

    def within(self, most: int) -> TiledPicture:
        """Return the image with at most `most` tiles."""
        return replace(self, cut=self.media.scheme.cut(self.width_px, self.height_px, most))

    @property
    def metas(self) -> list[ImageMeta]:
        """Planning metadata of every tile."""
        meta = self.media.images.meta(self.width_px, self.height_px)
        if self.cut.kept is None:
            return [meta] * self.cut.tiles
        return [replace(meta, tokens=kept.tokens) for kept in self.cut.kept]

    @property
    def placeholders(self) -> list[int]:
        """Of every tile."""
        return list(self.cut.placeholders or (meta.tokens for meta in self.metas))

    @property
    def tiles(self) -> list[Tile]:
        """In the order of their tokens."""
        return [Tile(self, number) for number in range(self.cut.tiles)]

    def image(self) -> Image.Image:
        """Upright RGB. Raises CorruptSampleError."""
        return decode_rgb(self.data, self.media.max_pixels)

    @cached_property
    def pixels(self) -> np.ndarray:
        """(tiles, C, H, W), stored: decoded and resized once for all. Raises CorruptSampleError."""
        raw = self.media.images.byte_values is not None
        return self.media.scheme.pixels(self.image(), self.cut, raw)


@dataclass(frozen=True)
class Tile:
    """One tile of a picture."""

    of: TiledPicture
    number: int

    def pixels(self) -> np.ndarray:
        """(C, H, W). Raises CorruptSampleError."""
        return self.of.pixels[self.number]

    @property
    def kept(self) -> Kept | None:
        """Which of its tokens reach the LLM; None: all."""
        kept = self.of.cut.kept
        return kept[self.number] if kept is not None else None

    @property
    def placeholders(self) -> int:
        """In the text."""
        return self.of.placeholders[self.number]

    @property
    def places(self) -> np.ndarray:
        """Where its tokens are, relative to its first placeholder."""
        if self.of.cut.places is None:
            return np.arange(self.of.metas[self.number].tokens)
        return self.of.cut.places[self.number]


def cut_within(pictures: Sequence[TiledPicture], budget: int | None) -> list[TiledPicture]:
    """Return the images of a sample with at most `budget` tiles together.

    All images have the same limit, the largest with which they stay within the budget. Every image
    keeps one tile, so a sample with more images than the budget has one tile per image.
    """
    cut = list(pictures)
    most = 0 if budget is None else max(1, budget - len(cut) + 1)
    while budget is not None and most and sum(each.cut.tiles for each in cut) > budget:
        cut = [picture.within(most) for picture in pictures]
        most -= 1
    return cut


UNLIMITED = 1 << 30
"""More tiles than any picture has."""
