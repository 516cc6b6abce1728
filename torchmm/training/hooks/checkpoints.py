"""Save checkpoints at intervals, after the last step, and when the run is stopped."""

from __future__ import annotations

from torchmm.planning.run_length import lost_steps_warning
from torchmm.training.hooks.hook import FinishedStep, Hook, TrainingContext
from torchmm.training.metrics import Record, metric_value
from torchmm.training.shutdown import Status, write_status

WARMUP_STEPS = 2
"""First steps after a start, which compile layers and start workers and are therefore slower."""


class CheckpointHook(Hook):
    """Hook that saves checkpoints with `CheckpointManager`."""

    def __init__(self, training: TrainingContext) -> None:
        super().__init__(training)
        self._warning_step = training.state.step + 1 + WARMUP_STEPS
        self._saved_step = -1
        self._status_warning = ""
        """Message in STATUS.json about a checkpoint that could not be uploaded."""
        if self.components.recorder is not None:
            self.components.recorder.add_source(self.components.checkpoints.pop_metrics)

    def after_step(self, done: FinishedStep) -> None:
        """Save a checkpoint if one is due or a rank received a stop signal."""
        step = done.step
        if step == self._warning_step and self.components.mesh.rank == 0:
            hours = self.recipe.training.steps * done.record["step_ms"] / 3.6e6
            if warning := lost_steps_warning(self.recipe, hours):
                self.components.logger.warning("%s", warning)
        with self.training.health.phase(step, "checkpoint"):
            if done.is_stopping or self.is_due(step, self.recipe.checkpoint.interval):
                self.save(done.record)

    def finish(self) -> None:
        """Save the last step of a stopped run, then wait until all checkpoints are complete."""
        step = self.training.state.step
        if step and not self.is_complete() and step != self._saved_step:
            # A rank had no data for the next step when the run was stopped.
            with self.training.health.phase(step, "checkpoint"):
                self.save(None)
        self.training.health.finish()  # ranks do not synchronize after this line
        self.components.checkpoints.close()

    def save(self, record: Record | None) -> None:
        """Save the last finished step. Collective.

        Args:
            record: Metrics of that step, to select the best checkpoints. None if they are unknown.
        """
        components = self.components
        state = self.training.state
        best = self.recipe.checkpoint.keep_best
        figures: dict[str, float | None] = {}
        if best is not None and record is not None:
            figures[best.metric] = metric_value(record, best.metric)
        components.checkpoints.save(
            state.step,
            components.model,
            components.optimizer,
            state.as_json(),
            figures,
            average=components.average,
        )
        self._saved_step = state.step
        status_warning = components.checkpoints.status_warning
        if status_warning != self._status_warning and components.mesh.rank == 0:
            self._status_warning = status_warning
            write_status(
                components.run_dir, Status("running", state.step, 0, message=status_warning)
            )
