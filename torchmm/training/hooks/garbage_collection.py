"""Excludes long-lived objects from Python's garbage collection."""

from __future__ import annotations

import gc

from torchmm.training.hooks.hook import Hook, StepDone


class GarbageCollectionHook(Hook):
    """Freezes all objects that exist after the first step.

    Without it, collections of the oldest generation search these objects again and again. They take
    up to 0.3 s and happen on each rank in a different step, so that all ranks wait each time.
    """

    _is_frozen = False

    def after_step(self, done: StepDone) -> None:
        """Freeze existing objects after the first step of this start."""
        if not self._is_frozen:
            gc.collect()
            gc.freeze()
            self._is_frozen = True
