"""Generated text of held-out samples, and its scores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from torchmm.common.errors import DataError
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.loader import Loader, StepBatch
from torchmm.extensions.evaluation.scores import Answer, score
from torchmm.extensions.evaluation.text.prompts import Prompt, split_prompts
from torchmm.recipe.data_section import SourceConfig, unique_names


@dataclass(frozen=True)
class GeneratedText:
    """Generated text of one held-out sample, and its reference."""

    source: str
    index: int
    prompt: str
    truth: str
    generated: str
    duration_ms: int
    """Duration of the audio and video of the sample in ms."""
    references: tuple[str, ...]
    """All references of the sample, if it has more than `truth`."""

    @property
    def answer(self) -> Answer:
        """Text and references, for `score`."""
        return Answer(self.generated, self.references or (self.truth,))


def generated_text(
    prompt: Prompt, new_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, loader: Loader
) -> GeneratedText:
    """Return the decoded text of a prompt with the references of its sample.

    Args:
        prompt: Prompt of a held-out sample.
        new_ids: Generated tokens without the token that ended the text.
        tokenizer: Tokenizer of the LLM.
        loader: Loader of the sample.

    Raises:
        DataError: The column of references of the sample does not contain text.
    """
    row, truth_ids, sample = prompt
    shown = row.input_ids_T.clone()
    for encoder in row.encoders.values():
        shown[encoder.positions_K] = -1
    ids = (shown[shown >= 0].tolist(), truth_ids.tolist(), [*new_ids])
    before, truth, new = [str(tokenizer.decode(i, skip_special_tokens=True)) for i in ids]
    duration_ms = sum(image.duration_ms for image in sample.images)
    try:
        references = loader.references(sample.source, sample.index)
    except CorruptSampleError as error:
        raise DataError(f"{sample.source}[{sample.index}]: {error}") from error
    return GeneratedText(sample.source, sample.index, before, truth, new, duration_ms, references)


def source_scores(
    texts: Sequence[GeneratedText], sources: Sequence[SourceConfig]
) -> dict[str, float]:
    """Return scores by "SOURCE/SCORE" for the sources with `metrics` and generated text."""
    scores: dict[str, float] = {}
    for name, source in zip(unique_names(sources), sources, strict=True):
        if answers := [text.answer for text in texts if text.source == name]:
            scores |= {f"{name}/{kind}": score(kind, answers) for kind in source.metrics}
    return scores


def held_out_prompts(
    batches: Iterable[StepBatch], count: int, sources: Sequence[SourceConfig] = ()
) -> Iterator[Prompt]:
    """Yield the first `count` prompts of held-out samples, without the text to generate.

    Samples without images are included if their source sets `metrics`. Batches must come from a
    loader with one packed sequence per microbatch, whose samples are its first segments.

    Args:
        batches: Batches of held-out samples.
        count: Maximum number of prompts.
        sources: Sources of the samples.
    """
    scored = {n for n, s in zip(unique_names(sources), sources, strict=True) if s.metrics}
    yielded = 0
    for microbatch in (m for batch in batches for m in batch.microbatches):
        for prompt in split_prompts(microbatch):
            if not prompt.row.encoders and prompt.sample.source not in scored:
                continue
            if yielded == count:
                return
            yielded += 1
            yield prompt
