"""Export Hugging Face directories at intervals, for the best model, and after training."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

from torchmm.parallel.gather import gather_floats
from torchmm.training.export.model_files import TrainingSummary, write_adapters, write_export
from torchmm.training.hooks.hook import FinishedStep, Hook, TrainingContext
from torchmm.training.hooks.validation import validated_weights
from torchmm.training.metrics import metric_value


class ExportHook(Hook):
    """Hook that writes the exports of `checkpoint.export_hf`, `export_interval` and `keep_best`."""

    def after_step(self, done: FinishedStep) -> None:
        """Export the model if the interval is due or the model is the best so far."""
        step = done.step
        interval = self.recipe.checkpoint.export_interval
        if interval and step % interval == 0:
            for suffix, weights in self._exported_weights():
                with weights:
                    export_model(self.training, f"hf-{step}{suffix}")
        if self._is_best(done):
            with validated_weights(self.components):
                export_model(self.training, "hf-best")

    def finish(self) -> None:
        """Export the final model and its adapters."""
        if self.recipe.checkpoint.export_hf and self.is_complete():
            for suffix, weights in self._exported_weights():
                with weights:
                    export_model(self.training, f"hf{suffix}")
                    if not self.components.model.llm.trained_token_ids:
                        write_adapters(
                            self.components.model, self.components.run_dir / f"adapters{suffix}"
                        )

    def _exported_weights(self) -> list[tuple[str, AbstractContextManager[None]]]:
        """Return directory suffixes, and contexts in which the model has the weights to export."""
        average = self.components.average
        averages = [] if average is None else [("-ema", average.in_place())]
        return [("", nullcontext()), *averages]

    def _is_best(self, done: FinishedStep) -> bool:
        """Return True if no earlier step was better in `keep_best`. Collective."""
        keep_best = self.recipe.checkpoint.keep_best
        if keep_best is None:
            return False
        local = metric_value(done.record, keep_best.metric)
        [value], *_ = gather_floats([math.nan if local is None else local])  # rank 0 decides
        sort_key = keep_best.sort_key(value)
        state = self.training.state
        if math.isnan(sort_key) or (state.best is not None and sort_key >= state.best):
            return False
        state.best = sort_key
        return True


def export_model(training: TrainingContext, name: str) -> None:
    """Export the model to a directory of the run. Collective."""
    components = training.components
    step = training.state.step
    trained = TrainingSummary(components.run.recipe, step, components.run_dir / "metrics.jsonl")
    with training.health.phase(step, "export"):
        write_export(components.model, components.run_dir / name, components.tokenizer, trained)
