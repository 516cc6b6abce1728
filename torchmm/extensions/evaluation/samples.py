"""Text that the model generates for held-out samples, and its scores."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from torchmm.common.errors import DataError
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
