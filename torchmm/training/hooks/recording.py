"""Record the metrics of each step on rank 0: metrics.jsonl, progress line, trackers."""

from __future__ import annotations

from torchmm.training.hooks.hook import FinishedStep, Hook


class RecordingHook(Hook):
    """Hook that writes the record of each step, after all hooks that add metrics to the record."""

    def after_step(self, done: FinishedStep) -> None:
        """Write the record."""
        recorder = self.components.recorder
        if recorder is not None and recorder.record(done.record):
            self.training.health.mark_reported()

    def close(self) -> None:
        """Close metrics.jsonl and the trackers."""
        if self.components.recorder is not None:
            self.components.recorder.close()
