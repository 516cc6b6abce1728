"""AnyRes, as LLaVA-NeXT and LLaVA-OneVision cut pictures: the whole one, then a grid of tiles of
the resolution closest to it, whose padding is dropped and whose lines end with an embedding.

A line of the picture goes through several tiles. Each tile is an image of its own for the encoder,
so tokens of tiles interleave: those of a tile are a rectangle of its rows and columns, and the ends
of lines belong to the tile that has the last column.

LLaVA-OneVision shrinks the features of large pictures ("anyres_max_9") by bilinear interpolation,
across tiles. It is linear, so that each tile can give its own share of the tokens at its edges, and
the LLM adds them up: tiles of one picture may still be in different sub-microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

from torchmm.common.tiles import Kept, Shrunk, shrink_weights
from torchmm.data.media.tile_schemes import Cut, Scheme

SHRINKS_ABOVE = 1.1
"""Hugging Face's: how much longer than those of the most tiles sides may be."""


class AnyResolution(Scheme):
    """`LlavaNextImageProcessor` and `LlavaOnevisionImageProcessor`."""

    def cut(self, width_px: int, height_px: int, most: int) -> Cut:
        whole = Kept(0, self.rows, 0, self.rows, 0)
        every = self.processor.image_grid_pinpoints
        fitting = [p for p in every if self._tiles(p)[0] * self._tiles(p)[1] < most]
        if not fitting:
            # As Hugging Face's model has it for a single tile: one line ends after all of them.
            return self._joined({}, [whole._replace(line_ends=1)], [], 0)
        settings = {} if len(fitting) == len(every) else {"image_grid_pinpoints": fitting}
        best = self._tiles(select_best_resolution((height_px, width_px), fitting))
        box = self._box(width_px, height_px, *best)
        rows, columns = self._shrunk(box)
        kept, places = self._divide(box, *best, rows, columns)
        return self._joined(settings, [whole, *kept], places, rows * (columns + 1))

    def pixels(self, image: Image.Image, cut: Cut, raw: bool = False) -> np.ndarray:
        return super().pixels(image, cut, raw)[: cut.tiles]

    def _tiles(self, resolution: Sequence[int]) -> tuple[int, int]:
        """Rows and columns of tiles of a resolution, (height, width) in pixels."""
        crop = self.processor.crop_size or self.processor.size
        return resolution[0] // crop["height"], resolution[1] // crop["width"]

    def _box(self, width_px: int, height_px: int, tall: int, wide: int) -> Kept:
        """The tokens of all tiles without padding, and as many ends of lines as there are."""
        rows = tall * self.rows
        columns = wide * self.rows
        count: Any = LlavaNextProcessor._get_unpadded_features  # looks at its arguments alone
        tokens, lines = count(None, height_px, width_px, self.rows, self.rows, tall, wide)
        length = tokens // lines if lines else 0
        top = (rows - lines) // 2
        left = (columns - length) // 2
        return Kept(top, top + lines, left, left + length, lines)

    def _shrunk(self, box: Kept) -> tuple[int, int]:
        """Rows and columns that are left of a picture's."""
        rows = box.bottom - box.top
        columns = box.right - box.left
        if self.most_tiles:
            ratio = sqrt(rows * columns / (self.most_tiles * self.rows**2))
            if ratio > SHRINKS_ABOVE:
                return int(rows // ratio), int(columns // ratio)
        return rows, columns

    def _divide(
        self, box: Kept, tall: int, wide: int, rows: int, columns: int
    ) -> tuple[list[Kept], list[np.ndarray]]:
        """By tile: what is kept of it, and at which places among the tokens of all tiles."""
        down = _spans(box.top, box.bottom, rows, tall, self.rows)
        right = _spans(box.left, box.right, columns, wide, self.rows)
        sizes = [(box.bottom - box.top, rows), (box.right - box.left, columns)]
        kept, places = [], []
        for y in down:
            for x in right:
                lines = np.arange(*y.to)[:, None] * (columns + 1)
                # A line ends in the tile that has the last column, once.
                ends = np.arange(*y.own) * (columns + 1) + columns if x.last else np.arange(0)
                shrunk = None
                if sizes != [(rows, rows), (columns, columns)]:
                    shrunk = Shrunk(sizes[0], sizes[1], y.start, x.start, y.to, x.to)
                kept.append(Kept(y.first, y.end, x.first, x.end, len(ends), shrunk))
                places.append(np.concatenate([(lines + np.arange(*x.to)).ravel(), ends]))
        return kept, places

    def _joined(
        self,
        settings: dict[str, Any],
        kept: list[Kept],
        places: list[np.ndarray],
        rest: int,
    ) -> Cut:
        """The whole picture's tokens, then those of the tiles.

        Placeholders of all tiles follow the first one's marks; places count from where a tile's
        own would be.
        """
        whole = kept[0].tokens
        shifted = [np.arange(whole)]
        shifted += [each - (rest if number else 0) for number, each in enumerate(places)]
        placeholders = (whole, *([rest] if places else []), *[0] * (len(places) - 1))
        prefix, suffix = self._single()
        marks = (prefix, *[()] * (len(kept) - 1), suffix)
        return Cut(marks, settings, tuple(kept), tuple(shifted), placeholders)


class _Span(NamedTuple):
    """The rows (or columns) of one row (or column) of tiles."""

    first: int
    """Kept of the tile: from here to `end`."""
    end: int
    start: int
    """The first of them, among all of the picture's."""
    to: tuple[int, int]
    """Those after shrinking to which they contribute."""
    own: tuple[int, int]
    """Those that begin in this tile."""
    last: bool
    """Whether the picture's last is among them."""


def _spans(low: int, high: int, after: int, tiles: int, side: int) -> list[_Span]:
    """Of all tiles along one axis, of which [low, high) is no padding and becomes `after`."""
    weights = shrink_weights(high - low, after) if after else np.zeros((0, high - low))
    begins = np.argmax(weights != 0, axis=1) if weights.size else np.zeros(0, np.int64)
    spans = []
    for number in range(tiles):
        first, end = (min(max(x - number * side, 0), side) for x in (low, high))
        start = number * side + first - low
        touched = np.flatnonzero(weights[:, start : start + end - first].any(axis=1))
        own = np.flatnonzero((begins >= start) & (begins < start + end - first))
        last = end > first and start + end - first == high - low
        spans.append(_Span(first, end, start, _range(touched), _range(own), last))
    return spans


def _range(numbers: np.ndarray) -> tuple[int, int]:
    return (int(numbers[0]), int(numbers[-1]) + 1) if len(numbers) else (0, 0)
