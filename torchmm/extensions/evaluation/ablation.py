"""How much a trained model uses its images: held-out loss with other images, or with none.

A caption model can lower its loss a lot without looking: it learns how captions are phrased. These
losses separate the two. All are means per caption token over the same held-out samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from torchmm.common.batch import EncoderInputs, Microbatch
from torchmm.common.errors import CheckpointError, ConfigError
from torchmm.data.loader import StepBatch
from torchmm.parallel.mesh import ParallelMesh
from torchmm.planning.resolved import Resolved
from torchmm.training.build import open_checkpoints
from torchmm.training.data_build import build_data
from torchmm.training.model_build import build_unfilled_model, cut_model, fill_model
from torchmm.training.validation import held_out_losses


def image_losses(run: Resolved, run_dir: Path, mesh: ParallelMesh) -> dict[str, float]:
    """Held-out loss of a run's newest checkpoint by what replaces the images.

    Returns:
        "own": the samples' own images. "blank": zeros (mid-gray for most encoders). "other": the
        image of the sample before in the microbatch.

    Raises:
        CheckpointError: the run has no usable checkpoint.
        ConfigError: images of the recipe's encoder vary in size, so that none can be exchanged.
    """
    model, tokenizer = build_unfilled_model(run)
    if any(spec.inputs != "fixed" for spec in model.image_specs().values()):
        raise ConfigError("images can only be exchanged where an encoder's images have one size")
    cut = cut_model(run, model, tokenizer, mesh.device)
    pipeline, _ = fill_model(run, model, mesh, cut)
    logger = logging.getLogger(__name__)
    with open_checkpoints(run, run_dir, mesh, logger) as checkpoints:
        path = checkpoints.latest_valid()
        if path is None:
            raise CheckpointError(f"{run_dir} has no checkpoint; set checkpoint.interval and train")
        checkpoints.load(path, model, None)
    model.eval()
    # All images on all ranks: those of a microbatch change places.
    loader = build_data(run, model, tokenizer, mesh, validation=True)
    batches = list(islice(loader, run.recipe.validation.batches))
    ways = {"own": lambda p: p, "blank": torch.zeros_like, "other": lambda p: p.roll(1, dims=0)}
    return {
        name: held_out_losses(pipeline, [change_images(b, way) for b in batches], mesh)["llm"]
        for name, way in ways.items()
    }


def text_only_loss(run: Resolved, mesh: ParallelMesh) -> float:
    """Held-out loss of the LLM as it comes from its source: same prompt, no image, no training."""
    recipe = run.recipe
    text_model = recipe.model.model_copy(update={"encoders": {}})
    freeze = recipe.freeze.model_copy(update={"modules": ["llm"]})
    alone = recipe.model_copy(update={"model": text_model, "freeze": freeze, "adapters": {}})
    run = replace(run, recipe=alone)
    model, tokenizer = build_unfilled_model(run)
    cut = cut_model(run, model, tokenizer, mesh.device)
    pipeline, _ = fill_model(run, model, mesh, cut)
    model.eval()
    loader = build_data(run, model, tokenizer, mesh, validation=True)
    batches = islice(loader, recipe.validation.batches)
    return held_out_losses(pipeline, batches, mesh)["llm"]


def change_images(batch: StepBatch, change: Callable[[Tensor], Tensor]) -> StepBatch:
    """The batch with `change` applied to the (N, C, H, W) pixels of every microbatch."""

    def of_encoder(inputs: EncoderInputs) -> EncoderInputs:
        shown = inputs.values()
        return replace(shown, pixels=change(shown.pixels))

    def of_microbatch(microbatch: Microbatch) -> Microbatch:
        encoders = {name: of_encoder(e) for name, e in microbatch.encoders.items()}
        return replace(microbatch, encoders=encoders)

    return replace(batch, microbatches=[of_microbatch(m) for m in batch.microbatches])
