"""Durations and sizes of checkpoint saves and uploads."""

from __future__ import annotations

import threading


class SaveMeter:
    """Metrics of the save and upload threads of this rank, see `torchmm.training.metrics`."""

    def __init__(self) -> None:
        self._metrics: dict[str, float] = {}
        self._lock = threading.Lock()

    def record(self, **metrics: float) -> None:
        """Set the metrics of a finished save or upload."""
        with self._lock:
            self._metrics |= metrics

    def pop(self) -> dict[str, float]:
        """Return the metrics since the last call, and the total number of failed uploads."""
        with self._lock:
            popped = self._metrics
            failed = {
                name: popped[name] for name in ("checkpoint_upload_failures",) if name in popped
            }
            self._metrics = failed
        return popped
