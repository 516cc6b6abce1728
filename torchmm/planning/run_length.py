"""Length of a run: steps of its epochs, passes over its data, hours and disk space."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from torchmm.common.errors import ConfigError
from torchmm.models.multimodal import MultimodalModel
from torchmm.planning.executions import parameter_states
from torchmm.planning.first_step import plan_passes, training_samples
from torchmm.recipe.read import check_recipe
from torchmm.recipe.recipe import Recipe

if TYPE_CHECKING:
    from torchmm.data.sources.sample_set import SampleSet

EXACT_STEPS = 1000
"""Number of steps that are planned to count the steps of `training.epochs` exactly."""
ESTIMATED_STEPS = 100
"""Number of steps that are planned to estimate the steps of an epoch for the log."""
MAX_PASSES = 100
"""Number of passes over the data above which a run warns."""
LONG_RUN_HOURS = 1.0
"""Duration in hours above which a run without checkpoints warns."""


def resolve_epochs(
    recipe: Recipe, model: MultimodalModel, tokenizer: PreTrainedTokenizerBase
) -> Recipe:
    """Return the recipe with `training.steps` instead of `training.epochs`.

    The number of steps depends only on the recipe and the data, so it is equal on all ranks and in
    a resumed run.

    Raises:
        ConfigError: The number of samples is unknown, or other keys do not match the steps.
        DataError: The data cannot be read.
    """
    epochs = recipe.training.epochs
    if epochs is None:
        return recipe
    samples = training_samples(recipe, model, tokenizer)
    if samples is None:
        raise ConfigError(
            f"training.epochs = {epochs:g}: requires data of known size; set training.steps"
        )
    planned, passes = plan_passes(samples, recipe, epochs, EXACT_STEPS)
    if not passes:
        raise ConfigError(
            f"training.epochs = {epochs:g}: {planned} steps use no sample of one source; set "
            "training.steps, or raise the weight of the source"
        )
    steps = planned if passes >= epochs else ceil(epochs * planned / passes)
    training = recipe.training.model_copy(update={"steps": steps, "epochs": None})
    recipe = recipe.model_copy(update={"training": training})
    if problems := check_recipe(recipe, None):
        raise ConfigError([f"training.epochs = {epochs:g} is {steps} steps: {p}" for p in problems])
    return recipe


def estimate_pass_steps(samples: SampleSet, recipe: Recipe) -> float | None:
    """Return the estimated steps of one pass over the data.

    Returns:
        The number of steps. None if a pass has too many steps to estimate, or if
        `data.mixture_schedule` changes the mixture during the run.
    """
    if recipe.data.mixture_schedule:
        return None
    planned, passes = plan_passes(samples, recipe, 1.0, ESTIMATED_STEPS)
    return planned / passes if passes else None


def checkpoint_bytes(recipe: Recipe, model: MultimodalModel) -> float:
    """Return the size of a checkpoint: all parameters, and optimizer states of trainable ones.

    Args:
        recipe: Data types of parameters and states.
        model: Complete model on the meta device.
    """
    states = parameter_states(recipe)
    matrices = model.layer_matrices()
    total = 0.0
    for parameter in model.parameters():
        total += states.weight * parameter.numel()
        if parameter.requires_grad:
            moments = states.layer_moments if parameter in matrices else states.moments
            total += (
                moments + states.offloaded_moments + states.moving_average
            ) * parameter.numel()
    for module in model.modality_modules():
        for layer in module.describe().layers if module.weight_formats else ():
            total -= sum(
                (states.weight - n.value_bytes) * n.local_weights(1) for n in layer.quantized
            )
    return total


def run_length_lines(
    recipe: Recipe, model: MultimodalModel, pass_steps: float | None, step_s: float | None = None
) -> dict[str, str]:
    """Return lines on passes, hours and disk space for the start of a run and a dry run.

    Args:
        recipe: Recipe with `training.steps`.
        model: Complete model on the meta device.
        pass_steps: Number of steps of one pass over the data, or None if unknown.
        step_s: Simulated duration of a step in seconds, or None if unknown.
    """
    steps = recipe.training.steps
    length = f"{steps:,} steps"
    if pass_steps is not None:
        length += f"; {describe_passes(recipe, pass_steps)}"
    warnings = []
    if step_s is not None:
        hours = steps * step_s / 3600
        time = f"{hours:,.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"
        length += f"; about {time}, simulated"
        warnings.append(lost_steps_warning(recipe, hours))
    if recipe.data.validation and not recipe.validation.interval:
        warnings.append(
            "validation.interval = 0: [[data.validation]] is not evaluated; set "
            "validation.interval, for example to 500"
        )
    if pass_steps is not None:
        warnings.append(passes_warning(recipe, pass_steps))
    lines = {"length": length, "checkpoints": "none (checkpoint.interval = 0)"}
    checkpoint = recipe.checkpoint
    if checkpoint.interval:
        best = checkpoint.keep_best.count if checkpoint.keep_best else 0
        # An old checkpoint is removed after the next one is complete.
        count = min(checkpoint.keep_latest + best + 1, ceil(steps / checkpoint.interval))
        size_gib = checkpoint_bytes(recipe, model) / 2**30
        lines["checkpoints"] = (
            f"every {checkpoint.interval:,} steps, at most {count} of {size_gib:,.3g} GiB: "
            f"{count * size_gib:,.3g} GiB of disk"
        )
    shown = enumerate((text for text in warnings if text), 1)
    return lines | {f"warning {number}": text for number, text in shown}


def describe_passes(recipe: Recipe, pass_steps: float) -> str:
    """Return a sentence with the steps of an epoch and the epochs of the run."""
    passes = recipe.training.steps / pass_steps
    return (
        f"one epoch of the training data is about {_short_number(pass_steps)} steps; this run "
        f"trains for {_short_number(passes)} epochs"
    )


def _short_number(value: float) -> str:
    """Return a positive value with 3 significant digits, without an exponent if it is large."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def lost_steps_warning(recipe: Recipe, hours: float) -> str:
    """Return a warning if a run of this many hours saves no checkpoint, else an empty string."""
    if hours <= LONG_RUN_HOURS or recipe.checkpoint.interval:
        return ""
    return (
        f"checkpoint.interval = 0: a run of about {hours:,.1f} hours saves no checkpoint; set "
        "checkpoint.interval, for example to 500"
    )


def passes_warning(recipe: Recipe, pass_steps: float) -> str:
    """Return a warning if the run reads its data many times, else an empty string."""
    passes = recipe.training.steps / pass_steps
    if passes <= MAX_PASSES:
        return ""
    return (
        f"the run reads its training data {passes:,.0f} times; lower training.steps, or set "
        "training.epochs instead"
    )
