"""Keys of reports in the recipe section `[metrics]`."""

from __future__ import annotations

from pydantic import Field

from torchmm.recipe.section import Section


class ReportKeys(Section):
    """Keys of the run page, of local trackers and of diagnostics."""

    html_report: bool = True
    """Whether to write a report of the run to `index.html`, with curves, held-out samples, images
    and the recipe. It is updated during training. See docs/guides/run_page.md."""
    tensorboard: bool = False
    """Whether to write TensorBoard events to `tensorboard/`."""
    trackio: bool = False
    """Whether to record metrics with Trackio on this host. View them with `trackio show`."""
    timeline_step: int = Field(default=5, ge=0)
    """Step whose pipeline timeline is saved in `timeline/`, as a plot and a trace, or the last step
    if there are fewer. At this step, the predicted and the measured peak memory of each rank are
    saved in `memory.json`. 0 disables it. Requires a pipeline. See docs/guides/read_pipeline.md."""
    memory_snapshot_step: int = Field(default=0, ge=0)
    """Step after which a CUDA memory snapshot is written to `profile/`. 0 disables it."""
