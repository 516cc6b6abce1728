"""The reference model of preference tuning: the trained parameters at the start of training.

Before the forward and backward passes of a step, a forward-only plan on the same microbatches
computes the log-probabilities of the reference model. For this plan, the initial values replace the
trained parameters. Frozen parameters are shared, so that adapters require little memory. The
initial values are not part of checkpoints: a resumed run loads them again before the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from torchmm.common.batch import Microbatch
from torchmm.extensions.preferences.loss import PreferenceLoss
from torchmm.extensions.preferences.section import PreferenceConfig
from torchmm.models.hf.load import local_tensor
from torchmm.models.multimodal import MultimodalModel
from torchmm.planning.resolved_recipe import ResolvedRecipe
from torchmm.training.optimizers.weight_average import free_gathered_parameters
from torchmm.training.pipeline import Pipeline


def prepare_preference_loss(
    run: ResolvedRecipe, model: MultimodalModel, pipeline: Pipeline
) -> None:
    """Set the loss of the LLM, and the reference model if the loss has one.

    Args:
        run: Resolved recipe.
        model: Stages of this rank with initial parameters.
        pipeline: Pipeline of this rank.
    """
    config = PreferenceConfig.from_parent(run.recipe)
    model.llm.answer_loss = PreferenceLoss(config)
    if config.uses_reference:
        pipeline.add_loss_inputs = ReferenceModel(model, pipeline).add_log_probs


class ReferenceModel:
    """Log-probabilities of answers with the current parameters of a model, for later steps.

    Args:
        model: Stages of this rank.
        pipeline: Pipeline of this rank.
    """

    def __init__(self, model: nn.Module, pipeline: Pipeline) -> None:
        self._model = model
        self._pipeline = pipeline
        self._values = {
            p: local_tensor(p).detach().clone() for p in model.parameters() if p.requires_grad
        }
        """Initial values of the shards of this rank, or the current ones within `_in_place`."""

    @torch.no_grad()
    def add_log_probs(self, microbatches: Sequence[Microbatch]) -> Sequence[Microbatch]:
        """Return the microbatches with `reference_bits_A` on ranks with the last LLM stage."""
        was_training = self._model.training
        self._model.eval()
        with self._in_place():
            log_probs = self._pipeline.answer_log_probs(microbatches)
        self._model.train(was_training)
        return [
            replace(microbatch, reference_bits_A=log_probs[index].view(torch.int32))
            if index in log_probs
            else microbatch
            for index, microbatch in enumerate(microbatches)
        ]

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Give the parameters their initial values within the context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for parameter, value in self._values.items():
            local = local_tensor(parameter)
            current = local.clone()
            local.copy_(value)
            value.copy_(current)
        free_gathered_parameters(self._model)
