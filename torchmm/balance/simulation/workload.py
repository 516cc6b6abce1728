"""Microbatches sampled from statistics, for steps that are simulated without data.

Planners read only sizes of a step: images per microbatch, their patches, and tokens of text. The
papers publish such statistics instead of data, for example in PipeWeaver, section 8: 169 tokens per
image and at most 48 images in 8192 tokens, or at most 8 videos with a total of 16 seconds. A recipe
defines them in `[simulation]`.

Each sequence has one type of the mixture. Numbers of images and sizes are uniform integers between
two bounds. The content of a sequence depends only on the seed and on its index. More ranks, a
different microbatch size or a longer step therefore do not change existing sequences. Sizes have a
separate random number generator, so different sizes do not change the number of images.

Truncated continuous distributions of images per sequence (lognormal, geometric) are not used. The
published mixtures have two modes (captions, documents), and truncation changes the configured mean.
For the same reason, the maximum number of images of the largest size must fit into a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from torchmm.balance.simulation.section import (
    SimulatedGeneration,
    SimulatedImages,
    SimulatedImageSize,
    SimulatedSequences,
    SimulationConfig,
    SizeRanges,
    find_conflicts,
    generated_sizes,
    image_sizes,
    image_tokens,
    sequence_encoder,
    size_ranges,
    size_step,
)
from torchmm.common.batch import ImageMeta, MicrobatchMeta, SampleMeta
from torchmm.common.generated import GeneratedMeta

SOURCE = "simulation"
"""Name of the data source of sampled sequences."""
IMAGE_SEED = 1
VIDEO_SEED = 2
"""Seeds of the generators for sizes of images and of videos, separate from all other values."""


def sample_microbatches(
    config: SimulationConfig,
    count: int,
    *,
    sequence_length: int,
    microbatch_size: int = 1,
    first: int = 0,
) -> list[MicrobatchMeta]:
    """Return metadata of consecutive microbatches.

    Args:
        config: Statistics. Without types of sequences, all tokens are text.
        count: Number of microbatches.
        sequence_length: Number of tokens per packed sequence.
        microbatch_size: Number of sequences per microbatch.
        first: Index of the first sequence, which differs between data-parallel ranks.

    Raises:
        ValueError: The statistics are inconsistent or do not fit into a sequence.
    """
    kinds = config.sequences or [SimulatedSequences()]
    if problems := list(find_conflicts(config, sequence_length)):
        raise ValueError("; ".join(f"{key} = {value}: {text}" for key, value, text in problems))
    bounds = _cumulative_probabilities([kind.weight for kind in kinds])
    microbatches = []
    for index in range(count):
        samples: list[SampleMeta] = []
        start = first + index * microbatch_size
        for index_of_sequence in range(start, start + microbatch_size):
            rng = np.random.default_rng([config.seed, index_of_sequence])
            kind = kinds[_sample_index(bounds, rng)]
            samples += _sample_sequence(config, kind, index_of_sequence, sequence_length, rng)
        microbatches.append(MicrobatchMeta(tuple(samples), microbatch_size * sequence_length))
    return microbatches


def _sample_sequence(
    config: SimulationConfig,
    kind: SimulatedSequences,
    sequence_index: int,
    sequence_length: int,
    rng: np.random.Generator,
) -> list[SampleMeta]:
    """Return the samples of one sequence. Text and images are distributed evenly."""
    tokens = _sample_integer(kind.tokens, rng) if kind.tokens else sequence_length
    count = _sample_integer(kind.images, rng)
    encoder = sequence_encoder(config, kind) if count else None
    images: list[ImageMeta] = []
    if encoder is not None:
        images = _sample_images(
            config.images[encoder], count, [config.seed, sequence_index, IMAGE_SEED]
        )
    text = tokens - sum(image.tokens for image in images)
    most_samples = max(other.samples for other in config.sequences or [kind])
    video_count = _sample_integer(kind.generated, rng)
    videos = _sample_videos(
        config.generated, video_count, rng, [config.seed, sequence_index, VIDEO_SEED]
    )
    shares, texts = (_even_shares(n, kind.samples) for n in (len(images), text))
    samples = []
    for index in range(kind.samples):
        sample_images = tuple(images[shares[index].start : shares[index].stop])
        length = len(texts[index]) + sum(image.tokens for image in sample_images)
        sample_videos = videos[index :: kind.samples]
        if length == 0:
            continue  # the sequence has fewer text tokens than samples
        samples.append(
            SampleMeta(
                source=SOURCE,
                index=sequence_index * most_samples + index,
                tokens=length,
                images=sample_images,
                encoder=encoder if sample_images else None,
                generated=tuple(
                    GeneratedMeta(grid, min(config.generated.context_tokens, length))
                    for grid in sample_videos
                    if config.generated is not None
                ),
            )
        )
    return samples


def _sample_images(size: SimulatedImages, count: int, seeds: Sequence[int]) -> list[ImageMeta]:
    """Return metadata of `count` images of an encoder."""
    patches_per_token = size.patches_per_token
    sizes = image_sizes(size)
    sides = [size_ranges(image_size, size_step(patches_per_token)) for image_size in sizes]
    weights = [
        image_size.weight if isinstance(image_size, SimulatedImageSize) else 1.0
        for image_size in sizes
    ]
    images = []
    for which, (rows, columns) in _sample_grids(sides, weights, count, seeds):
        tokens = image_tokens(sizes[which], rows * columns, patches_per_token)
        images.append(ImageMeta(0, 0, rows * columns, tokens))
    return images


def _sample_videos(
    size: SimulatedGeneration | None, count: int, rng: np.random.Generator, seeds: Sequence[int]
) -> Sequence[tuple[int, int, int]]:
    """Return patch grids (frames, rows, columns) of `count` generated videos."""
    if size is None or count == 0:
        return []
    min_frames, max_frames = size.frames
    limit = max_frames if size.frames_per_sequence is None else size.frames_per_sequence // count
    max_frames = max(min_frames, min(max_frames, limit))
    frames = [_sample_integer([min_frames, max_frames], rng) for _ in range(count)]
    sides = [size_ranges(grid) for grid in generated_sizes(size)]
    weights = [grid.weight for grid in size.sizes] or [1.0]
    grids = _sample_grids(sides, weights, count, seeds)
    return [(n, *grid) for n, (_, grid) in zip(frames, grids, strict=True)]


def _sample_grids(
    sizes: Sequence[SizeRanges], weights: Sequence[float], count: int, seeds: Sequence[int]
) -> list[tuple[int, tuple[int, int]]]:
    """Return (index of the size, (rows, columns)) of `count` images."""
    rng = np.random.default_rng(seeds)
    bounds = _cumulative_probabilities(weights)
    sampled = []
    for _ in range(count):
        which = _sample_index(bounds, rng)
        size = sizes[which]
        rows, columns = (
            size.step * _sample_integer([side[0] // size.step, side[1] // size.step], rng)
            for side in (size.rows, size.columns)
        )
        sampled.append((which, (rows, columns)))
    return sampled


def _cumulative_probabilities(weights: Sequence[float]) -> np.ndarray:
    """Return cumulative probabilities of weights."""
    values = np.array(weights)
    return np.cumsum(values / values.sum())


def _sample_index(bounds: np.ndarray, rng: np.random.Generator) -> int:
    """Return a random index with the given cumulative probabilities."""
    return min(int(np.searchsorted(bounds, rng.random(), "right")), len(bounds) - 1)


def _sample_integer(bounds: Sequence[int], rng: np.random.Generator) -> int:
    return int(rng.integers(bounds[0], bounds[1] + 1))


def _even_shares(total: int, parts: int) -> list[range]:
    """Split range(total) into consecutive ranges of similar size, with larger ranges first."""
    size, larger = divmod(total, parts)
    ends = [index * size + min(index, larger) for index in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(ends)]
