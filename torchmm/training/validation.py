"""Held-out samples in a run: losses, text that the model generates, images and clips that it draws.

All are plans of forwards alone, run as training steps are; text is written as `text` says.

Drawings come from noise in a fixed number of steps, each a plan of forwards through the whole
model, so that drawing works in every layout. Rejected: keeping the LLM's hidden states between the
steps; texts are short, and one code path serves both.

Shape legend: P patches of all images, V values of a patch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from torchmm.common.batch import Microbatch
from torchmm.common.errors import DataError
from torchmm.common.generated import GeneratorInputs, GeneratorSpec
from torchmm.common.log import worked
from torchmm.common.module_names import GENERATOR
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.loader import Loader, StepBatch
from torchmm.extensions.evaluation.scores import Answer, score
from torchmm.extensions.evaluation.text.generate import generate_tokens
from torchmm.extensions.evaluation.text.prompts import Prompt, in_groups, prompts_of
from torchmm.extensions.evaluation.text.sampling import Sampling
from torchmm.parallel.mesh import ParallelMesh
from torchmm.recipe.data_section import SourceConfig, unique_names
from torchmm.training.pipeline import Pipeline

PROMPTS_TOGETHER = 16
"""Held-out samples whose text is written at the same time, at most."""


@dataclass(frozen=True)
class GeneratedText:
    """What the model wrote for one held-out sample, and what it should have written."""

    source: str
    index: int
    prompt: str
    truth: str
    generated: str
    duration_ms: int = 0
    """Length of the sounds and clips before it."""
    references: tuple[str, ...] = ()
    """All that people wrote, where that is more than `truth`."""

    @property
    def answer(self) -> Answer:
        """To be scored."""
        return Answer(self.generated, self.references or (self.truth,))


# Held-out batches are few and prompts of all lengths: compiling for them would cost more than it
# saves, hence "force_eager".
@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def held_out_losses(
    pipeline: Pipeline, batches: Iterable[StepBatch], mesh: ParallelMesh
) -> dict[str, float]:
    """Mean loss over all held-out batches and ranks: "llm" per target, "generator" per image."""
    sums = {name: torch.zeros((), device=mesh.device) for name in ("llm", GENERATOR)}
    targets = images = 0
    for batch in batches:
        losses = pipeline.losses([m.to(mesh.device) for m in batch.microbatches])
        for module, by_microbatch in losses.items():
            sums[module] += torch.stack(by_microbatch).sum()
        targets += sum(m.target_count for m in batch.microbatches)
        images += sum(m.generated_count for m in batch.microbatches)
    # Of ranks with the same samples, only one tensor-parallel group has a module's losses, while
    # all have counted targets.
    share = mesh.samples_ranks / mesh.own.sizes.tensor
    local = [*(loss.item() * share for loss in sums.values()), targets, images]
    text, drawn, all_targets, all_images = mesh.sum_over_data(local)
    return {"llm": text / max(1.0, all_targets), GENERATOR: drawn / max(1.0, all_images)}


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def generate_samples(
    pipeline: Pipeline,
    prompts: Iterable[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    mesh: ParallelMesh,
    max_new_tokens: int,
    row_tokens: int = 8192,
) -> list[GeneratedText]:
    """Greedy text for each prompt; all ranks must pass the same prompts.

    Args:
        prompts: from `held_out_prompts`.
        row_tokens: most of prompts that are continued together.
        max_new_tokens: longest text, in tokens; generation stops at the token that ends a text, or
            such an answer (`Prompt.own_ends`).
    """
    texts: list[GeneratedText] = []
    sampling = Sampling(max_new_tokens)
    for together in in_groups(prompts, PROMPTS_TOGETHER, row_tokens):
        rows = [prompt.row for prompt in together]
        ends = [{tokenizer.eos_token_id} | p.own_ends(tokenizer) for p in together]
        written = generate_tokens(pipeline, rows, mesh, sampling, ends)
        texts += (
            generated_text(prompt, new_ids, tokenizer)
            for prompt, new_ids in zip(together, written, strict=True)
        )
    return texts


def generated_text(
    prompt: Prompt, new_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> GeneratedText:
    """What was written after a prompt, without the token that ended it."""
    row, truth_ids, sample = prompt
    shown = row.input_ids_T.clone()
    for encoder in row.encoders.values():
        shown[encoder.positions_K] = -1
    ids = (shown[shown >= 0].tolist(), truth_ids.tolist(), [*new_ids])
    before, truth, new = [str(tokenizer.decode(i, skip_special_tokens=True)) for i in ids]
    duration_ms = sum(image.duration_ms for image in sample.images)
    return GeneratedText(sample.source, sample.index, before, truth, new, duration_ms)


def with_references(texts: Iterable[GeneratedText], loader: Loader) -> list[GeneratedText]:
    """The texts with what else people have written for their samples.

    Raises:
        DataError: a sample's column of references holds no texts.
    """
    found = []
    for text in texts:
        try:
            references = loader.references(text.source, text.index)
        except CorruptSampleError as error:
            raise DataError(f"{text.source}[{text.index}]: {error}") from error
        found.append(replace(text, references=references))
    return found


def source_scores(
    texts: Sequence[GeneratedText], sources: Sequence[SourceConfig]
) -> dict[str, float]:
    """By "SOURCE/SCORE", of the sources that say how they are judged and have texts."""
    found: dict[str, float] = {}
    for name, source in zip(unique_names(sources), sources, strict=True):
        if answers := [text.answer for text in texts if text.source == name]:
            found |= {f"{name}/{kind}": score(kind, answers) for kind in source.scores}
    return found


def scored_sources(sources: Sequence[SourceConfig]) -> set[str]:
    """Names of those that say how they are judged."""
    return {n for n, s in zip(unique_names(sources), sources, strict=True) if s.scores}


def held_out_prompts(
    batches: Iterable[StepBatch], count: int, scored: Collection[str] = ()
) -> Iterator[Prompt]:
    """The first `count` samples with images, cut before the text to be generated.

    Batches must come from a loader with one pack per microbatch, whose samples are its first
    segments.

    Args:
        scored: names of sources of which samples without images count, too.
    """
    found = 0
    for microbatch in (m for batch in batches for m in batch.microbatches):
        for prompt in prompts_of(microbatch):
            if not prompt.row.encoders and prompt.sample.source not in scored:
                continue
            if found == count:
                return
            found += 1
            yield prompt


@dataclass(frozen=True)
class Drawing:
    """What the model drew for one text, and what it should have drawn; frames of a clip."""

    context_ids: list[int]
    """Tokens it was drawn from, without placeholders of images that were read."""
    truth: list[Image.Image]
    drawn: list[Image.Image]

    def text(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """What it was drawn from, in words."""
        return str(tokenizer.decode(self.context_ids, skip_special_tokens=True))


def held_out_drawings(batches: Iterable[StepBatch], count: int) -> Iterator[Microbatch]:
    """Microbatches with `count` images to be drawn in all, or as many as there are."""
    left = count
    for microbatch in (m for batch in batches for m in batch.microbatches):
        if left == 0:
            return
        inputs = microbatch.generator
        if inputs is None:
            continue
        images = len(inputs.grids_thw)
        if images > left:
            inputs = inputs.select(range(left))
            images = left
            microbatch = with_inputs(microbatch, inputs)  # noqa: PLW2901
        left -= images
        yield microbatch


def with_inputs(microbatch: Microbatch, inputs: GeneratorInputs) -> Microbatch:
    """The microbatch with (only the first of) its images to be drawn; metadata agree."""
    left = len(inputs.grids_thw)
    samples = []
    for sample in microbatch.meta.samples:
        samples.append(replace(sample, generated=sample.generated[:left]))
        left -= len(samples[-1].generated)
    meta = replace(microbatch.meta, samples=tuple(samples))
    return replace(microbatch, generator=inputs, meta=meta)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def draw_samples(
    pipeline: Pipeline,
    microbatches: Iterable[Microbatch],
    spec: GeneratorSpec,
    mesh: ParallelMesh,
    steps: int,
) -> list[Drawing]:
    """Draws all images of all microbatches; all ranks must pass the same ones.

    Args:
        microbatches: from `held_out_drawings`; their noise is what drawing starts from.
        spec: the generator's.
        steps: from noise to image, of equal length (Euler's method).
    """
    drawings = []
    for microbatch in microbatches:
        pixels_PV = draw(pipeline, microbatch, mesh, steps)
        drawings += _drawings(microbatch, pixels_PV.cpu(), spec)
    return drawings


@torch.no_grad()
def draw(pipeline: Pipeline, microbatch: Microbatch, mesh: ParallelMesh, steps: int) -> Tensor:
    """float32 (P, V) pixels, from the noise of the microbatch's images; on every rank."""
    moved = microbatch.to(mesh.device)
    inputs = moved.generator
    assert inputs is not None
    source = mesh.global_rank(pipeline=pipeline.last_rank(GENERATOR))
    x_PV = inputs.drawn_noise_PV.clone()
    pixels_PX = torch.empty(inputs.patches_PV.shape, device=x_PV.device)
    images = len(inputs.grids_thw)
    of_latents = inputs.latent_values > 0
    for step in worked("drawing", range(steps, 0, -1), steps, "steps from noise"):
        # At time t an input is (1 - t) pixels + t noise: with both equal to x, it is x at any t.
        times = [step / steps] * images
        now = replace(inputs, patches_PV=x_PV, noise_PV=x_PV, times=times, encoded=of_latents)
        shown = replace(moved, generator=now)
        if of_latents and step == 1:
            x_PV = _from_rank(source, pipeline.finished(shown), pixels_PX)
        else:
            x_PV = x_PV - _from_rank(source, pipeline.velocities(shown), x_PV) / steps
    return x_PV


def _from_rank(source: int, found: Tensor | None, like: Tensor) -> Tensor:
    """What one rank has found, on all of them."""
    values = torch.empty_like(like) if found is None else found
    dist.broadcast(values, src=source)
    return values


def _drawings(microbatch: Microbatch, pixels_PV: Tensor, spec: GeneratorSpec) -> list[Drawing]:
    assert microbatch.generator is not None
    inputs = microbatch.generator.values()
    sizes = [prod(grid) for grid in inputs.grids_thw]
    read = torch.zeros(len(microbatch.input_ids_T), dtype=torch.bool)
    for encoder in microbatch.encoders.values():
        read[encoder.positions_K] = True
    drawings = []
    for positions, truth, drawn, grid in zip(
        inputs.context_positions_K.split(inputs.contexts),
        inputs.patches_PV.split(sizes),
        pixels_PV.split(sizes),
        inputs.grids_thw,
        strict=True,
    ):
        words = positions[~read[positions]]
        ids = microbatch.input_ids_T[words].tolist()
        shown = (to_frames(patches, grid, spec.patch_size_px) for patches in (truth, drawn))
        drawings.append(Drawing(ids, *shown))
    return drawings


def to_frames(
    patches_PV: Tensor, grid_thw: tuple[int, int, int], patch_size_px: int
) -> list[Image.Image]:
    """RGB frames from patches with values in [-1, 1]; others are clipped."""
    frames, rows, columns = grid_thw
    patch = patch_size_px
    blocks = patches_PV.view(frames, rows, columns, 3, patch, patch).permute(0, 1, 4, 2, 5, 3)
    pixels = blocks.reshape(frames, rows * patch, columns * patch, 3)
    levels = ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return [Image.fromarray(frame.numpy()) for frame in levels]
