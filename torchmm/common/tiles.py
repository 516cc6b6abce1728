"""Tiles of images, and the output tokens of each tile in the LLM sequence.

The rows of an image span several tiles:

    tile 0 | tile 1      LLM: row 0 of tile 0, row 0 of tile 1, line end,
    tile 2 | tile 3           row 1 of tile 0, row 1 of tile 1, line end, ...

`torchmm.data` computes the tokens of each tile (`TileRegion`), and the connector selects them. If
the features of an image are interpolated to a smaller size, both need the weights of each tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional


@dataclass(frozen=True)
class TileSpec:
    """Tiling of images. Each tile is an image of the encoder."""

    processor_class: str
    """Name of the Hugging Face image processor, such as "GotOcr2ImageProcessor"."""
    processor: dict[str, Any]
    """Settings of the processor."""
    most_tiles: int = 0
    """AnyRes: maximum number of tiles of an image after interpolation. 0: unlimited."""


class TileDownsample(NamedTuple):
    """Bilinear interpolation of the features of an image to fewer rows and columns, for one tile.

    A tile contributes to some outputs. If adjacent tiles contribute to the same output, the
    connector adds them.
    """

    rows: tuple[int, int]
    """(before, after) number of feature rows of the image."""
    columns: tuple[int, int]
    from_row: int
    """First feature row of the tile, before the interpolation."""
    from_column: int
    to_rows: tuple[int, int]
    """Range of output rows to which the tile contributes."""
    to_columns: tuple[int, int]


class TileRegion(NamedTuple):
    """Rectangle of features of a tile, in row-major order, and line end embeddings after it."""

    top: int
    bottom: int
    left: int
    right: int
    line_ends: int
    downsample: TileDownsample | None = None
    """Interpolation of the rectangle, or None."""

    @property
    def tokens(self) -> int:
        """Number of rows of the connector output."""
        rows = (self.top, self.bottom)
        columns = (self.left, self.right)
        if self.downsample is not None:
            rows = self.downsample.to_rows
            columns = self.downsample.to_columns
        return (rows[1] - rows[0]) * (columns[1] - columns[0]) + self.line_ends

    @classmethod
    def from_json(cls, values: list[Any]) -> TileRegion:
        """Create it from nested lists of JSON."""
        top, bottom, left, right, line_ends, shrunk = values
        if shrunk is not None:
            shrunk = TileDownsample._make(tuple(v) if isinstance(v, list) else v for v in shrunk)
        return cls(top, bottom, left, right, line_ends, shrunk)


@lru_cache(maxsize=256)
def interpolation_weights(before: int, after: int) -> np.ndarray:
    """Return the (after, before) interpolation weights, float32.

    NumPy, because a tensor that is created in inference mode cannot be used in training.
    """
    identity = torch.eye(before, device="cpu")[None, None]
    return functional.interpolate(identity, [after, before], mode="bilinear")[0, 0].numpy()
