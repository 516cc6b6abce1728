"""Generate images and videos from held-out text.

Generation starts from noise and takes a fixed number of steps. Each step is a forward plan through
the complete model, so it supports all parallelism configs. The hidden states of the LLM are not
cached between steps: prompts are short, and training and generation share one code path.

Shape legend: P patches of all images, V values of a patch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from torchmm.common.batch import Microbatch
from torchmm.common.generated import GeneratorSpec
from torchmm.common.log import iterate_with_progress
from torchmm.common.module_names import GENERATOR
from torchmm.data.loader import StepBatch
from torchmm.parallel.mesh import ParallelMesh
from torchmm.training.pipeline import Pipeline


@dataclass(frozen=True)
class GeneratedImage:
    """Generated frames of one image or video, and the reference frames."""

    context_ids: list[int]
    """Tokens of the prompt, without placeholders of input images."""
    truth: list[Image.Image]
    images: list[Image.Image]

    def text(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Return the text of the prompt."""
        return str(tokenizer.decode(self.context_ids, skip_special_tokens=True))


def held_out_target_images(batches: Iterable[StepBatch], count: int) -> Iterator[Microbatch]:
    """Yield microbatches with `count` images to generate, or fewer if the data have fewer."""
    remaining = count
    for microbatch in (m for batch in batches for m in batch.microbatches):
        if remaining == 0:
            return
        inputs = microbatch.generator
        if inputs is None:
            continue
        images = min(len(inputs.grids_thw), remaining)
        remaining -= images
        if images == len(inputs.grids_thw):
            yield microbatch
            continue
        # The metadata must have as many images as the inputs.
        selected = inputs.select(range(images))
        samples = []
        for sample in microbatch.meta.samples:
            samples.append(replace(sample, generated=sample.generated[:images]))
            images -= len(samples[-1].generated)
        meta = replace(microbatch.meta, samples=tuple(samples))
        yield replace(microbatch, generator=selected, meta=meta)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def generate_sample_images(
    pipeline: Pipeline,
    microbatches: Iterable[Microbatch],
    spec: GeneratorSpec,
    mesh: ParallelMesh,
    steps: int,
) -> list[GeneratedImage]:
    """Generate all images of the microbatches. All ranks must pass the same microbatches.

    Args:
        pipeline: Pipeline of this rank.
        microbatches: Result of `held_out_target_images`. Generation starts from their noise.
        spec: Specification of the generator.
        mesh: Mesh of the run.
        steps: Number of equal steps from noise to image (Euler method).
    """
    drawings = []
    for microbatch in microbatches:
        pixels_PV = generate_pixels(pipeline, microbatch, mesh, steps).cpu()
        assert microbatch.generator is not None
        inputs = microbatch.generator.values()
        sizes = [prod(grid) for grid in inputs.grids_thw]
        is_placeholder = torch.zeros(len(microbatch.input_ids_T), dtype=torch.bool)
        for encoder in microbatch.encoders.values():
            is_placeholder[encoder.positions_K] = True
        for positions, truth, generated, grid in zip(
            inputs.context_positions_K.split(inputs.contexts),
            inputs.patches_PV.split(sizes),
            pixels_PV.split(sizes),
            inputs.grids_thw,
            strict=True,
        ):
            ids = microbatch.input_ids_T[positions[~is_placeholder[positions]]].tolist()
            shown = (to_frames(patches, grid, spec.patch_size_px) for patches in (truth, generated))
            drawings.append(GeneratedImage(ids, *shown))
    return drawings


@torch.no_grad()
def generate_pixels(
    pipeline: Pipeline, microbatch: Microbatch, mesh: ParallelMesh, steps: int
) -> Tensor:
    """Return generated pixels, float32 (P, V), on every rank, from the noise of a microbatch."""
    moved = microbatch.to(mesh.device)
    inputs = moved.generator
    assert inputs is not None
    source = mesh.first_global_rank(pipeline=pipeline.last_rank(GENERATOR))
    x_PV = inputs.target_noise_PV.clone()
    pixels_PX = torch.empty(inputs.patches_PV.shape, device=x_PV.device)
    images = len(inputs.grids_thw)
    of_latents = inputs.latent_values > 0
    for step in iterate_with_progress("drawing", range(steps, 0, -1), steps, "denoising steps"):
        # At time t an input is (1 - t) pixels + t noise: with both equal to x, it is x at any t.
        times = [step / steps] * images
        now = replace(inputs, patches_PV=x_PV, noise_PV=x_PV, times=times, is_encoded=of_latents)
        shown = replace(moved, generator=now)
        if of_latents and step == 1:
            x_PV = _broadcast(source, pipeline.decode_latents(shown), pixels_PX)
        else:
            x_PV = x_PV - _broadcast(source, pipeline.velocities(shown), x_PV) / steps
    return x_PV


def _broadcast(source: int, local_tensor: Tensor | None, example: Tensor) -> Tensor:
    """Broadcast the tensor of one rank and return it on all ranks."""
    values = torch.empty_like(example) if local_tensor is None else local_tensor
    dist.broadcast(values, src=source)
    return values


def to_frames(
    patches_PV: Tensor, grid_thw: tuple[int, int, int], patch_size_px: int
) -> list[Image.Image]:
    """Return RGB frames of patches. Values outside [-1, 1] are clipped."""
    frames, rows, columns = grid_thw
    patch = patch_size_px
    blocks = patches_PV.view(frames, rows, columns, 3, patch, patch).permute(0, 1, 4, 2, 5, 3)
    pixels = blocks.reshape(frames, rows * patch, columns * patch, 3)
    levels = ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return [Image.fromarray(frame.numpy()) for frame in levels]
