"""Sample sizes of the first step, and passes over the data. No sample is decoded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from torchmm.common.batch import MicrobatchMeta
from torchmm.models.multimodal import MultimodalModel
from torchmm.recipe.recipe import Recipe

if TYPE_CHECKING:
    from torchmm.data.sources.sample_set import SampleSet


def read_first_step(
    recipe: Recipe,
    model: MultimodalModel,
    tokenizer: PreTrainedTokenizerBase,
    data_parallel_size: int,
) -> list[list[MicrobatchMeta]]:
    """Return the sample sizes of the first step, by share of the global batch.

    Without training data, the samples come from the validation data. The result is empty if a
    streamed source has no sizes.
    """
    # Imported late, because data libraries take seconds to load, and statistics do not need them.
    from torchmm.data.build import build_loader  # noqa: PLC0415

    sources = recipe.data.sources or recipe.data.validation
    loader = build_loader(
        recipe.data.model_copy(update={"workers": 0, "sources": sources}),
        recipe.training,
        data_parallel_rank=0,
        state=None,
        data_parallel_size=data_parallel_size,
        **model.sample_specs(tokenizer),
    )
    return [list(share) for share in loader.next_metas() or ()]


def training_samples(
    recipe: Recipe, model: MultimodalModel, tokenizer: PreTrainedTokenizerBase
) -> SampleSet | None:
    """Return the training data, or None if this process cannot count their samples.

    The number is unknown for streams, and if remote producers open the data.
    """
    # Imported late, see `read_first_step`.
    from torchmm.data.samples import find_samples  # noqa: PLC0415

    sources = recipe.data.sources
    if not sources or recipe.data.producers.plan or any(s.streaming for s in sources):
        return None
    return find_samples(recipe.data, recipe.training, **model.sample_specs(tokenizer))


def plan_passes(
    samples: SampleSet, recipe: Recipe, epochs: float, max_steps: int
) -> tuple[int, float]:
    """Plan steps until the data have been read `epochs` times. Return steps and passes.

    The number of passes is that of the source with the fewest passes, as in the metric `epoch`.
    Args:
        samples: Training data with random access.
        recipe: Batch sizes, sequence length and packing.
        epochs: Passes to plan.
        max_steps: Number of steps after which planning stops.
    """
    # Imported late, see `read_first_step`.
    from torchmm.data.steps.plan_steps import StepPosition  # noqa: PLC0415

    sequence = samples.sequence(
        recipe.data, with_single_sequence_microbatches(recipe).training, StepPosition()
    )
    passes = 0.0
    for step in range(1, max_steps + 1):
        passes = next(sequence).epoch
        if passes >= epochs:
            return step, passes
    return max_steps, passes


def with_single_sequence_microbatches(recipe: Recipe) -> Recipe:
    """Return the recipe with one packed sequence per microbatch."""
    training = recipe.training.model_copy(update={"microbatch_size": 1})
    return recipe.model_copy(update={"training": training})
