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
"""Maximum number of held-out samples whose text is generated in one batch."""


@dataclass(frozen=True)
class GeneratedText:
    """Generated text of one held-out sample, and its reference."""

    source: str
    index: int
    prompt: str
    truth: str
    generated: str
    duration_ms: int = 0
    """Duration of the audio and video of the sample."""
    references: tuple[str, ...] = ()
    """All references of the sample, if it has more than `truth`."""

    @property
    def answer(self) -> Answer:
        """The text and its references, for `score`."""
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
    """Generate text for each prompt by greedy decoding. All ranks must pass the same prompts.

    Args:
        pipeline: Model of this rank.
        prompts: Result of `held_out_prompts`.
        tokenizer: Tokenizer of the LLM.
        mesh: Mesh of the run.
        max_new_tokens: Maximum length of a text, in tokens. Generation stops earlier at EOS or at a
            token of `Prompt.own_ends`.
        row_tokens: Maximum number of prompt tokens in one batch.
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
    """Return the decoded text of a prompt.

    Args:
        prompt: Prompt of a held-out sample.
        new_ids: Generated tokens without the one that ended the text.
        tokenizer: Tokenizer of the LLM.
    """
    row, truth_ids, sample = prompt
    shown = row.input_ids_T.clone()
    for encoder in row.encoders.values():
        shown[encoder.positions_K] = -1
    ids = (shown[shown >= 0].tolist(), truth_ids.tolist(), [*new_ids])
    before, truth, new = [str(tokenizer.decode(i, skip_special_tokens=True)) for i in ids]
    duration_ms = sum(image.duration_ms for image in sample.images)
    return GeneratedText(sample.source, sample.index, before, truth, new, duration_ms)


def with_references(texts: Iterable[GeneratedText], loader: Loader) -> list[GeneratedText]:
    """Return the texts with all references of their samples.

    Raises:
        DataError: The column of references of a sample has other types than text.
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
    """Return scores by "SOURCE/SCORE" for the sources that set `scores` and have texts."""
    found: dict[str, float] = {}
    for name, source in zip(unique_names(sources), sources, strict=True):
        if answers := [text.answer for text in texts if text.source == name]:
            found |= {f"{name}/{kind}": score(kind, answers) for kind in source.scores}
    return found


def scored_sources(sources: Sequence[SourceConfig]) -> set[str]:
    """Return the names of the sources that set `scores`."""
    return {n for n, s in zip(unique_names(sources), sources, strict=True) if s.scores}


def held_out_prompts(
    batches: Iterable[StepBatch], count: int, scored: Collection[str] = ()
) -> Iterator[Prompt]:
    """Yield the prompts of the first `count` samples with images, without the text to generate.

    Batches must come from a loader with one packed sequence per microbatch, whose samples are its
    first segments.

    Args:
        batches: Batches of held-out samples.
        count: Maximum number of prompts.
        scored: Names of sources from which samples without images are used, too.
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
