"""Durations and sizes of saves and copies of checkpoints."""

from __future__ import annotations

import threading


class SaveMeter:
    """Metrics of the threads of this rank that save and copy, by name in metrics.jsonl."""

    def __init__(self) -> None:
        self._figures: dict[str, float] = {}
        self._lock = threading.Lock()

    def note(self, **figures: float) -> None:
        """Set metrics of a save or copy that finished."""
        with self._lock:
            self._figures |= figures

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call. The number of failed copies stays."""
        with self._lock:
            taken = self._figures
            self._figures = {k: v for k, v in taken.items() if k == "failed_uploads"}
        return taken
