"""Entries of this extension in the tables of the core."""

from typing import Any

from torchmm.common.extensions import Entries, Entry
from torchmm.extensions.reports.section import ReportKeys


def _has_diagnostics(run: Any) -> bool:
    metrics = run.recipe.metrics
    keys = ReportKeys.from_parent(metrics)
    return any((keys.timeline_step, metrics.profile_step, keys.memory_snapshot_step))


REQUIRES = ("torchmm.balance",)
ENTRIES: Entries = {
    "sections": [Entry("MetricsConfig.*", "torchmm.extensions.reports.section:ReportKeys")],
    "recipe_checks": [Entry("reports", "torchmm.extensions.reports.checks:check_reports")],
    "hooks": [
        Entry(
            "diagnostics",
            "torchmm.extensions.reports.diagnostics:DiagnosticsHook",
            _has_diagnostics,
        ),
    ],
    "trackers": [
        Entry(
            "page",
            "torchmm.extensions.reports.page.html_pages:start_page",
            lambda metrics: ReportKeys.from_parent(metrics).html_report,
        ),
        Entry(
            "tensorboard",
            "torchmm.extensions.reports.local_trackers:start_tensorboard",
            lambda metrics: ReportKeys.from_parent(metrics).tensorboard,
        ),
        Entry(
            "trackio",
            "torchmm.extensions.reports.local_trackers:start_trackio",
            lambda metrics: ReportKeys.from_parent(metrics).trackio,
        ),
    ],
    "run_ends": [
        Entry(
            "page",
            "torchmm.extensions.reports.page.html_pages:write_last_page",
            lambda recipe: ReportKeys.from_parent(recipe.metrics).html_report,
        ),
    ],
}
