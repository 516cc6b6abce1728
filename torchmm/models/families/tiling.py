"""Whether and how a model's pictures are cut into tiles: what checkpoints' processors say.

Hugging Face's processors (the classes that also write the text) override some settings of the
image processor's file; what applies there applies here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torchmm.common.errors import ConfigError
from torchmm.common.tiles import TileSpec


@dataclass(frozen=True)
class Tiling:
    """How checkpoints of a family cut pictures into tiles of their tower's size."""

    processor_class: str
    """Hugging Face's image processor, which replaces the tower's own for pictures."""
    switch: str | None
    """Its setting that turns tiles on; None: the model knows nothing else."""
    on: bool | None = None
    """What Hugging Face's processor sets it to, whatever the image processor's file says; None: the
    file decides."""
    side: str = "size"
    """Its setting with the side of a tile."""
    sides_of_picture: int = 0
    """Tiles along a picture's longer side if nothing says so (`size.longest_edge`)."""
    overridden: Mapping[str, Any] = field(default_factory=dict)
    """Further settings that Hugging Face's processor overrides."""
    most_tiles: int = 0
    """See `TileSpec`."""
    single: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the tower's own processor without tiles, by which exports are read again as what
    they were trained as, by Hugging Face's processor too."""

    def spec(
        self,
        key: str,
        side_px: int,
        tower: Mapping[str, Any],
        file: Mapping[str, Any],
        recipe: Mapping[str, Any],
        whole: bool,
    ) -> TileSpec | None:
        """How to cut; None: a picture is one image.

        Args:
            key: the recipe's section, for messages.
            side_px: of the tower's images.
            tower: settings of its own image processor.
            file: settings in the image processor's file; empty: there is none. One of another
                image processor says nothing about tiles.
            recipe: settings in the recipe, which rule.
            whole: the file is of this very model, and not only of its tower. Otherwise, and without
                a file, only the recipe turns tiles on.

        Raises:
            ConfigError: tiles would not fit the tower.
        """
        if not self._reads(file):
            file = {}
        if not self._asked(file, recipe, whole):
            return None
        settings: dict[str, Any] = {"size": {"height": side_px, "width": side_px}}
        if self.switch is None:
            settings = {n: v for n, v in tower.items() if v is not None}
        if self.sides_of_picture:
            settings = {"size": {"longest_edge": self.sides_of_picture * side_px}}
            settings[self.side] = {"longest_edge": side_px}
        settings |= {name: value for name, value in file.items() if value is not None}
        settings |= (
            {**recipe, **self.overridden}
            if self.switch is None
            else {**self.overridden, **recipe, self.switch: True}
        )
        for name in ("image_processor_type", "processor_class"):
            settings.pop(name, None)
        found = settings.get("crop_size") or settings[self.side]
        if set(found.values() if isinstance(found, Mapping) else [found]) != {side_px}:
            raise ConfigError(
                f"[{key}] processor.{self.side} = {found}, but tiles require the image size "
                f"of the model, {side_px} pixels; remove the setting from the recipe or from "
                "the processor file of the model"
            )
        return TileSpec(self.processor_class, settings, self.most_tiles)

    def _reads(self, file: Mapping[str, Any]) -> bool:
        written = str(file.get("image_processor_type", self.processor_class))
        kind = written.removesuffix("Fast").removesuffix("Pil")
        return kind == self.processor_class or {kind, self.processor_class} == _ALIKE

    def _asked(self, file: Mapping[str, Any], recipe: Mapping[str, Any], whole: bool) -> bool:
        if self.switch is None:
            return True
        asked = recipe.get(self.switch)
        if asked is None and whole and file:
            asked = file.get(self.switch, True) if self.on is None else self.on
        return bool(asked)


_ALIKE = {"Idefics3ImageProcessor", "SmolVLMImageProcessor"}
INTERN_TILES = Tiling(
    "GotOcr2ImageProcessor", switch="crop_to_patches", on=True, single={"max_patches": 1}
)
SPLIT_TILES = Tiling(
    "Idefics3ImageProcessor",
    switch="do_image_splitting",
    side="max_image_size",
    sides_of_picture=4,
)
SMOLVLM_TILES = replace(SPLIT_TILES, processor_class="SmolVLMImageProcessor")
PAN_AND_SCAN = Tiling(
    "Gemma3ImageProcessor",
    switch="do_pan_and_scan",
    on=False,
    overridden={
        "pan_and_scan_min_crop_size": 256,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    },
)
LLAVA_NEXT_TILES = Tiling("LlavaNextImageProcessor", switch=None)
ONEVISION_TILES = Tiling("LlavaOnevisionImageProcessor", switch=None)
