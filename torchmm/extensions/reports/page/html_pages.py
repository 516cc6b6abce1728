"""Write the page of a run, and the page that compares runs.

During training, a thread of rank 0 updates the page at most every `UPDATE_INTERVAL_S` seconds. The
page is written again after STATUS.json has the final state. If a page cannot be written, a warning
is logged.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from torchmm.common.files import replace_atomically
from torchmm.common.log import report_progress
from torchmm.extensions.reports.page.run_contents import RunContents, read_run
from torchmm.extensions.reports.page.sections import (
    charts_section,
    commands_section,
    comparison_section,
    evaluations_section,
    images_section,
    memory_section,
    ranks_section,
    recipe_section,
    samples_section,
    skipped_section,
    status_section,
    warnings_section,
)
from torchmm.training.tracking.trackers import BackgroundSink, TrackedRun

PAGE_NAME = "index.html"
UPDATE_INTERVAL_S = 30.0
STALE_S = 1800.0
"""Time in seconds without an update after which a running run is assumed to be killed."""
ASSETS = Path(__file__).parent

logger = logging.getLogger("torchmm")


def write_run_page(run_dir: Path) -> Path:
    """Write index.html of a run directory.

    Raises:
        FileNotFoundError: It is not a run directory, because it has no metrics.jsonl.
        OSError: The file cannot be written. The error has its path.
    """
    path = run_dir / PAGE_NAME
    replace_atomically(path, render_run_page(read_run(run_dir)).encode(errors="replace"))
    return path


def render_run_page(run: RunContents) -> str:
    """Return the page of a run."""
    parts = {
        "": status_section(run),
        "Curves": charts_section([run]),
        "Validation samples": samples_section(run),
        "Images and timelines": images_section(run),
        "Scores of exports": evaluations_section(run),
        "Ranks": ranks_section(run),
        "Memory, predicted and measured": memory_section(run),
        "Warnings": warnings_section(run),
        "Recipe": recipe_section(run),
        "Next steps": commands_section(run),
    }
    parts["Skipped files"] = skipped_section(run)
    running = run.status is not None and run.status.state == "running"
    is_updating = running and run.status_age_s < STALE_S
    return _render_page(run.name, parts, UPDATE_INTERVAL_S if is_updating else 0)


def render_comparison_page(runs: Sequence[RunContents]) -> str:
    """Return the page that compares several runs."""
    title = " | ".join(run.name for run in runs)
    return _render_page(title, {"": comparison_section(runs), "Curves": charts_section(runs)}, 0)


def _render_page(title: str, parts: Mapping[str, str], reload_interval_s: float) -> str:
    """Return a page as HTML.

    Args:
        title: Title of the page.
        parts: HTML by heading. Empty parts are omitted.
        reload_interval_s: Interval in seconds at which a browser reloads the page. 0 disables it.
    """
    non_empty = {heading: part for heading, part in parts.items() if part}
    links = "".join(f'<a href="#{_anchor(h)}">{escape(h)}</a>' for h in non_empty if h)
    sections = "".join(
        f'<section id="{_anchor(heading)}"><h2>{escape(heading)}</h2>{part}</section>'
        if heading
        else part
        for heading, part in non_empty.items()
    )
    script = (ASSETS / "charts.js").read_text()
    # The policy permits only this script, so that scripts in the data never run.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    written = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{escape(title)}</title>"
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{(ASSETS / 'style.css').read_text()}</style></head>"
        f'<body data-renew-s="{reload_interval_s:.0f}" data-written-s="{time.time():.0f}">'
        f"<h1>{escape(title)}</h1><nav>{links}</nav>{sections}"
        f"<footer><p>Written {written} by torchmm.</p></footer>"
        f"<script>{script}</script></body></html>\n"
    )


def _anchor(heading: str) -> str:
    return heading.lower().replace(" ", "-")


def start_page(run: TrackedRun) -> BackgroundSink:
    """Start the thread that updates the page of a run."""
    return BackgroundSink(PAGE_NAME, lambda: PageSink(run.run_dir), run.log)


class PageSink:
    """Sink that updates the page of a run during training."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._next_s = 0.0

    def emit(self, record: Mapping[str, Any]) -> None:
        """Write the page if the last version is old."""
        begin_s = time.monotonic()
        if begin_s < self._next_s:
            return
        write_run_page(self._run_dir)
        end_s = time.monotonic()
        # Writing a page with many steps takes longer. Limit its fraction of the time to 1 %.
        self._next_s = end_s + max(UPDATE_INTERVAL_S, 100 * (end_s - begin_s))

    def close(self) -> None:
        """Do nothing: `write_last_page` writes the page with the final status."""


def write_last_page(run_dir: Path) -> None:
    """Write the page of a run that has finished."""
    with report_progress("writing the report"):
        try_write_page(run_dir)


def try_write_page(run_dir: Path) -> None:
    """Write the page of a run, or log a warning if that fails."""
    try:
        write_run_page(run_dir)
    except FileNotFoundError:
        return  # the run stopped before its first step
    except OSError as error:
        logger.warning("cannot write %s: %s", run_dir / PAGE_NAME, error)
