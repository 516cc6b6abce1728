"""Tiling of images, as in the processors of Hugging Face checkpoints.

Hugging Face processors (the classes that also prepare text) override some settings of the image
processor file. The same overrides apply in torchmm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torchmm.common.errors import ConfigError
from torchmm.common.tiles import TileSpec


@dataclass(frozen=True)
class Tiling:
    """The tiling of images in checkpoints of a family. Tiles have the image size of the encoder."""

    processor_class: str
    """Hugging Face image processor class, which replaces that of the encoder for tiled images."""
    switch: str | None
    """Processor setting that enables tiles, or None if tiles are always enabled."""
    switch_value: bool | None = None
    """Value to which the Hugging Face processor sets the switch. None means the value in the image
    processor file."""
    tile_size_key: str = "size"
    """Name of the setting with the tile size."""
    tiles_per_longer_side: int = 0
    """Default number of tiles along the longer side of an image (`size.longest_edge`)."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Other settings that the Hugging Face processor overrides."""
    most_tiles: int = 0
    """Maximum number of tiles per image (`TileSpec`)."""
    untiled_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the encoder processor without tiles. They make sure that torchmm and Hugging Face
    read an export as it was trained."""

    def spec(
        self,
        key: str,
        side_px: int,
        tower: Mapping[str, Any],
        file: Mapping[str, Any],
        recipe: Mapping[str, Any],
        is_multimodal: bool,
    ) -> TileSpec | None:
        """Return the tiling, or None if an image is not split.

        Args:
            key: Section of the recipe, for messages.
            side_px: Image size of the encoder in pixels.
            tower: Settings of the image processor of the encoder.
            file: Settings in the image processor file, or {} without a file. Settings of a
                different image processor class are ignored.
            recipe: Settings in the recipe, which have priority.
            is_multimodal: Whether the file belongs to the full model and not only to its encoder.
                Otherwise, and without a file, only the recipe enables tiles.

        Raises:
            ConfigError: The tile size does not fit the encoder.
        """
        if not self._reads(file):
            file = {}
        if not self._is_enabled(file, recipe, is_multimodal):
            return None
        settings: dict[str, Any] = {"size": {"height": side_px, "width": side_px}}
        if self.switch is None:
            settings = {n: v for n, v in tower.items() if v is not None}
        if self.tiles_per_longer_side:
            settings = {"size": {"longest_edge": self.tiles_per_longer_side * side_px}}
            settings[self.tile_size_key] = {"longest_edge": side_px}
        settings |= {name: value for name, value in file.items() if value is not None}
        settings |= (
            {**recipe, **self.overrides}
            if self.switch is None
            else {**self.overrides, **recipe, self.switch: True}
        )
        for name in ("image_processor_type", "processor_class"):
            settings.pop(name, None)
        tile_size = settings.get("crop_size") or settings[self.tile_size_key]
        sides = tile_size.values() if isinstance(tile_size, Mapping) else [tile_size]
        if set(sides) != {side_px}:
            raise ConfigError(
                f"[{key}] processor.{self.tile_size_key} = {tile_size}, but tiles require the "
                f"image size of the model, {side_px} pixels; remove the setting from the recipe or "
                "from the processor file of the model"
            )
        return TileSpec(self.processor_class, settings, self.most_tiles)

    def _reads(self, file: Mapping[str, Any]) -> bool:
        written = str(file.get("image_processor_type", self.processor_class))
        kind = written.removesuffix("Fast").removesuffix("Pil")
        return kind == self.processor_class or {kind, self.processor_class} == _EQUIVALENT

    def _is_enabled(
        self, file: Mapping[str, Any], recipe: Mapping[str, Any], is_multimodal: bool
    ) -> bool:
        if self.switch is None:
            return True
        enabled = recipe.get(self.switch)
        if enabled is None and is_multimodal and file:
            enabled = (
                file.get(self.switch, True) if self.switch_value is None else self.switch_value
            )
        return bool(enabled)


_EQUIVALENT = {"Idefics3ImageProcessor", "SmolVLMImageProcessor"}
INTERN_TILES = Tiling(
    "GotOcr2ImageProcessor",
    switch="crop_to_patches",
    switch_value=True,
    untiled_settings={"max_patches": 1},
)
SPLIT_TILES = Tiling(
    "Idefics3ImageProcessor",
    switch="do_image_splitting",
    tile_size_key="max_image_size",
    tiles_per_longer_side=4,
)
SMOLVLM_TILES = replace(SPLIT_TILES, processor_class="SmolVLMImageProcessor")
PAN_AND_SCAN = Tiling(
    "Gemma3ImageProcessor",
    switch="do_pan_and_scan",
    switch_value=False,
    overrides={
        "pan_and_scan_min_crop_size": 256,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    },
)
LLAVA_NEXT_TILES = Tiling("LlavaNextImageProcessor", switch=None)
ONEVISION_TILES = Tiling("LlavaOnevisionImageProcessor", switch=None)
