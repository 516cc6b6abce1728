"""Batches for the comparison of balanced data with searched schedules.

A stream is a shuffled mixture of samples, as a loader reads it, and is packed into sequences by the
packer of the loader. Documents have the image counts and text lengths of the pages in
`gimp_help_documents.json`, which have a heavy tail: the median page has 3 images, the 99th
percentile 24, the largest 68. On average a page has 3.9 images and 587 tokens of text. OBELICS has
2.5 images and 815 tokens per document (353 M images, 115 B tokens, 141 M documents, arXiv
2306.16527), MMC4 5.6 and 425 (571 M, 43 B, 101.2 M, github.com/allenai/mmc4).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
from documents import load_documents, truncate

from support.workloads import Workload
from torchmm.balance.recipe_simulation.first_microbatches import pack_balanced_sequences
from torchmm.balance.simulation.workload import sample_microbatches
from torchmm.common.batch import ImageMeta, MicrobatchMeta, SampleMeta
from torchmm.data.steps.packing import pack_all
from torchmm.recipe.recipe import Recipe

SEED = 0
CAPTION_TOKENS = 16
"""Tokens of text of an image-text pair in LAION-2B (PipeWeaver, figure 2)."""
CLIP_FRAMES = (100, 140)
"""Groups of two frames in a video, as in `recipes/qwen3_vl_8b_video.toml`."""
SPARE = 192
"""Sequences packed beyond the requested number, because open sequences are not used."""


@dataclass(frozen=True)
class Mixture:
    """Fractions of tokens by type of sample."""

    captions: float = 0.0
    documents: float = 0.0
    text: float = 0.0
    clips: float = 0.0


class Case(NamedTuple):
    """A model with its data.

    Attributes:
        key: Name on the command line.
        name: Name in tables.
        workload: Model, cluster and sequences per step.
        mixture: Samples to pack; None: sequences as `[simulation]` of the recipe describes them.
        images: Images of every sequence, at least and at most, instead of those of the recipe.
    """

    key: str
    name: str
    workload: Workload
    mixture: Mixture | None = None
    images: tuple[int, int] | None = None

    def recipe(self) -> Recipe:
        """Return the recipe without reordering."""
        recipe = self.workload.load("--data.reorder=none")
        if self.images is None:
            return recipe
        kinds = [
            kind.model_copy(update={"images": list(self.images)})
            for kind in recipe.simulation.sequences[:1]
        ]
        simulation = recipe.simulation.model_copy(update={"sequences": kinds})
        return recipe.model_copy(update={"simulation": simulation})


VLM = Mixture(captions=0.2, documents=0.6, text=0.2)
"""Fractions of the recipe, which counts sequences."""
CASES = (
    Case(
        "vlm_s",
        "VLM-S, mixture of the recipe",
        Workload("benchmarks/support/recipes/vlm_s_samples", 16),
    ),
    Case("vlm_s_tail", "VLM-S, heavy tail", Workload("recipes/papers/pipeweaver_vlm_s", 16), VLM),
    Case("vlm_m_tail", "VLM-M, heavy tail", Workload("recipes/papers/pipeweaver_vlm_m", 32), VLM),
    Case(
        "qwen3_vl_8b",
        "Qwen3-VL-8B, heavy tail",
        Workload("recipes/zoo/qwen3_vl_8b", 16),
        Mixture(documents=0.8, text=0.2),
    ),
    Case(
        "video",
        "Qwen3-VL-8B, long video",
        Workload("benchmarks/support/recipes/qwen3_vl_8b_video", 64),
        Mixture(documents=0.7, clips=0.3),
    ),
    Case(
        "alike",
        "VLM-S, 13 or 14 images",
        Workload("recipes/papers/pipeweaver_vlm_s", 16),
        images=(13, 14),
    ),
)


class Packed(NamedTuple):
    """Consecutive batches of sequences.

    Attributes:
        batches: Sequences of each batch, each as a microbatch.
        seconds: CPU time of packing per batch.
    """

    batches: list[list[MicrobatchMeta]]
    seconds: float

    def fill(self) -> float:
        """Return the fraction of tokens that are not padding."""
        metas = [meta for batch in self.batches for meta in batch]
        used = sum(sample.tokens for meta in metas for sample in meta.samples)
        return used / sum(meta.tokens for meta in metas)


def draw_batches(case: Case, recipe: Recipe, count: int, is_even: bool = False) -> Packed:
    """Return consecutive batches of a case.

    Args:
        is_even: Whether to pack with `data.packing` = "balanced". Otherwise samples of a mixture
            are packed by their number of tokens, and sequences of the recipe stay as they are.
    """
    training = recipe.training
    sequences, length = count * training.global_batch_size, training.sequence_length
    if case.mixture is None:
        metas = sample_microbatches(recipe.simulation, sequences + SPARE, sequence_length=length)
        samples = [sample for meta in metas for sample in meta.samples]
    else:
        tokens = (sequences + SPARE) * length
        samples = list(draw_samples(case.mixture, recipe, tokens))
    if is_even:
        next(pack_balanced_sequences(iter(samples), length))  # compile
    begin_s = time.process_time()
    if is_even:
        packs = list(islice(pack_balanced_sequences(iter(samples), length), sequences))
    elif case.mixture is None:
        packs = [list(meta.samples) for meta in metas[:sequences]]
    else:
        lengths = [sample.tokens for sample in samples]
        indices = pack_all(lengths, length, recipe.data.packing_buffer_size, flush=False)
        packs = [[samples[i] for i in members] for members in indices[:sequences]]
    seconds = time.process_time() - begin_s
    if len(packs) < sequences:
        raise ValueError(f"{len(packs)} sequences are packed; {sequences} are needed")
    metas = [MicrobatchMeta(tuple(members), length) for members in packs]
    return Packed(_in_batches(metas, training.global_batch_size), seconds / count)


def _in_batches(metas: list[MicrobatchMeta], size: int) -> list[list[MicrobatchMeta]]:
    return [metas[i : i + size] for i in range(0, len(metas), size)]


def draw_samples(mixture: Mixture, recipe: Recipe, tokens: int) -> Iterator[SampleMeta]:
    """Yield samples in random order, with at least a number of tokens."""
    [(encoder, size)] = recipe.simulation.images.items()
    assert size.patches is not None and size.tokens is not None
    patches, image_tokens, length = size.patches[0], size.tokens, recipe.training.sequence_length
    pages = [truncate(page, length, image_tokens, 1) for page in load_documents().pages]
    pages = [page for page in pages if page.tokens]
    texts = [page.tokens - page.images * image_tokens for page in pages]
    texts = [text for text in texts if text]
    clip = sum(CLIP_FRAMES) / 2 * image_tokens
    means = np.array(
        [
            CAPTION_TOKENS + image_tokens,
            np.mean([page.tokens for page in pages]),
            np.mean(texts),
            clip,
        ]
    )
    fractions = [mixture.captions, mixture.documents, mixture.text, mixture.clips]
    weights = np.array(fractions) / means
    rng = np.random.default_rng(SEED)
    weights /= weights.sum()
    index = 0
    while tokens > 0:
        kind = int(rng.choice(4, p=weights))
        frames, images, text = 1, 0, 0
        if kind == 0:
            images, text = 1, CAPTION_TOKENS
        elif kind == 1:
            page = pages[int(rng.integers(len(pages)))]
            images, text = page.images, page.tokens - page.images * image_tokens
        elif kind == 2:
            text = texts[int(rng.integers(len(texts)))]
        else:
            images, frames = 1, int(rng.integers(CLIP_FRAMES[0], CLIP_FRAMES[1] + 1))
        image = ImageMeta(0, 0, frames * patches, frames * image_tokens, frames)
        sample_tokens = images * image.tokens + text
        yield SampleMeta(
            "stream", index, sample_tokens, (image,) * images, encoder if images else None
        )
        tokens -= sample_tokens
        index += 1
