"""Entries of this extension in the tables of the core."""

from typing import Any

from torchmm.common.extensions import Entries, Entry


def _has_diagnostics(run: Any) -> bool:
    metrics = run.recipe.metrics
    return any((metrics.timeline_step, metrics.profile_step, metrics.memory_snapshot_step))


ENTRIES: Entries = {
    "hooks": [
        Entry(
            "diagnostics",
            "torchmm.extensions.reports.diagnostics:DiagnosticsHook",
            _has_diagnostics,
        ),
    ],
}
