"""Validate during training: losses on held-out samples."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import islice

from torchmm.common.module_names import GENERATOR
from torchmm.data.loader import StepBatch
from torchmm.models.source_losses import SourceLosses
from torchmm.recipe.data_section import unique_names
from torchmm.training.components import RunComponents
from torchmm.training.data_build import build_data
from torchmm.training.hooks.hook import FinishedStep, Hook, TrainingContext
from torchmm.training.metrics import Record
from torchmm.training.step import gather_corrupt_samples, loss_weights
from torchmm.training.validation import held_out_losses


class ValidationHook(Hook):
    """Hook that validates every `validation.interval` steps and adds the losses to the record."""

    def __init__(self, training: TrainingContext) -> None:
        super().__init__(training)
        self._config = self.recipe.validation
        self._loss_weights = loss_weights(self.recipe.model.generator)
        self._source_losses = SourceLosses(unique_names(self.recipe.data.validation))
        self._batches: list[StepBatch] | None = None
        """Batches of every validation, loaded before the first one."""

    def after_step(self, done: FinishedStep) -> None:
        """Validate the model if it is due."""
        step = done.step
        if self.components.held_out is None or not self.is_due(step, self._config.interval):
            return
        with self.training.health.phase(step, "validation"), validated_weights(self.components):
            self._validate(done.record)

    def _validate(self, record: Record) -> None:
        """Add the losses of held-out samples to a record. Collective."""
        components = self.components
        components.model.eval()
        if self._batches is None:
            self._batches = self._load_batches()
        llm = components.model.llm
        training_losses, llm.source_losses = llm.source_losses, self._source_losses
        losses = held_out_losses(
            components.pipeline, self._batches, components.mesh, self._source_losses
        )
        llm.source_losses = training_losses
        components.model.train()
        record["validation_loss_by_source"] = losses.pop("by_source")
        record["validation_loss"] = losses["llm"]
        if components.model.generator is not None:
            weighted = (self._loss_weights[name] * losses[name] for name in losses)
            record["validation_loss"] = sum(weighted)
            record["validation_loss_text"] = losses["llm"]
            record["validation_loss_image"] = losses[GENERATOR]

    def _load_batches(self) -> list[StepBatch]:
        """Return the batches of every validation, decoded as in training. Collective."""
        components = self.components
        loader = build_data(
            components.run,
            components.model,
            components.tokenizer,
            components.mesh,
            validation=True,
            samples=components.held_out,
            reads=components.pipeline.reads,
        )
        read = islice(loader.batches(), self._config.batches)
        batches = [batch for batch in read if batch is not None]
        corrupt = {name: why for batch in batches for name, why in batch.corrupt.items()}
        corrupt = gather_corrupt_samples(corrupt, components.mesh)
        return [loader.mask_corrupt(batch, corrupt) for batch in batches]


def validated_weights(components: RunComponents) -> AbstractContextManager[None]:
    """Return a context in which the model has the weights to validate (`validation.ema`)."""
    if components.average is None or not components.run.recipe.validation.ema:
        return nullcontext()
    return components.average.in_place()
