"""Microbatches drawn from statistics, for steps that are simulated without data.

What a planner sees of a step are sizes: images per microbatch, their patches, tokens of text. The
papers give no data but such statistics (PipeWeaver §8: 169 tokens per image and at most 48 images
in 8192 tokens; at most 8 clips of together 16 seconds), so a recipe states them in `[simulation]`.
Drawn are sequences, each of one kind of the mixture, with whole numbers between two bounds. A
sequence's place alone decides its content: more ranks, another microbatch size or a longer step
change none of the sequences that were there before.

Rejected: continuous distributions of images per sequence (lognormal, geometric), cut off at the
sequence's length: the published mixtures have two humps (captions, documents), and what is cut off
moves the mean that one has set.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchmm.common.batch import ImageMeta, MicrobatchMeta, SampleMeta
from torchmm.common.generated import GeneratedMeta
from torchmm.recipe.simulation_section import (
    SimulatedGeneration,
    SimulatedSequences,
    SimulationConfig,
    contradictions,
    encoder_of,
)

SOURCE = "simulation"
"""Name of the source of drawn samples."""


def sample_microbatches(
    config: SimulationConfig,
    count: int,
    *,
    sequence_length: int,
    microbatch_size: int = 1,
    first: int = 0,
) -> list[MicrobatchMeta]:
    """Metadata of consecutive microbatches.

    Args:
        config: the statistics; without kinds of sequences, all tokens are text.
        count: microbatches.
        sequence_length: tokens per packed sequence.
        microbatch_size: sequences per microbatch.
        first: sequences before those; a data-parallel rank's share starts at its own.

    Raises:
        ValueError: the statistics contradict each other or do not fit into a sequence.
    """
    kinds = config.sequences or [SimulatedSequences()]
    if found := list(contradictions(config, sequence_length)):
        raise ValueError("; ".join(f"{key} = {value}: {text}" for key, value, text in found))
    weights = np.array([kind.weight for kind in kinds])
    bounds = np.cumsum(weights / weights.sum())
    microbatches = []
    for index in range(count):
        samples: list[SampleMeta] = []
        start = first + index * microbatch_size
        for place in range(start, start + microbatch_size):
            rng = np.random.default_rng([config.seed, place])
            which = min(int(np.searchsorted(bounds, rng.random(), "right")), len(kinds) - 1)
            samples += _sample_sequence(config, kinds[which], place, sequence_length, rng)
        microbatches.append(MicrobatchMeta(tuple(samples), microbatch_size * sequence_length))
    return microbatches


def _sample_sequence(
    config: SimulationConfig,
    kind: SimulatedSequences,
    place: int,
    sequence_length: int,
    rng: np.random.Generator,
) -> list[SampleMeta]:
    """Samples of one sequence; text and images are dealt evenly among them."""
    tokens = _between(kind.tokens, rng) if kind.tokens else sequence_length
    images = _between(kind.images, rng)
    encoder = encoder_of(config, kind) if images else None
    image = ImageMeta(0, 0, 0, 0)
    if encoder is not None:
        size = config.images[encoder]
        image = ImageMeta(0, 0, size.patches, size.tokens)
    text = tokens - images * image.tokens
    most_samples = max(other.samples for other in config.sequences or [kind])
    clips = _sample_clips(config.generated, _between(kind.generated, rng), rng)
    samples = []
    for index in range(kind.samples):
        own_images = (image,) * _share(images, index, kind.samples)
        length = _share(text, index, kind.samples) + len(own_images) * image.tokens
        own_clips = clips[index :: kind.samples]
        if length == 0:
            continue  # fewer tokens of text than samples
        samples.append(
            SampleMeta(
                source=SOURCE,
                index=place * most_samples + index,
                tokens=length,
                images=own_images,
                encoder=encoder if own_images else None,
                generated=tuple(
                    GeneratedMeta(grid, min(config.generated.context_tokens, length))
                    for grid in own_clips
                    if config.generated is not None
                ),
            )
        )
    return samples


def _sample_clips(
    size: SimulatedGeneration | None, count: int, rng: np.random.Generator
) -> Sequence[tuple[int, int, int]]:
    """Grids of patches (frames, rows, columns) of `count` clips."""
    if size is None or count == 0:
        return []
    least, most = size.frames
    limit = most if size.frames_per_sequence is None else size.frames_per_sequence // count
    most = max(least, min(most, limit))
    return [(_between([least, most], rng), size.rows, size.columns) for _ in range(count)]


def _between(bounds: Sequence[int], rng: np.random.Generator) -> int:
    return int(rng.integers(bounds[0], bounds[1] + 1))


def _share(total: int, index: int, parts: int) -> int:
    """Of `total` things dealt to `parts`, how many the one at `index` gets."""
    return total // parts + (index < total % parts)
