"""AnyRes, as LLaVA-NeXT and LLaVA-OneVision cut pictures: the whole one, then a grid of tiles of
the resolution closest to it, whose padding is dropped and whose lines end with an embedding.

A line of the picture goes through several tiles. Each tile is an image of its own for the encoder,
so tokens of tiles interleave: those of a tile are a rectangle of its rows and columns, and the ends
of lines belong to the tile that has the last column.

LLaVA-OneVision shrinks the features of large pictures ("anyres_max_9") by interpolation across
tiles. That needs all of a picture's features at once, which sub-microbatches divide, so such
a picture gets the best resolution that needs no shrinking.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import numpy as np
from PIL import Image
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

from torchmm.common.batch import Kept
from torchmm.data.media.tile_schemes import Cut, Scheme

SHRINKS_ABOVE = 1.1
"""Hugging Face's: how much longer than those of the most tiles sides may be."""


class AnyResolution(Scheme):
    """`LlavaNextImageProcessor` and `LlavaOnevisionImageProcessor`."""

    def cut(self, width_px: int, height_px: int, most: int) -> Cut:
        whole = Kept(0, self.rows, 0, self.rows, 0)
        every = self.processor.image_grid_pinpoints
        fitting = [p for p in every if self._tiles(p)[0] * self._tiles(p)[1] < most]
        while fitting:
            best = select_best_resolution((height_px, width_px), fitting)
            box = self._box(width_px, height_px, *self._tiles(best))
            if not self._shrinks(box):
                settings = {} if len(fitting) == len(every) else {"image_grid_pinpoints": fitting}
                kept, places = self._divide(box, *self._tiles(best))
                return self._joined(settings, [whole, *kept], places)
            fitting = [p for p in fitting if p[0] * p[1] < best[0] * best[1]]
        # As Hugging Face's model has it for a single tile: one line ends after all of them.
        return self._joined({}, [whole._replace(line_ends=1)], [])

    def pixels(self, image: Image.Image, cut: Cut) -> np.ndarray:
        return super().pixels(image, cut)[: cut.tiles]

    def _tiles(self, resolution: Sequence[int]) -> tuple[int, int]:
        """Rows and columns of tiles of a resolution, (height, width) in pixels."""
        crop = self.processor.crop_size or self.processor.size
        return resolution[0] // crop["height"], resolution[1] // crop["width"]

    def _box(self, width_px: int, height_px: int, tall: int, wide: int) -> Kept:
        """The tokens of all tiles without padding, and as many ends of lines as there are."""
        rows = tall * self.rows
        columns = wide * self.rows
        count: Any = LlavaNextProcessor._get_unpadded_features  # looks at its arguments alone
        tokens, lines = count(
            None, height_px, width_px, self.rows, self.rows, tall, wide
        )
        length = tokens // lines if lines else 0
        top = (rows - lines) // 2
        left = (columns - length) // 2
        return Kept(top, top + lines, left, left + length, lines)

    def _shrinks(self, box: Kept) -> bool:
        most = self.most_tiles * self.rows**2
        return bool(most) and sqrt((box.tokens - box.line_ends) / most) > SHRINKS_ABOVE

    def _divide(self, box: Kept, tall: int, wide: int) -> tuple[list[Kept], list[np.ndarray]]:
        """By tile: what is kept of it, and at which places among the tokens of all tiles."""
        length = box.right - box.left + 1
        side = self.rows
        kept, places = [], []
        for row in range(tall):
            top, bottom = (min(max(y - row * side, 0), side) for y in (box.top, box.bottom))
            lines = np.arange(top, bottom)[:, None] + row * side - box.top
            for column in range(wide):
                start = column * side
                left, right = (min(max(x - start, 0), side) for x in (box.left, box.right))
                inside = lines * length + np.arange(left, right) + start - box.left
                ends = start < box.right <= start + side
                line_ends = lines[:, 0] * length + length - 1 if ends else lines[:0, 0]
                kept.append(Kept(top, bottom, left, right, len(line_ends)))
                places.append(np.concatenate([inside.ravel(), line_ends]))
        return kept, places

    def _joined(
        self, settings: dict[str, Any], kept: list[Kept], places: list[np.ndarray]
    ) -> Cut:
        """The whole picture's tokens, then those of the tiles."""
        whole = kept[0].tokens
        shifted = [np.arange(whole)]
        first = whole
        for each in places:
            # Places count from the tile's first placeholder, as if tiles followed one another.
            shifted.append(each + whole - first)
            first += len(each)
        prefix, suffix = self._single()
        marks = (prefix, *[()] * (len(kept) - 1), suffix)
        return Cut(marks, settings, tuple(kept), tuple(shifted))
