"""Pictures for one encoder, cut by the scheme of its checkpoint; every tile is an image."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
                f"encoder {encoder!r}: {spec.processor_class} gives tiles of shape {found} for a "
                f"picture of 600x200 pixels, but {wanted} are needed; remove settings from "
                "model.processor"
            )
        if not all(map(self._same, ((600, 200), (90, 400), (70, 70)))):
            images.byte_values = None

    def _same(self, size: tuple[int, int]) -> bool:
        """Whether tiles of a picture are stored as single images are."""
        picture = noise(size)
        cut = self.scheme.cut(*size, most=UNLIMITED)
        values = self.scheme.pixels(picture, cut)
        known = self.images.byte_values
        if known is None:
            return True
        stored = torch.from_numpy(self.scheme.pixels(picture, cut, raw=True))
        return np.array_equal(known.look_up(stored).numpy(), values)

    def open(self, data: bytes) -> Picture:
        """From the header; raises CorruptSampleError."""
        return Picture(self, data, *read_size(data, self.max_pixels))


@dataclass(frozen=True)
class Picture:
    """A picture that is not cut yet."""

    media: TiledMedia
    data: bytes
    width_px: int
    height_px: int

    def cut(self, most: int) -> TiledPicture:
        """Into at most `most` tiles."""
        return TiledPicture(self, self.media.scheme.cut(self.width_px, self.height_px, most))


@dataclass(frozen=True)
class TiledPicture:
    """A picture and how it is cut."""

    picture: Picture
    cut: Cut

    @property
    def metas(self) -> list[ImageMeta]:
        """What planning needs to know of every tile."""
        picture = self.picture
        meta = picture.media.images.meta(picture.width_px, picture.height_px)
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
        return decode_rgb(self.picture.data, self.picture.media.max_pixels)

    @cached_property
    def pixels(self) -> np.ndarray:
        """(tiles, C, H, W), stored: decoded and resized once for all. Raises CorruptSampleError."""
        media = self.picture.media
        raw = media.images.byte_values is not None
        return media.scheme.pixels(self.image(), self.cut, raw)


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


def cut_within(pictures: Iterable[Picture], budget: int | None) -> list[TiledPicture]:
    """Pictures of a sample, cut into no more tiles than `budget` together.

    All have the same limit, the largest with which they stay within the budget. Every picture
    keeps one tile, so a sample of more pictures than the budget has one each.
    """
    opened = list(pictures)
    if budget is None:
        return [picture.cut(most=UNLIMITED) for picture in opened]
    most = max(1, budget - len(opened) + 1)
    while True:
        cut = [picture.cut(most) for picture in opened]
        if most == 1 or sum(each.cut.tiles for each in cut) <= budget:
            return cut
        most -= 1


UNLIMITED = 1 << 30
"""More tiles than any picture has."""
