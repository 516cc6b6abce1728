"""Metrics of preference tuning."""

from __future__ import annotations

from torchmm.extensions.preferences.loss import METRIC_NAMES, PreferenceLoss
from torchmm.models.source_losses import SourceLosses
from torchmm.training.hooks.hook import FinishedStep, Hook, TrainingContext


class PreferenceHook(Hook):
    """Hook that adds rewards of the pairs of each step to the record."""

    def __init__(self, training: TrainingContext) -> None:
        super().__init__(training)
        # The loss of a pair is not a sum over targets, and has no mean per target and source.
        self.components.model.llm.source_losses = SourceLosses()

    def after_step(self, done: FinishedStep) -> None:
        """Reduce the sums of all ranks. Collective."""
        mesh = self.components.mesh
        loss = self.components.model.llm.answer_loss
        assert isinstance(loss, PreferenceLoss)
        # Of the ranks with the same samples, tensor- and context-parallel ranks have equal sums.
        copies = mesh.module_mesh.sizes.tensor * mesh.context_size
        fraction = mesh.ranks_per_sample / copies
        local = [value * fraction for value in loss.pop_sums(mesh.device).tolist()]
        *sums, pairs = mesh.sum_over_data_parallel(local)
        chosen, rejected, accuracy = (value / max(1.0, pairs) for value in sums)
        values = (chosen, rejected, accuracy)
        metrics = dict(zip(METRIC_NAMES, values, strict=True))
        done.record["preference"] = {**metrics, "rewards/margins": chosen - rejected}
