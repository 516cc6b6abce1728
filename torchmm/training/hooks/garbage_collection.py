"""Exclude long-lived objects from Python garbage collection."""

from __future__ import annotations

import gc

from torchmm.training.hooks.hook import FinishedStep, Hook


class GarbageCollectionHook(Hook):
    """Hook that freezes all objects that exist after the first step.

    Otherwise, each collection of the oldest generation scans these objects. A scan takes up to 0.3
    s and occurs in a different step on each rank, so that all ranks are idle each time.
    """

    _is_frozen = False

    def after_step(self, done: FinishedStep) -> None:
        """Freeze existing objects after the first step of this start."""
        if not self._is_frozen:
            gc.collect()
            gc.freeze()
            self._is_frozen = True
