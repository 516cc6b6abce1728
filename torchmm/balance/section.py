"""`[parallel.search]`: the search for schedules."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from torchmm.recipe.section import Section


class SearchConfig(Section):
    """Schedule search of `parallel.schedule` = "searched". See docs/concepts/schedule_search.md."""

    stages: Literal["separated", "megatron", "balanced", "auto"] = "separated"
    """Split of the model into stages. "separated" splits each module over all ranks. "megatron"
    puts the encoders into the first LLM stage. "balanced" splits all layers as one chain into
    stages of equal cost. "auto" selects the one with the fastest simulated first step."""
    evaluations: int | None = Field(default=None, ge=1)
    """Maximum number of schedules that are evaluated per step. If None, `time_fraction` limits the
    search. Steps that are planned before they start, and simulations, then use 4000."""
    workers: int = Field(default=1, ge=1)
    """Number of search threads. At most half of the CPU cores are used."""
    background: bool = True
    """Whether to plan the next step in a separate process during training, under any schedule. If
    the search has not finished in time, the best schedule so far is used. If false, or for searched
    schedules with `training.deterministic`, each step is planned before it starts with all
    `evaluations`. Runs are then bitwise identical."""
    time_fraction: float = Field(default=0.8, gt=0, le=1)
    """Maximum planning time of the next step, as a fraction of the measured step time."""
