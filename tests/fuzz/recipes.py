"""A drawn recipe with all that is not drawn: paths, lengths, an optimizer that forgives."""

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
"""Of models in which rounding grows, and of float8, where it turns values into others."""


def complete(table: Table, source: str, data: Path, directory: Path, steps: int) -> Table:
    """A whole recipe.

    Args:
        table: drawn sections.
        source: see `fuzz.data.SOURCES`.
        data: where `make_data` wrote.
        directory: for the run.
        steps: to be done in all.
    """
    entry: Table = {"path": str(data / f"{source}.jsonl")}
    if source.startswith("drawn"):
        entry["target_image_column"] = "draw"
    sways = is_sharp(table["model"]) or "float8" in table
    fixed: Table = {
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
        "optimizer": OPTIMIZER | (SMALL_STEPS if sways else {}),
        "checkpoint": {"interval": 2, "export_hf": False},
        "metrics": {"peak_tflops": 1.0} | ({"timeline_step": 0} if HAS_REPORTS else {}),
        "parallel": {"timeout_s": 60},
    }
    return merged(fixed, table)
