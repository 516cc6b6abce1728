"""Durations and sizes of saves and copies of checkpoints."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class SaveFigures:
    """Saves and copies that finished since the last record, as fields of metrics.jsonl."""

    save_wait_ms: float | None = None
    save_ms: float | None = None
    save_bytes: int | None = None
    upload_ms: float | None = None
    upload_bytes: int | None = None
    failed_uploads: int | None = None


@dataclass
class SaveMeter:
    """Figures of the threads of this rank that save and copy."""

    _figures: SaveFigures = SaveFigures()
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, **figures: float) -> None:
        """Set figures of a save or copy that finished."""
        with self._lock:
            self._figures = replace(self._figures, **figures)  # type: ignore[arg-type]

    def take(self) -> SaveFigures:
        """Return the figures since the last call."""
        with self._lock:
            taken = self._figures
            self._figures = SaveFigures(failed_uploads=taken.failed_uploads)
        return taken
