"""Measure the effect of images on the held-out loss of a trained model.

A caption model can lower its loss without images, because it learns the phrasing of captions. These
losses separate both effects. All are means per caption token over the same held-out samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from torchmm.common.errors import CheckpointError, ConfigError
from torchmm.data.loader import StepBatch
from torchmm.models.multimodal import MultimodalModel
from torchmm.parallel.mesh import ParallelMesh
from torchmm.planning.resolved_recipe import ResolvedRecipe
from torchmm.training.build import open_checkpoints
from torchmm.training.data_build import build_data
from torchmm.training.model_build import build_meta_model, choose_model_stages, materialize_stages
from torchmm.training.pipeline import Pipeline
from torchmm.training.validation import held_out_losses


def image_losses(run: ResolvedRecipe, run_dir: Path, mesh: ParallelMesh) -> dict[str, float]:
    """Return the held-out loss of the newest checkpoint of a run for each replacement of images.

    Returns:
        Losses with the images of the samples ("own"), with all-zero images, which are mid-gray for
        most encoders ("blank"), and with the image of the previous sample of the microbatch
        ("other").

    Raises:
        CheckpointError: The run has no usable checkpoint.
        ConfigError: Images of an encoder vary in size, so they cannot be exchanged.
    """
    model, pipeline, batches = _open_run(run, mesh)
    logger = logging.getLogger(__name__)
    with open_checkpoints(run, run_dir, mesh, logger) as checkpoints:
        path = checkpoints.latest_valid()
        if path is None:
            raise CheckpointError(f"{run_dir} has no checkpoint; set checkpoint.interval and train")
        checkpoints.load(path, model, None)
    changes = {"own": lambda p: p, "blank": torch.zeros_like, "other": lambda p: p.roll(1, dims=0)}
    return {
        name: held_out_losses(pipeline, [change_images(b, change) for b in batches], mesh)["llm"]
        for name, change in changes.items()
    }


def text_only_loss(run: ResolvedRecipe, mesh: ParallelMesh) -> float:
    """Return the held-out loss of the untrained LLM with the same prompts and without images."""
    recipe = run.recipe
    text_model = recipe.model.model_copy(update={"encoders": {}})
    freeze = recipe.freeze.model_copy(update={"modules": ["llm"]})
    text_only = recipe.model_copy(update={"model": text_model, "freeze": freeze, "adapters": {}})
    _, pipeline, batches = _open_run(replace(run, recipe=text_only), mesh)
    return held_out_losses(pipeline, batches, mesh)["llm"]


def _open_run(
    run: ResolvedRecipe, mesh: ParallelMesh
) -> tuple[MultimodalModel, Pipeline, list[StepBatch]]:
    """Return the model, its pipeline and the held-out batches of a run, with all images.

    Raises:
        ConfigError: Images of an encoder vary in size.
    """
    model, tokenizer = build_meta_model(run)
    if any(spec.inputs != "fixed" for spec in model.image_specs().values()):
        raise ConfigError("images can be exchanged only if an encoder has images of one size")
    model_stages = choose_model_stages(run, model, tokenizer, mesh.device)
    pipeline, _ = materialize_stages(run, model, mesh, model_stages)
    model.eval()
    loader = build_data(run, model, tokenizer, mesh, validation=True)
    return model, pipeline, list(islice(loader, run.recipe.validation.batches))


def change_images(batch: StepBatch, change: Callable[[Tensor], Tensor]) -> StepBatch:
    """Return the batch with `change` applied to the (N, C, H, W) pixels of every microbatch."""
    microbatches = []
    for microbatch in batch.microbatches:
        encoders = {}
        for name, encoder in microbatch.encoders.items():
            inputs = encoder.values()
            encoders[name] = replace(inputs, pixels=change(inputs.pixels))
        microbatches.append(replace(microbatch, encoders=encoders))
    return replace(batch, microbatches=microbatches)
