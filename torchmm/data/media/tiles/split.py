"""Idefics3 and SmolVLM: rows and columns of tiles, each named by a token, then the whole picture.

A picture is resized until its longer side has `size.longest_edge` pixels, small ones too, and both
sides are whole tiles of `max_image_size.longest_edge`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from transformers.models.idefics3.image_processing_pil_idefics3 import get_resize_output_image_size

from torchmm.common.batch import Marks, TextSpec
from torchmm.data.media.tiles.scheme import Cut, Scheme, shape_only


class SplitTiles(Scheme):
    """`Idefics3ImageProcessor` and `SmolVLMImageProcessor` with `do_image_splitting`."""

    def __init__(self, processor: Any, text: TextSpec, vocabulary: Mapping[str, int]) -> None:
        super().__init__(processor, text, vocabulary)
        self._side: int = processor.max_image_size["longest_edge"]
        self._longest: int = processor.size["longest_edge"]
        self._sizes = _sizes_only(processor)

    def cut(self, width_px: int, height_px: int, most: int) -> Cut:
        # The processor's own resolution, then fewer and fewer whole tiles along the longer side.
        lower = range(-(-self._longest // self._side) - 1, 0, -1)
        for longest in (self._longest, *(self._side * tiles for tiles in lower)):
            rows, columns = self._grid(width_px, height_px, longest)
            if rows * columns + 1 <= most:
                break
        settings = {} if longest == self._longest else {"size": {"longest_edge": longest}}
        return Cut(self._marks(rows, columns), settings)

    def _grid(self, width_px: int, height_px: int, longest: int) -> tuple[int, int]:
        """Rows and columns; none if the whole picture is the only tile."""
        image = shape_only(width_px, height_px)
        if self.processor.do_resize:
            image = shape_only(*reversed(get_resize_output_image_size(image, longest)))
        image = self._sizes.resize_for_vision_encoder(image, self._side)
        _, rows, columns = self._sizes.split_images(image, self.processor.max_image_size)
        return rows, columns

    def _marks(self, rows: int, columns: int) -> tuple[Marks, ...]:
        prefix, suffix = self._single()
        if rows * columns == 0:
            return prefix, suffix
        marks: list[Marks] = []
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                name = f"<row_{row}_col_{column}>"
                line_feed = ("\n",) if column == 1 and row > 1 else ()
                marks.append((*line_feed, prefix[0], self.vocabulary.get(name, name)))
        return (*marks, ("\n\n", *prefix), suffix)


def _sizes_only(processor: Any) -> Any:
    """The processor with a `resize` that makes shapes without pixels."""
    kind = type(processor)

    def resize(self: Any, image: np.ndarray, size: Any, **_: Any) -> np.ndarray:
        return shape_only(size.width, size.height)

    return type(f"{kind.__name__}Sizes", (kind,), {"resize": resize})(**processor.to_dict())
