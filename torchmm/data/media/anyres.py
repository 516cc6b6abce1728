"""AnyRes tiling of LLaVA-NeXT and LLaVA-OneVision.

An image becomes a downscaled image and a grid of tiles of the closest resolution. Features of
padding are dropped, and each line of features ends with a learned embedding:

    tile 0 | tile 1      tokens: line 0 of tile 0, line 0 of tile 1, end of line 0,
    -------+-------              line 1 of tile 0, line 1 of tile 1, end of line 1, ...
    tile 2 | tile 3

Each tile is a separate image of the encoder, so the tokens of tiles interleave. The tokens of a
tile are a rectangle. The ends of lines belong to the tile with the last column.

LLaVA-OneVision shrinks the features of large images ("anyres_max_9") by bilinear interpolation
across tiles. The interpolation is linear, so each tile computes its contribution to tokens at its
edges, and the LLM adds them. Tiles of one image may therefore be in different sub-microbatches.
"""

from __future__ import annotations

from math import prod, sqrt
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

from torchmm.common.tiles import TileDownsample, TileRegion, interpolation_weights
from torchmm.data.media.tile_schemes import TileGrid, TilingScheme

MIN_DOWNSAMPLE_RATIO = 1.1
"""Minimum ratio for shrinking, as in transformers."""


class AnyResTiling(TilingScheme):
    """Tiling of `LlavaNextImageProcessor` and `LlavaOnevisionImageProcessor`."""

    def make_grid(self, width_px: int, height_px: int, max_tiles: int) -> TileGrid:
        all_tokens = TileRegion(0, self.rows, 0, self.rows, 0)
        prefix = self.text.image_prefix
        suffix = self.text.image_suffix

        # Select the best resolution of the processor within the limit on tiles.
        crop = self.processor.crop_size or self.processor.size
        resolutions = self.processor.image_grid_pinpoints
        grids = {(y, x): (y // crop["height"], x // crop["width"]) for y, x in resolutions}
        allowed = [
            resolution for resolution in resolutions if prod(grids[tuple(resolution)]) < max_tiles
        ]
        if not allowed:
            # The model in transformers adds one line end after the only tile.
            all_tokens = all_tokens._replace(line_ends=1)
            positions = np.arange(all_tokens.tokens)
            return TileGrid((prefix, suffix), {}, (all_tokens,), (positions,), (all_tokens.tokens,))
        settings = {} if len(allowed) == len(resolutions) else {"image_grid_pinpoints": allowed}
        tile_rows, tile_columns = grids[
            tuple(select_best_resolution((height_px, width_px), allowed))
        ]

        # Find the tokens of all tiles without padding. Every line of tokens has an end.
        count: Any = LlavaNextProcessor._get_unpadded_features  # does not use `self`
        tokens, lines = count(
            None, height_px, width_px, self.rows, self.rows, tile_rows, tile_columns
        )
        length = tokens // lines if lines else 0
        top = (tile_rows * self.rows - lines) // 2
        left = (tile_columns * self.rows - length) // 2
        box = TileRegion(top, top + lines, left, left + length, lines)

        # Shrink the features of large images.
        rows, columns = lines, length
        if self.max_anyres_tiles:
            ratio = sqrt(lines * length / (self.max_anyres_tiles * self.rows**2))
            if ratio > MIN_DOWNSAMPLE_RATIO:
                rows = int(lines // ratio)
                columns = int(length // ratio)

        # Placeholders of all tiles follow the markers of the first tile. Offsets of later tiles are
        # relative to the markers of the tile, so they are negative.
        kept, token_offsets = self._divide_tiles(box, tile_rows, tile_columns, rows, columns)
        total = rows * (columns + 1)
        offsets = [each - (total if number else 0) for number, each in enumerate(token_offsets)]
        return TileGrid(
            (prefix, *[()] * len(kept), suffix),
            settings,
            (all_tokens, *kept),
            (np.arange(all_tokens.tokens), *offsets),
            (all_tokens.tokens, total, *[0] * (len(kept) - 1)),
        )

    def pixels(self, image: Image.Image, grid: TileGrid, raw: bool = False) -> np.ndarray:
        return super().pixels(image, grid, raw)[: grid.tiles]

    def _divide_tiles(
        self, box: TileRegion, tile_rows: int, tile_columns: int, rows: int, columns: int
    ) -> tuple[list[TileRegion], list[np.ndarray]]:
        """Return the kept tokens of each tile, and their positions among all tokens."""
        down = _axis_spans(box.top, box.bottom, rows, tile_rows, self.rows)
        right = _axis_spans(box.left, box.right, columns, tile_columns, self.rows)
        sizes = [(box.bottom - box.top, rows), (box.right - box.left, columns)]
        kept, token_offsets = [], []
        for y in down:
            for x in right:
                lines = np.arange(*y.to)[:, None] * (columns + 1)
                # A line ends in the tile that has the last column, once.
                ends = np.arange(*y.starting) * (columns + 1) + columns if x.last else np.arange(0)
                shrunk = None
                if sizes != [(rows, rows), (columns, columns)]:
                    shrunk = TileDownsample(sizes[0], sizes[1], y.start, x.start, y.to, x.to)
                kept.append(TileRegion(y.first, y.end, x.first, x.end, len(ends), shrunk))
                token_offsets.append(np.concatenate([(lines + np.arange(*x.to)).ravel(), ends]))
        return kept, token_offsets


class _AxisSpan(NamedTuple):
    """Token rows or columns of one row or column of tiles."""

    first: int
    """First kept row of the tile."""
    end: int
    start: int
    """Index of the first kept row in the image."""
    to: tuple[int, int]
    """Range of shrunk rows to which the tile contributes."""
    starting: tuple[int, int]
    """Range of shrunk rows that start in this tile."""
    last: bool
    """Whether the tile has the last row of the image."""


def _axis_spans(low: int, high: int, after: int, tiles: int, side: int) -> list[_AxisSpan]:
    """Return the spans of all tiles along one axis.

    Args:
        low: First row without padding.
        high: End of the rows without padding.
        after: Number of these rows after shrinking.
        tiles: Number of tiles.
        side: Number of rows of a tile.
    """
    weights = interpolation_weights(high - low, after) if after else np.zeros((0, high - low))
    begins = np.argmax(weights != 0, axis=1) if weights.size else np.zeros(0, np.int64)
    spans = []
    for number in range(tiles):
        first, end = (min(max(x - number * side, 0), side) for x in (low, high))
        start = number * side + first - low
        contributing = np.flatnonzero(weights[:, start : start + end - first].any(axis=1))
        starting = np.flatnonzero((begins >= start) & (begins < start + end - first))
        to, started = (
            (int(n[0]), int(n[-1]) + 1) if len(n) else (0, 0) for n in (contributing, starting)
        )
        last = end > first and start + end - first == high - low
        spans.append(_AxisSpan(first, end, start, to, started, last))
    return spans
