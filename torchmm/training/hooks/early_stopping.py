"""Complete the run if the validation metric no longer improves."""

from __future__ import annotations

import math

from torchmm.parallel.gather import gather_floats
from torchmm.recipe.training_section import BestConfig
from torchmm.training.hooks.hook import FinishedStep, Hook, TrainingContext
from torchmm.training.metrics import metric_value


class EarlyStoppingHook(Hook):
    """Hook that completes the run after `validation.early_stopping_patience` validations.

    A validation counts if the metric is not better than all earlier values by more than the
    threshold, as in `transformers.EarlyStoppingCallback`. The counter is part of checkpoints.
    """

    def __init__(self, training: TrainingContext) -> None:
        super().__init__(training)
        self._config = self.recipe.validation
        self._metric = self.recipe.checkpoint.keep_best or BestConfig()
        self._name = f"{self._metric.mode} {self._metric.metric}"
        if training.state.early_stopping.get("name") != self._name:  # a new run or metric
            training.state.early_stopping = {"name": self._name, "stalled": 0}
        self._complete_if_stalled()

    def after_step(self, done: FinishedStep) -> None:
        """Count the validation of this step. Collective."""
        if not self.is_due(done.step, self._config.interval):
            return
        local = metric_value(done.record, self._metric.metric)
        values = [math.nan if local is None else local, float(local is not None)]
        [value, is_measured], *_ = gather_floats(values)  # rank 0 decides
        if not is_measured:
            return
        state = self.training.state.early_stopping
        key = self._metric.sort_key(value)
        best = self._metric.sort_key(state.get("best", math.nan))
        has_improved = math.isnan(best) or key < best - self._config.early_stopping_threshold
        state["stalled"] = 0 if has_improved else state["stalled"] + 1
        if math.isnan(best) or key < best:
            state |= {"best": value, "step": done.step}
        self._complete_if_stalled()

    def _complete_if_stalled(self) -> None:
        state = self.training.state.early_stopping
        if state["stalled"] < self._config.early_stopping_patience:
            return
        self.training.state.end_reason = (
            f"stopped early: {self._metric.metric} has not improved in {state['stalled']} "
            f"validations; the best value is {state['best']:.6g} at step {state['step']}"
        )
        if self.components.mesh.rank == 0:
            self.components.logger.info(
                "%s. To continue, raise validation.early_stopping_patience",
                self.training.state.end_reason,
            )
