"""Open the data of a run and build the loader of this rank.

Extensions arrange the sequences of a global batch and the images of its microbatches among ranks.
Their functions are the entries "data.reorder" and "data.balance" of the table "step_arrangements"
(`torchmm.common.extensions`). Parameters: run, modules, parallel, layout, device.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import torch
from transformers import PreTrainedTokenizerBase

from torchmm.common.extensions import load_entry
from torchmm.common.layers import ModuleDescription
from torchmm.common.log import report_progress
from torchmm.common.sequence_slices import DecodeAssignment
from torchmm.data.build import build_loader
from torchmm.data.loader import Loader
from torchmm.data.samples import find_samples
from torchmm.data.shared_reader import ReaderAddress
from torchmm.data.sources.open import Samples
from torchmm.data.sources.sample_set import SampleSet
from torchmm.data.steps.plan_steps import ArrangeSequences, AssignImages
from torchmm.models.multimodal import MultimodalModel
from torchmm.parallel.mesh import ParallelMesh
from torchmm.planning.resolved_recipe import ResolvedRecipe
from torchmm.planning.run_length import estimate_pass_steps, run_length_lines
from torchmm.training.model_build import ModelStages


@report_progress("opening the data")
def open_data(
    run: ResolvedRecipe,
    model: MultimodalModel,
    tokenizer: PreTrainedTokenizerBase,
    streams: ReaderAddress | None = None,
) -> tuple[SampleSet, SampleSet | None]:
    """Open the training and validation samples of the run. Requires no model weights.

    Args:
        run: Resolved recipe.
        model: Model of the run.
        tokenizer: Tokenizer of the model.
        streams: Process that reads the streams of this host. If None, this process reads them.

    Returns:
        Training samples, and validation samples or None without validation.

    Raises:
        ConfigError, DataError: A source cannot be read, or has no samples.
    """
    recipe = run.recipe
    specs = model.sample_specs(tokenizer)
    find = partial(find_samples, recipe.data, recipe.training, streams=streams, **specs)
    held_out = None
    if recipe.data.validation and (recipe.validation.interval or recipe.validation.num_samples):
        held_out = find(validation=True)
    return find(), held_out


def log_data(
    run: ResolvedRecipe, model: MultimodalModel, samples: SampleSet, logger: logging.Logger
) -> None:
    """Log the data sources, passes over the data, disk space, and problems with the run length."""
    logger.info("%s\n%s (`torchmm inspect` shows them)", *samples.digest())
    is_known = isinstance(samples, Samples) and not samples.streamed
    pass_steps = estimate_pass_steps(samples, run.recipe) if is_known else None
    for label, text in run_length_lines(run.recipe, model, pass_steps).items():
        is_warning = label.startswith("warning")
        logger.log(logging.WARNING if is_warning else logging.INFO, "%s: %s", label, text)


def build_arrangements(
    run: ResolvedRecipe,
    modules: Sequence[ModuleDescription],
    model_stages: ModelStages,
    device: torch.device,
) -> tuple[ArrangeSequences | None, AssignImages | None]:
    """Return the functions that `data.reorder` and `data.balance` request, or None.

    The first arranges the sequences of a global batch, the second the images of its microbatches.
    """
    data = run.recipe.data
    reorder = balance = None
    if data.is_reordered:
        reorder = load_entry("step_arrangements", "data.reorder")(
            run, modules, *model_stages, device
        )
    if data.balance == "images":
        balance = load_entry("step_arrangements", "data.balance")(
            run, modules, *model_stages, device
        )
    return reorder, balance


def build_data(  # noqa: PLR0913 - the components of a run
    run: ResolvedRecipe,
    model: MultimodalModel,
    tokenizer: PreTrainedTokenizerBase,
    mesh: ParallelMesh,
    *,
    state: dict | None = None,
    validation: bool = False,
    for_prompts: bool = False,
    reorder: ArrangeSequences | None = None,
    balance: AssignImages | None = None,
    samples: SampleSet | None = None,
    reads: DecodeAssignment | None = None,
) -> Loader:
    """Return the loader of training or validation samples of this rank.

    Args:
        run: Resolved recipe.
        model: Model of the run.
        tokenizer: Tokenizer of the model.
        mesh: Mesh of the run.
        state: Loader state from which to continue.
        validation: Whether to load validation samples. This process decodes them.
        for_prompts: Whether all ranks load the same samples, one sequence per microbatch.
        reorder, balance: Results of `build_arrangements`.
        samples: Samples of the same sources, if they are already open.
        reads: Images that this rank decodes. If None, it decodes all images of its samples.
    """
    data = run.recipe.data
    training = run.recipe.training
    if validation:
        data = data.model_copy(update={"workers": 0})
    if for_prompts:
        training = training.model_copy(update={"microbatch_size": 1})
    return build_loader(
        data,
        training,
        data_parallel_rank=0 if for_prompts else mesh.data_parallel_rank,
        data_parallel_size=1 if for_prompts else mesh.data_parallel_size,
        state=state,
        validation=validation,
        arrange=reorder,
        balance=balance,
        resume_changed=run.recipe.checkpoint.allow_data_change,
        samples=samples,
        reads=reads,
        **model.sample_specs(tokenizer),
    )
