"""Complete recipes of draws: paths, lengths, and an optimizer that tolerates rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fuzz.data import VIDEO_FPS
from fuzz.draw import merged
from fuzz.models import is_sharp
from torchmm.common.extensions import extension_names

Table = dict[str, Any]

HAS_REPORTS = "torchmm.extensions.reports" in extension_names()

OPTIMIZER = {
    "lr": 1e-2,
    "eps": 1e-3,  # an update must not turn the rounding of a vanishing gradient into a step
    "lr_schedule": "constant",
    "max_grad_norm": 1.0,
}
SMALL_STEPS = {"lr": 1e-3}
"""Settings for models in which rounding errors grow, and for float8."""


def complete(table: Table, source: str, data: Path, directory: Path, steps: int) -> Table:
    """Return a complete recipe.

    Args:
        table: Sections of the draw.
        source: Name in `fuzz.data.SOURCES`.
        data: Directory of `make_data`.
        directory: Directory of the run.
        steps: Total number of steps.
    """
    entry: Table = {"path": str(data / f"{source}.jsonl")}
    if source.startswith("drawn"):
        entry["target_image_column"] = "draw"
    is_sensitive = is_sharp(table["model"]) or "float8" in table
    defaults: Table = {
        "name": "run",
        "output_dir": str(directory),
        "model": {"tokenizer": str(data / "tokenizer")},
        "data": {
            "sources": [entry],
            "workers": 0,
            "index_cache_dir": str(data / "index"),
            "video": {"fps": VIDEO_FPS, "min_frames": 4},
        },
        "training": {"steps": steps, "device": "cpu"},
        "optimizer": OPTIMIZER | (SMALL_STEPS if is_sensitive else {}),
        "checkpoint": {"interval": 2, "export_hf": False},
        "metrics": {"peak_tflops": 1.0} | ({"timeline_step": 0} if HAS_REPORTS else {}),
        "parallel": {"timeout_s": 60},
    }
    return merged(defaults, table)
