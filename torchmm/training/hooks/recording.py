"""Records the metrics of each step: metrics.jsonl, progress line, trackers (rank 0)."""

from __future__ import annotations

from torchmm.training.hooks.hook import Hook, StepDone


class RecordingHook(Hook):
    """Writes the record of each step. Hooks that add metrics to the record must run before it."""

    def after_step(self, done: StepDone) -> None:
        """Write the record."""
        recorder = self.parts.recorder
        if recorder is not None and recorder.record(done.record):
            self.training.health.said()

    def close(self) -> None:
        """Close metrics.jsonl and the trackers."""
        if self.parts.recorder is not None:
            self.parts.recorder.close()
