"""Keys of reports in the recipe section `[metrics]`."""

from __future__ import annotations

from pydantic import Field

from torchmm.recipe.section import Section


class ReportKeys(Section):
    """Keys of the run page, of local trackers and of diagnostics."""

    html_report: bool = True
    """Write `index.html` to the run directory: curves, held-out samples, pictures, the recipe;
    renewed while the run trains."""
    tensorboard: bool = False
    """Write TensorBoard events to `tensorboard/` in the run directory."""
    trackio: bool = False
    """Record figures with Trackio, on this machine; `trackio show` shows them."""
    timeline_step: int = Field(default=5, ge=0)
    """Step for which a picture, a trace and records of the pipeline are saved in `timeline/` (the
    last step if there are fewer); 0: none. Without a pipeline there is nothing to show. At
    that step every rank's peak of memory is compared with the one predicted (`memory.json`)."""
    memory_snapshot_step: int = Field(default=0, ge=0)
    """Step after which a CUDA memory snapshot is written to `profile/`; 0: none."""
