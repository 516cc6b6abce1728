"""Image sizes and patches of processors for encoders with variable resolution.

Each processor has a different resizing rule and output format. A layout calls the functions with
which the processor computes sizes, so that planning does not run the processor. Running the
processor on an array without memory would require 59 to 65 us per size instead of 2 to 17 us.

Shape legend: P patches of one image, D values of one patch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import isqrt
from typing import Any, ClassVar

import numpy as np
from transformers.image_utils import ChannelDimension
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    get_aspect_ratio_preserving_size,
)
from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize as resize_frames
from transformers.models.pixtral.image_processing_pil_pixtral import (
    get_resize_output_image_size,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.models.siglip2.image_processing_pil_siglip2 import (
    get_image_size_for_max_num_patches,
)

from torchmm.common.batch import ImageSpec
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.media.uint8_pixels import shape_array
from torchmm.data.record_formats.sample import MediaOptions

RESIZED_TOKENS = 4, 16384
"""Minimum and maximum number of tokens of an image whose record sets its size, as in
`qwen_vl_utils`."""


class PatchLayout(ABC):
    """Output format of one type of processor.

    Args:
        processor: Hugging Face image processor.
        spec: Image inputs of the encoder.
    """

    marker: ClassVar[str]
    """Name of an output that identifies this type of processor."""
    name_prefix: ClassVar[str] = ""
    """Prefix of the class names, if processors with other rules have the same outputs."""

    def __init__(self, processor: Any, spec: ImageSpec) -> None:
        self.processor = processor
        self.spec = spec
        self.token_px = spec.patch_size_px * spec.merge
        """Side of the square of one token in pixels."""

    def settings(self) -> dict[str, Any]:
        """Return arguments for each call of the processor."""
        return {}

    @abstractmethod
    def limits(self, limit_px: int) -> dict[str, Any]:
        """Return the processor settings that limit sizes.

        Args:
            limit_px: Maximum number of pixels after resizing. 0 for the limit of the processor.
        """

    @abstractmethod
    def size(self, width_px: int, height_px: int, limit_px: int) -> tuple[int, int]:
        """Return (height, width) after resizing.

        Raises:
            CorruptSampleError: The processor cannot resize an image of this size.
        """

    def size_with_options(
        self, width_px: int, height_px: int, limit_px: int, options: MediaOptions
    ) -> tuple[int, int] | None:
        """Return (height, width) after resizing with the options of a record.

        Returns:
            None if the processor does not have such options.
        """
        return None

    @abstractmethod
    def patches(self, outputs: Mapping[str, Any]) -> np.ndarray:
        """Return the patches of the only image without padding: (P, D)."""

    def problems(self) -> list[str]:
        """Return descriptions of processor settings that do not match the encoder."""
        return self._differs("patch size", self.processor.patch_size, self.spec.patch_size_px)

    def _differs(self, name: str, value: int, encoder_value: int) -> list[str]:
        return [] if value == encoder_value else [f"{name} {value}, encoder {encoder_value}"]


class NaflexLayout(PatchLayout):
    """Layout of SigLIP2: a maximum number of patches, in any grid."""

    marker = "spatial_shapes"

    def limits(self, limit_px: int) -> dict[str, Any]:
        max_patches = self.processor.max_num_patches
        limit = max(1, limit_px // self.spec.patch_size_px**2) if limit_px else max_patches
        return {"max_num_patches": min(max_patches, limit)}

    def size(self, width_px: int, height_px: int, limit_px: int) -> tuple[int, int]:
        max_patches = self.limits(limit_px)["max_num_patches"]
        side = self.spec.patch_size_px
        return get_image_size_for_max_num_patches(height_px, width_px, side, max_patches)

    def patches(self, outputs: Mapping[str, Any]) -> np.ndarray:
        rows, columns = outputs["spatial_shapes"][0]
        return np.asarray(outputs["pixel_values"])[0, : rows * columns]

    def problems(self) -> list[str]:
        odd = "a grid with odd height or width, which pixel shuffle does not support"
        return super().problems() + ([odd] if self.spec.merge != 1 else [])


class MergedLayout(PatchLayout):
    """Layout of Qwen: sides divisible by merged patches, between two numbers of pixels."""

    marker = "image_grid_thw"

    def limits(self, limit_px: int) -> dict[str, Any]:
        min_px, max_px = (self.processor.size[edge] for edge in ("shortest_edge", "longest_edge"))
        limit = max(limit_px, min_px) if limit_px else max_px
        return {"size": {"shortest_edge": min_px, "longest_edge": min(max_px, limit)}}

    def size(self, width_px: int, height_px: int, limit_px: int) -> tuple[int, int]:
        min_px, max_px = self.limits(limit_px)["size"].values()
        return smart_resize(height_px, width_px, self.token_px, min_px, max_px)

    def size_with_options(
        self, width_px: int, height_px: int, limit_px: int, options: MediaOptions
    ) -> tuple[int, int] | None:
        """Return (height, width) by the rules of `qwen_vl_utils`."""
        side = self.token_px
        if options.resized_height is not None and options.resized_width is not None:
            limits = (tokens * side**2 for tokens in RESIZED_TOKENS)
            return smart_resize(options.resized_height, options.resized_width, side, *limits)
        min_px, max_px = (self.processor.size[edge] for edge in ("shortest_edge", "longest_edge"))
        if options.min_pixels is not None:
            min_px = options.min_pixels
            max_px = max(min_px, max_px)
        if options.max_pixels is not None:
            max_px = options.max_pixels
            min_px = min(min_px, max_px)
        if limit_px:  # as `qwen_vl_utils`, leave a margin above the minimum
            max_px = min(max_px, max(limit_px, int(1.05 * min_px)))
        return smart_resize(height_px, width_px, side, min_px, max_px)

    def patches(self, outputs: Mapping[str, Any]) -> np.ndarray:
        return np.asarray(outputs["pixel_values"])

    def problems(self) -> list[str]:
        differs = self._differs("merge size", self.processor.merge_size, self.spec.merge)
        return super().problems() + differs


class FramedLayout(MergedLayout):
    """Layout of GLM: like Qwen, but limits count all frames of a patch.

    Images that are smaller than a token are enlarged first.
    """

    name_prefix = "Glm4"

    def limits(self, limit_px: int) -> dict[str, Any]:
        return super().limits(limit_px * self.processor.temporal_patch_size)

    def size_with_options(
        self, width_px: int, height_px: int, limit_px: int, options: MediaOptions
    ) -> tuple[int, int] | None:
        """Return None, because limits of GLM count all frames of a patch."""
        return None

    def size(self, width_px: int, height_px: int, limit_px: int) -> tuple[int, int]:
        min_px, max_px = self.limits(limit_px)["size"].values()
        frames = self.processor.temporal_patch_size
        return resize_frames(frames, height_px, width_px, frames, self.token_px, min_px, max_px)


class PooledLayout(PatchLayout):
    """Layout of Gemma 4: the largest size within one of five numbers of tokens."""

    marker = "image_position_ids"
    tokens: ClassVar[tuple[int, ...]] = (70, 140, 280, 560, 1120)
    """Values of `max_soft_tokens` that the processor accepts."""

    def limits(self, limit_px: int) -> dict[str, Any]:
        max_tokens = self.processor.max_soft_tokens
        limit = limit_px // self.token_px**2 if limit_px else max_tokens
        allowed = [number for number in self.tokens if number <= min(max_tokens, limit)]
        return {"max_soft_tokens": max(allowed, default=self.tokens[0])}

    def size(self, width_px: int, height_px: int, limit_px: int) -> tuple[int, int]:
        side = self.spec.patch_size_px
        merge = self.spec.merge
        max_patches = self.limits(limit_px)["max_soft_tokens"] * merge**2
        return get_aspect_ratio_preserving_size(height_px, width_px, side, max_patches, merge)

    def patches(self, outputs: Mapping[str, Any]) -> np.ndarray:
        num_patches = (np.asarray(outputs["image_position_ids"])[0] >= 0).all(-1).sum()
        return np.asarray(outputs["pixel_values"])[0, :num_patches]

    def problems(self) -> list[str]:
        side = self.processor.pooling_kernel_size
        return super().problems() + self._differs("pooling_kernel_size", side, self.spec.merge)


class SizedLayout(PatchLayout):
    """Layout of Pixtral: images shrunk to a longest side and rounded up to full tokens.

    The processor of Mistral 3 calls the tokens patches.
    """

    marker = "image_sizes"

    def settings(self) -> dict[str, Any]:
        return {"patch_size": {"height": self.token_px, "width": self.token_px}}

    def limits(self, limit_px: int) -> dict[str, Any]:
        side = self.token_px
        max_side_px = self.processor.size["longest_edge"]
        limit = max(side, isqrt(limit_px) // side * side) if limit_px else max_side_px
        return {"size": {"longest_edge": min(max_side_px, limit)}}

    def size(self, width_px: int, height_px: int, limit_px: int) -> tuple[int, int]:
        longest = self.limits(limit_px)["size"]["longest_edge"]
        height, width = get_resize_output_image_size(
            shape_array(width_px, height_px), longest, self.token_px, ChannelDimension.FIRST
        )
        if not height or not width:  # the processor would fail
            raise CorruptSampleError(
                f"image of {width_px}x{height_px} pixels becomes less than one pixel wide if "
                f"its longer side is resized to {longest}"
            )
        return height, width

    def patches(self, outputs: Mapping[str, Any]) -> np.ndarray:
        height, width = outputs["image_sizes"][0]
        image = np.asarray(outputs["pixel_values"])[0][:, :height, :width]
        side = self.spec.patch_size_px
        grid = image.reshape(len(image), height // side, side, width // side, side)
        return grid.transpose(1, 3, 0, 2, 4).reshape(-1, len(image) * side**2)

    def problems(self) -> list[str]:
        side = self.processor.patch_size["height"]
        return self._differs("patch size", side, self.spec.patch_size_px)


LAYOUTS: tuple[type[PatchLayout], ...] = (
    NaflexLayout,
    FramedLayout,
    MergedLayout,
    PooledLayout,
    SizedLayout,
)
"""All layouts. The first match is used."""
