"""Tiles of pictures: how they are cut, and which of their output tokens reach the LLM, where a
picture's lines go through several of them.

`torchmm.data` says the latter, the connector does it, and both have to know which tokens a shrunken
picture takes from which tile.
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
    """How pictures are cut into tiles, each of which is an image of the encoder."""

    processor_class: str
    """Name of the Hugging Face image processor that cuts them, e.g. "GotOcr2ImageProcessor"."""
    processor: dict[str, Any]
    """Its settings."""
    most_tiles: int = 0
    """AnyRes: how many tiles' tokens a picture may have; 0: any number."""


class Shrunk(NamedTuple):
    """Bilinear interpolation of a picture's features to fewer rows and columns, of which a tile
    gives a share: where its neighbours also have one, the LLM's input is the sum."""

    rows: tuple[int, int]
    """Of all features of the picture, before and after."""
    columns: tuple[int, int]
    from_row: int
    """The tile's first row among those before."""
    from_column: int
    to_rows: tuple[int, int]
    """Rows after it to which the tile contributes."""
    to_columns: tuple[int, int]


class Kept(NamedTuple):
    """A rectangle of a tile's rows and columns, row by row, and then embeddings that end lines of
    the picture."""

    top: int
    bottom: int
    left: int
    right: int
    line_ends: int
    shrunk: Shrunk | None = None
    """What becomes of the rectangle; None: it stays as it is."""

    @property
    def tokens(self) -> int:
        """Rows of the connector's output."""
        rows = (self.top, self.bottom)
        columns = (self.left, self.right)
        if self.shrunk is not None:
            rows = self.shrunk.to_rows
            columns = self.shrunk.to_columns
        return (rows[1] - rows[0]) * (columns[1] - columns[0]) + self.line_ends

    @classmethod
    def from_json(cls, values: list[Any]) -> Kept:
        """From nested lists, as JSON leaves it."""
        top, bottom, left, right, line_ends, shrunk = values
        if shrunk is not None:
            shrunk = Shrunk._make(tuple(v) if isinstance(v, list) else v for v in shrunk)
        return cls(top, bottom, left, right, line_ends, shrunk)


@lru_cache(maxsize=256)
def shrink_weights(before: int, after: int) -> np.ndarray:
    """(after, before) float32: what each feature adds to each that is left of them.

    An array, because a tensor made while validating could not be used in training later.
    """
    every = torch.eye(before, device="cpu")[None, None]
    return functional.interpolate(every, [after, before], mode="bilinear")[0, 0].numpy()
