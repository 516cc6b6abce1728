"""Gemma 3's pan and scan: the whole picture, then crops of it if it is far from square.

Hugging Face's processor leaves it off, whatever the image processor's file says; `do_pan_and_scan`
in the recipe turns it on.
"""

from __future__ import annotations

from typing import Any

from torchmm.data.media.tiles.scheme import Cut, Scheme, joined, shape_only

CROPS = "pan_and_scan_max_num_crops"
FIRST = "Here is the original image "
THEN = " and here are some crops to help you see better "


class PanAndScan(Scheme):
    """`Gemma3ImageProcessor` with `do_pan_and_scan`."""

    def cut(self, width_px: int, height_px: int, most: int) -> Cut:
        prefix, suffix = self._single()
        settings: dict[str, Any] = {}
        if most <= self.processor.pan_and_scan_max_num_crops:
            # A single crop would be the whole picture once more.
            off = most < 3
            settings = {"do_pan_and_scan": False} if off else {CROPS: most - 1}
        crops = self._crops(width_px, height_px, settings)
        if not crops:
            return Cut((prefix, suffix), settings)
        first = joined((FIRST,), prefix)
        second = joined(suffix, (THEN,), prefix)
        further = joined(suffix, (" ",), prefix)
        return Cut((first, second, *[further] * (crops - 1), suffix), settings)

    def _crops(self, width_px: int, height_px: int, settings: dict[str, Any]) -> int:
        if not settings.get("do_pan_and_scan", True):
            return 0
        names = ("pan_and_scan_min_crop_size", CROPS, "pan_and_scan_min_ratio_to_activate")
        asked = {name: settings.get(name, getattr(self.processor, name)) for name in names}
        return len(self.processor.pan_and_scan(image=shape_only(width_px, height_px), **asked))
