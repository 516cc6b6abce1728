"""Images and clips that a generator has to draw: sizes, pixels, noise and times.

Every frame is brought to the generator's square (scaled to cover it, then cropped at the centre)
and cut into patches. A clip is an animated GIF, WebP or PNG; if it has too many frames, evenly
spaced ones are taken.

Noise and time of an image are a pure function of the run's seed, the sample and the epoch, so they
are the same for any ranks, workers or microbatches, and after resuming. Noise is as large as what
is drawn, so who decodes pixels leaves it out (`torchmm.data.serve` would send it), and who trains
on them adds it (`DrawingPreprocessor.with_noise`). Rejected: drawing it on the device that trains,
where it would depend on the layout.

Shape legend: P patches of one image, V values of a patch (channels x rows x columns), F frames,
H, W pixels, C channels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from PIL import Image, ImageOps

from torchmm.common.generated import GeneratedMeta, GeneratorInputs, GeneratorSpec
from torchmm.data.media.images import count_frames, decode_frames, read_size

Key = tuple[object, ...]
"""Always names the same image: source, sample, epoch, number within the sample."""


@dataclass(frozen=True)
class DecodedDrawing:
    """One image or clip to be drawn, as arrays."""

    meta: GeneratedMeta
    patches_PV: np.ndarray | None
    """uint8. None: another rank decodes it, or none does here."""
    time: float
    context_end: int
    """Tokens of the sample before it; the last of them are its context."""
    counted: bool


class DrawingPreprocessor:
    """Prepares what one generator has to draw.

    Args:
        spec: how the generator wants its images.
        seed: of noise and times.
        max_pixels: images with more in their header are corrupt.
    """

    def __init__(self, spec: GeneratorSpec, seed: int, max_pixels: int) -> None:
        self.spec = spec
        self._seed = seed
        self._max_pixels = max_pixels

    @classmethod
    def of(
        cls, spec: GeneratorSpec | None, seed: int, max_pixels: int
    ) -> DrawingPreprocessor | None:
        """None where there is no generator."""
        return None if spec is None else cls(spec, seed, max_pixels)

    def grid(self, data: bytes) -> tuple[int, int, int]:
        """Patches as (frames, rows, columns), from the header alone.

        Raises:
            CorruptSampleError: not an image of a known format, or of an unacceptable size.
        """
        read_size(data, self._max_pixels)
        frames = count_frames(data, self._max_pixels) if self.spec.frames > 1 else 1
        return self.spec.grid(frames)

    def context(self, context_end: int) -> int:
        """Tokens that an image depends on with so many before it."""
        return min(context_end, self.spec.context_tokens)

    def decode(
        self, data: bytes, meta: GeneratedMeta, context_end: int, key: Key
    ) -> DecodedDrawing:
        """Pixels and time.

        Raises:
            CorruptSampleError: the pixels cannot be decoded.
        """
        frames = decode_frames(data, self._max_pixels, meta.grid_thw[0])
        patches_PV = np.concatenate([self._patches(frame) for frame in frames])
        return DecodedDrawing(meta, patches_PV, self._time(key), context_end, counted=True)

    def without_pixels(self, meta: GeneratedMeta, context_end: int, key: Key) -> DecodedDrawing:
        """The same for a rank that does not decode it."""
        return DecodedDrawing(meta, None, self._time(key), context_end, counted=True)

    def blank(self, meta: GeneratedMeta, key: Key) -> DecodedDrawing:
        """Stands in for an image that cannot be decoded: same sizes, does not count."""
        patches_PV = np.zeros((meta.patches, self.values), np.uint8)
        return DecodedDrawing(meta, patches_PV, self._time(key), meta.context, counted=False)

    def with_noise(self, inputs: GeneratorInputs, keys: Sequence[Key]) -> GeneratorInputs:
        """The inputs with the noise of those images whose pixels they have.

        Args:
            keys: of all images.
        """
        held = range(len(keys)) if inputs.held is None else inputs.held
        widths = [self.spec.latent_values or self.values, self.spec.latent_noise]
        noise = [torch.zeros(0, sum(widths))]
        for number in held:
            generator, _ = self._begin(keys[number])
            rows = inputs.pixel_rows[number]
            # What latents are drawn with comes last, so that the rest is the same without it.
            parts = [torch.randn(rows, n, generator=generator) for n in widths if n]
            noise.append(torch.cat(parts, dim=1))
        return replace(inputs, noise_PV=torch.cat(noise), latent_values=self.spec.latent_values)

    @property
    def values(self) -> int:
        """V, of pixels."""
        return 3 * self.spec.patch_size_px**2

    def _patches(self, frame: Image.Image) -> np.ndarray:
        size, patch = self.spec.size_px, self.spec.patch_size_px
        square = ImageOps.fit(frame, (size, size), Image.Resampling.BICUBIC)
        side = size // patch
        blocks = np.asarray(square).reshape(side, patch, side, patch, 3).transpose(0, 2, 4, 1, 3)
        return blocks.reshape(side * side, -1)

    def _time(self, key: Key) -> float:
        return self._begin(key)[1]

    def _begin(self, key: Key) -> tuple[torch.Generator, float]:
        """An image's random numbers: its time, and what its noise comes from."""
        digest = hashlib.sha256(json.dumps([self._seed, *key]).encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        if self.spec.time_sampling == "uniform":
            time = torch.rand((), generator=generator)
        else:
            time = torch.randn((), generator=generator).sigmoid()
        return generator, time.item()


@dataclass
class DrawingRow:
    """What is to be drawn in a microbatch under construction."""

    drawings: list[DecodedDrawing] = field(default_factory=list)
    context_positions: list[np.ndarray] = field(default_factory=list)

    def append(self, drawing: DecodedDrawing, sample_start: int) -> None:
        """Adds an image of the sample that starts at a position of the microbatch."""
        self.drawings.append(drawing)
        end = sample_start + drawing.context_end
        self.context_positions.append(np.arange(end - drawing.meta.context, end))

    def inputs(self, values: int, *, shared: bool) -> GeneratorInputs | None:
        """All of them, still without noise; None if there are none.

        Args:
            values: V.
            shared: whether this rank may have decoded only some.
        """
        if not self.drawings:
            return None
        patches = [np.zeros((0, values), np.uint8)]
        held: list[int] = []
        for number, drawing in enumerate(self.drawings):
            if drawing.patches_PV is not None:
                patches.append(drawing.patches_PV)
                held.append(number)
        return GeneratorInputs(
            patches_PV=torch.from_numpy(np.concatenate(patches)),
            noise_PV=torch.zeros(0, values),
            times=[t.time for t in self.drawings],
            grids_thw=[t.meta.grid_thw for t in self.drawings],
            context_positions_K=torch.from_numpy(np.concatenate(self.context_positions)),
            contexts=[t.meta.context for t in self.drawings],
            counted=[t.counted for t in self.drawings],
            held=held if shared else None,
        )
