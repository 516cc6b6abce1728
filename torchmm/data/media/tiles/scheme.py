"""What a scheme answers: into which tiles a picture of some size is cut, and what is written
between them.

Sizes come from the header alone. So that no second copy of Hugging Face's arithmetic can drift away
from it, schemes ask the image processor itself, with a view of a picture that has a shape and no
memory (`shape_only`), and pixels come from one call of it per picture.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from torchmm.common.batch import Marks, TextSpec


class Cut(NamedTuple):
    """How one picture is cut."""

    marks: tuple[Marks, ...]
    """Before, between and after its tiles: one more than tiles."""
    settings: dict[str, Any]
    """What the image processor is asked for besides its own settings, to stay within a limit."""

    @property
    def tiles(self) -> int:
        """How many."""
        return len(self.marks) - 1


class Scheme(ABC):
    """Cuts pictures as one Hugging Face processor does.

    Args:
        processor: the image processor, with the checkpoint's settings.
        text: what stands beside single images.
        vocabulary: of the tokenizer; what it lacks is spelled as plain text.
    """

    def __init__(self, processor: Any, text: TextSpec, vocabulary: Mapping[str, int]) -> None:
        self.processor = processor
        self.text = text
        self.vocabulary = vocabulary

    @abstractmethod
    def cut(self, width_px: int, height_px: int, most: int) -> Cut:
        """The tiles of an upright picture, at most `most`: the processor's own choice if that is
        within the limit, otherwise its choice for a smaller resolution."""

    def pixels(self, image: Image.Image, cut: Cut) -> np.ndarray:
        """(tiles, C, H, W) of an RGB image, float32."""
        outputs = self.processor(images=[image], return_tensors="np", **cut.settings)
        values = np.asarray(outputs["pixel_values"], dtype=np.float32)
        return values.reshape(-1, *values.shape[-3:])

    def _single(self) -> tuple[Marks, ...]:
        """Marks of a picture that is not cut."""
        return self.text.image_prefix, self.text.image_suffix


def shape_only(width_px: int, height_px: int) -> np.ndarray:
    """(C, H, W) picture that takes no memory, for functions that only look at its shape."""
    return np.broadcast_to(np.uint8(0), (3, height_px, width_px))


def joined(*parts: Marks) -> Marks:
    """One after another, with adjacent texts as one: they are tokenised together."""
    marks: list[int | str] = []
    for mark in (mark for part in parts for mark in part):
        last = marks[-1] if marks else None
        if isinstance(mark, str) and isinstance(last, str):
            marks[-1] = last + mark
        else:
            marks.append(mark)
    return tuple(marks)
