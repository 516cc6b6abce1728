"""The microbatches of a run's first step, as far as planning knows them: sizes of samples.

Drawn from `[simulation]` where a recipe has statistics there, otherwise read from its data, as a
run reads them. Nothing is decoded. What is cut, chosen or forecast before a run begins rests on
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from torchmm.balance.costs.flops import microbatch_flops
from torchmm.balance.simulation.workload import sample_microbatches
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.errors import ConfigError
from torchmm.common.layers import ModuleDescription
from torchmm.data.tokenizer import load_tokenizer
from torchmm.models.multimodal import MultimodalModel
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.simulation_section import sizes_vary


class Workload(NamedTuple):
    """Microbatches of the data-parallel rank with the most to compute."""

    microbatches: list[MicrobatchMeta]
    mean_share: float
    """FLOPs of the mean data-parallel rank as a share of this one's, 0..1."""


def first_microbatches(
    recipe: Recipe, model: MultimodalModel, shares: int
) -> list[list[MicrobatchMeta]]:
    """The first step's, by share of the global batch: from statistics where the recipe has them."""
    training = recipe.training
    per_rank = training.global_batch_size // (shares * training.microbatch_size)
    if recipe.simulation.sequences or not recipe.data.sources:
        _check_sizes(recipe, model)
        return [
            sample_microbatches(
                recipe.simulation,
                per_rank,
                sequence_length=training.sequence_length,
                microbatch_size=training.microbatch_size,
                first=rank * per_rank * training.microbatch_size,
            )
            for rank in range(shares)
        ]
    found = first_step(recipe, model, load_tokenizer(recipe.model), shares)
    if not found:
        raise ConfigError(
            "data.sources: a streamed source does not know its samples' sizes; use [simulation]"
        )
    return found


def _check_sizes(recipe: Recipe, model: MultimodalModel) -> None:
    """Images of many sizes need an encoder that reads them.

    Raises:
        ConfigError: an encoder brings all images to one size.
    """
    sizes = recipe.simulation.images
    problems = [
        f"simulation.images.{name}: sizes differ, but this encoder brings all images to one; "
        "give a single number of patches"
        for name, spec in model.image_specs().items()
        if spec.inputs == "fixed" and name in sizes and sizes_vary(sizes[name])
    ]
    if problems:
        raise ConfigError(problems)


def first_step(
    recipe: Recipe, model: MultimodalModel, tokenizer: PreTrainedTokenizerBase, shares: int
) -> list[list[MicrobatchMeta]]:
    """Sizes of the first step's samples, by share of the global batch, of a recipe without training
    data those of its validation data; nothing is decoded.

    Empty where a streamed source does not know them.
    """
    # Late: the libraries of data take seconds to load, and statistics do without them.
    from torchmm.data.loader import build_loader  # noqa: PLC0415

    sources = recipe.data.sources or recipe.data.validation
    loader = build_loader(
        recipe.data.model_copy(update={"workers": 0, "sources": sources}),
        recipe.training,
        data_parallel_rank=0,
        state=None,
        data_parallel_size=shares,
        **model.sample_specs(tokenizer),
    )
    return [list(share) for share in loader.next_metas() or ()]


def one_by_one(recipe: Recipe) -> Recipe:
    """The recipe with each pack as a microbatch of its own."""
    training = recipe.training.model_copy(update={"microbatch_size": 1})
    return recipe.model_copy(update={"training": training})


def total_flops(modules: Sequence[ModuleDescription], meta: MicrobatchMeta) -> float:
    """Of all modules for a microbatch, forward and backward."""
    return sum(f.forward + f.backward for f in microbatch_flops(modules, meta).values())


def heaviest(
    modules: Sequence[ModuleDescription], shares: Sequence[list[MicrobatchMeta]]
) -> Workload:
    """The share of the global batch with the most to compute, which others wait for."""
    flops = [sum(total_flops(modules, meta) for meta in share) for share in shares]
    most = max(flops)
    return Workload(shares[flops.index(most)], sum(flops) / len(flops) / most if most else 1.0)
