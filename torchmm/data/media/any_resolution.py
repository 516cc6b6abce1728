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

from math import prod, sqrt
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
        prefix = self.text.image_prefix
        suffix = self.text.image_suffix

        # Choose the processor's best resolution among those whose tiles are within the limit.
        crop = self.processor.crop_size or self.processor.size
        every = self.processor.image_grid_pinpoints
        grids = {(y, x): (y // crop["height"], x // crop["width"]) for y, x in every}
        fitting = [resolution for resolution in every if prod(grids[tuple(resolution)]) < most]
        if not fitting:
            # Hugging Face's model adds one line end after the only tile.
            whole = whole._replace(line_ends=1)
            place = np.arange(whole.tokens)
            return Cut((prefix, suffix), {}, (whole,), (place,), (whole.tokens,))
        settings = {} if len(fitting) == len(every) else {"image_grid_pinpoints": fitting}
        tall, wide = grids[tuple(select_best_resolution((height_px, width_px), fitting))]

        # Find the tokens of all tiles without padding. Every line of tokens has an end.
        count: Any = LlavaNextProcessor._get_unpadded_features  # does not use `self`
        tokens, lines = count(None, height_px, width_px, self.rows, self.rows, tall, wide)
        length = tokens // lines if lines else 0
        top = (tall * self.rows - lines) // 2
        left = (wide * self.rows - length) // 2
        box = Kept(top, top + lines, left, left + length, lines)

        # Shrink the features of large images.
        rows, columns = lines, length
        if self.most_tiles:
            ratio = sqrt(lines * length / (self.most_tiles * self.rows**2))
            if ratio > SHRINKS_ABOVE:
                rows = int(lines // ratio)
                columns = int(length // ratio)

        # Placeholders of all tiles follow the marks of the first tile. The offsets of each later
        # tile count from its own marks, so that they start with a negative number.
        kept, places = self._divide(box, tall, wide, rows, columns)
        total = rows * (columns + 1)
        offsets = [each - (total if number else 0) for number, each in enumerate(places)]
        return Cut(
            (prefix, *[()] * len(kept), suffix),
            settings,
            (whole, *kept),
            (np.arange(whole.tokens), *offsets),
            (whole.tokens, total, *[0] * (len(kept) - 1)),
        )

    def pixels(self, image: Image.Image, cut: Cut, raw: bool = False) -> np.ndarray:
        return super().pixels(image, cut, raw)[: cut.tiles]

    def _divide(
        self, box: Kept, tall: int, wide: int, rows: int, columns: int
    ) -> tuple[list[Kept], list[np.ndarray]]:
        """Return the kept tokens of every tile and their positions among all tokens of tiles."""
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


class _Span(NamedTuple):
    """Token rows (or columns) of one row (or column) of tiles."""

    first: int
    """First kept row of the tile."""
    end: int
    start: int
    """Position of the first kept row among those of the image."""
    to: tuple[int, int]
    """Rows after shrinking to which the tile contributes."""
    own: tuple[int, int]
    """Rows after shrinking that begin in this tile."""
    last: bool
    """Whether the tile has the last row of the image."""


def _spans(low: int, high: int, after: int, tiles: int, side: int) -> list[_Span]:
    """Return the spans of all tiles along one axis.

    Args:
        low: first row that is not padding.
        high: end of these rows.
        after: number of these rows after shrinking.
        tiles: number of tiles.
        side: rows of one tile.
    """
    weights = shrink_weights(high - low, after) if after else np.zeros((0, high - low))
    begins = np.argmax(weights != 0, axis=1) if weights.size else np.zeros(0, np.int64)
    spans = []
    for number in range(tiles):
        first, end = (min(max(x - number * side, 0), side) for x in (low, high))
        start = number * side + first - low
        touched = np.flatnonzero(weights[:, start : start + end - first].any(axis=1))
        own = np.flatnonzero((begins >= start) & (begins < start + end - first))
        to, begun = ((int(n[0]), int(n[-1]) + 1) if len(n) else (0, 0) for n in (touched, own))
        last = end > first and start + end - first == high - low
        spans.append(_Span(first, end, start, to, begun, last))
    return spans
