"""Score lmms-eval tasks in another process, with exported snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchmm.extensions.evaluation.benchmarks import FOLDER, BenchmarkRunner
from torchmm.extensions.evaluation.section import BenchmarksConfig
from torchmm.training.hooks.exports import export_model
from torchmm.training.hooks.hook import FinishedStep, Hook, TrainingContext
from torchmm.training.hooks.validation import validated_weights


class BenchmarkHook(Hook):
    """Hook that exports a snapshot every `validation.benchmarks.interval` steps and evaluates it.

    Scores are part of the record of the step in which they become available. Scores that become
    available after the last step are added to the record of the last step.
    """

    def __init__(self, training: TrainingContext) -> None:
        super().__init__(training)
        self._config = BenchmarksConfig.from_parent(self.recipe.validation)
        self._processes = BenchmarkRunner(
            self._config, self.components.run_dir, self.components.logger
        )
        if self.components.recorder is not None:
            self.components.recorder.add_source(self._pop_scores)

    def after_step(self, done: FinishedStep) -> None:
        """Export a snapshot and start its evaluation if it is due."""
        step = done.step
        if not self.is_due(step, self._config.interval):
            return
        folder = f"{FOLDER}/step-{step}"
        with validated_weights(self.components):
            export_model(self.training, f"{folder}/hf")
        if self.components.mesh.rank == 0:
            self._processes.start(step, self.components.run_dir / folder, self.is_complete())

    def finish(self) -> None:
        """Wait for the remaining scores of a complete run. A stop signal ends the wait."""
        if not self.is_complete():
            return
        stop = self.training.stop
        for evaluation in self._processes.finish(lambda: stop.received is not None):
            assert self.components.recorder is not None
            self.components.recorder.add_scores(evaluation.scores)

    def close(self) -> None:
        """Stop the evaluation that is running."""
        self._processes.close()

    def _pop_scores(self) -> Mapping[str, Any]:
        """Return the scores that have become available, as metrics."""
        evaluation = self._processes.poll()
        return {} if evaluation is None else {"scores": evaluation.scores}
