"""InternVL: a grid of tiles whose sides are closest to the picture's, and a thumbnail behind it.

All tiles stand between one pair of markers, without anything between them.
"""

from __future__ import annotations

from torchmm.data.media.tiles.scheme import Cut, Scheme


class InternTiles(Scheme):
    """`GotOcr2ImageProcessor` with `crop_to_patches`: `min_patches` to `max_patches` tiles."""

    def cut(self, width_px: int, height_px: int, most: int) -> Cut:
        settings = {}
        if most <= self.processor.max_patches:
            # One of them is the thumbnail, which a picture of a single tile does not have.
            limit = max(1, most - 1)
            settings = {
                "max_patches": limit,
                "min_patches": min(limit, self.processor.min_patches),
            }
        tiles = self.processor.get_number_of_image_patches(height_px, width_px, settings)
        prefix, suffix = self._single()
        return Cut((prefix, *[()] * (tiles - 1), suffix), settings)
