"""What image processors of encoders for any size make of a picture, and how large it becomes.

Every processor resizes by a rule of its own and reports its result in a form of its own. Here are
these rules, so that sizes are known without running a processor.

Shape legend: P patches of one image, D values of one patch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
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


class PatchLayout(ABC):
    """The results of one kind of processor.

    Args:
        processor: Hugging Face's.
        spec: how the encoder wants its images.
    """

    marker: ClassVar[str]
    """What only results of this kind contain."""
    made_by: ClassVar[str] = ""
    """How names of its processors begin, where others give the same results by another rule."""

    def __init__(self, processor: Any, spec: ImageSpec) -> None:
        self.processor = processor
        self.spec = spec

    def settings(self) -> dict[str, Any]:
        """Arguments of every call of the processor."""
        return {}

    @abstractmethod
    def limits(self, limit_px: int) -> dict[str, Any]:
        """The processor's settings that limit sizes.

        Args:
            limit_px: most pixels after resizing; 0: the processor's own limit.
        """

    @abstractmethod
    def size(self, width_px: int, height_px: int, limit_px: int) -> tuple[int, int]:
        """(height, width) after resizing.

        Raises:
            CorruptSampleError: the processor cannot resize such a picture.
        """

    @abstractmethod
    def patches(self, outputs: Mapping[str, Any]) -> np.ndarray:
        """(P, D) of the only image, without padding."""

    def problems(self) -> list[str]:
        """What the processor has that does not fit the encoder."""
        return self._differs("patch size", self.processor.patch_size, self.spec.patch_size_px)

    def _differs(self, what: str, found: int, wanted: int) -> list[str]:
        return [] if found == wanted else [f"{what} {found}, encoder {wanted}"]


class NaflexLayout(PatchLayout):
    """SigLIP2's: at most so many patches, in grids with any sides."""

    marker = "spatial_shapes"

    def limits(self, limit_px: int) -> dict[str, Any]:
        most = self.processor.max_num_patches
        limit = max(1, limit_px // self.spec.patch_size_px**2) if limit_px else most
        return {"max_num_patches": min(most, limit)}

    def size(self, width_px: int, height_px: int, limit_px: int) -> tuple[int, int]:
        most = self.limits(limit_px)["max_num_patches"]
        return get_image_size_for_max_num_patches(
            height_px, width_px, self.spec.patch_size_px, most
        )

    def patches(self, outputs: Mapping[str, Any]) -> np.ndarray:
        rows, columns = outputs["spatial_shapes"][0]
        return np.asarray(outputs["pixel_values"])[0, : rows * columns]

    def problems(self) -> list[str]:
        odd = "grids with odd sides, which cannot be merged by pixel shuffle"
        return super().problems() + ([odd] if self.spec.merge != 1 else [])


class MergedLayout(PatchLayout):
    """Qwen's: sides that merged patches divide, between two numbers of pixels."""

    marker = "image_grid_thw"

    def limits(self, limit_px: int) -> dict[str, Any]:
        least, most = (self.processor.size[edge] for edge in ("shortest_edge", "longest_edge"))
        limit = max(limit_px, least) if limit_px else most
        return {"size": {"shortest_edge": least, "longest_edge": min(most, limit)}}

    def size(self, width_px: int, height_px: int, limit_px: int) -> tuple[int, int]:
        size = self.limits(limit_px)["size"]
        return smart_resize(
            height_px,
            width_px,
            factor=self.spec.patch_size_px * self.spec.merge,
            min_pixels=size["shortest_edge"],
            max_pixels=size["longest_edge"],
        )

    def patches(self, outputs: Mapping[str, Any]) -> np.ndarray:
        return np.asarray(outputs["pixel_values"])

    def problems(self) -> list[str]:
        differs = self._differs("merge size", self.processor.merge_size, self.spec.merge)
        return super().problems() + differs


class FramedLayout(MergedLayout):
    """GLM's: the same, but the two numbers are of all frames that a patch spans, and pictures
    smaller than a token are enlarged first."""

    made_by = "Glm4"

    def limits(self, limit_px: int) -> dict[str, Any]:
        return super().limits(limit_px * self.processor.temporal_patch_size)

    def size(self, width_px: int, height_px: int, limit_px: int) -> tuple[int, int]:
        size = self.limits(limit_px)["size"]
        frames = self.processor.temporal_patch_size
        return resize_frames(
            frames,
            height_px,
            width_px,
            temporal_factor=frames,
            factor=self.spec.patch_size_px * self.spec.merge,
            min_pixels=size["shortest_edge"],
            max_pixels=size["longest_edge"],
        )


class PooledLayout(PatchLayout):
    """Gemma 4's: as large as one of five numbers of tokens allows."""

    marker = "image_position_ids"
    tokens: ClassVar[tuple[int, ...]] = (70, 140, 280, 560, 1120)
    """Numbers that the processor accepts as the most of an image."""

    def limits(self, limit_px: int) -> dict[str, Any]:
        most = self.processor.max_soft_tokens
        token_px = (self.spec.patch_size_px * self.processor.pooling_kernel_size) ** 2
        limit = limit_px // token_px if limit_px else most
        allowed = [number for number in self.tokens if number <= min(most, limit)]
        return {"max_soft_tokens": max(allowed, default=self.tokens[0])}

    def size(self, width_px: int, height_px: int, limit_px: int) -> tuple[int, int]:
        side = self.processor.pooling_kernel_size
        most = self.limits(limit_px)["max_soft_tokens"] * side**2
        return get_aspect_ratio_preserving_size(
            height_px, width_px, self.spec.patch_size_px, most, side
        )

    def patches(self, outputs: Mapping[str, Any]) -> np.ndarray:
        shown = (np.asarray(outputs["image_position_ids"])[0] >= 0).all(-1).sum()
        return np.asarray(outputs["pixel_values"])[0, :shown]

    def problems(self) -> list[str]:
        side = self.processor.pooling_kernel_size
        return super().problems() + self._differs("pooling_kernel_size", side, self.spec.merge)


class SizedLayout(PatchLayout):
    """Pixtral's: whole pictures, shrunk to a longest side and rounded up to whole tokens, which
    Mistral 3's processor calls patches."""

    marker = "image_sizes"

    def settings(self) -> dict[str, Any]:
        token = self.spec.patch_size_px * self.spec.merge
        return {"patch_size": {"height": token, "width": token}}

    def limits(self, limit_px: int) -> dict[str, Any]:
        patch = self.spec.patch_size_px * self.spec.merge
        most = self.processor.size["longest_edge"]
        limit = max(patch, isqrt(limit_px) // patch * patch) if limit_px else most
        return {"size": {"longest_edge": min(most, limit)}}

    def size(self, width_px: int, height_px: int, limit_px: int) -> tuple[int, int]:
        longest = self.limits(limit_px)["size"]["longest_edge"]
        shape_only = np.broadcast_to(np.uint8(0), (3, height_px, width_px))
        channels = ChannelDimension.FIRST
        patch = self.spec.patch_size_px * self.spec.merge
        height, width = get_resize_output_image_size(shape_only, longest, patch, channels)
        if not height or not width:  # where the processor itself would fail
            raise CorruptSampleError(
                f"image of {width_px}x{height_px} pixels: less than one wide if its longer side "
                f"becomes {longest}"
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
"""The first that fits."""


def layout_of(outputs: Iterable[str], processor_class: str) -> type[PatchLayout] | None:
    """The kind of results of a processor; None: of no known kind."""
    names = set(outputs)
    fitting = (kind for kind in LAYOUTS if processor_class.startswith(kind.made_by))
    return next((kind for kind in fitting if kind.marker in names), None)
