"""`[parallel.search]`: the search for schedules."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from torchmm.recipe.section import Section


class SearchConfig(Section):
    """Search for the order of each step (`schedule = "searched"`)."""

    stages: Literal["separated", "megatron", "balanced", "auto"] = "separated"
    """How modules are cut. "separated": each into segments over all ranks; "megatron": whole
    encoders in front of the LLM's first stage; "balanced": all layers in one chain of equally
    costly stages; "auto": the one with the fastest first step according to the cost model."""
    evaluations: int | None = Field(default=None, ge=1)
    """Most orders tried for a step. Default: as many as `time_fraction` allows while the step
    before trains; 4000 where a step is planned before it begins, and in forecasts."""
    workers: int = Field(default=1, ge=1)
    """Threads that search, on at most half of the machine's cores."""
    background: bool = True
    """Plan the next step, under any schedule, in a separate process while this one trains. If that
    process has not finished in time, the best order so far is used; what is not searched is the
    same wherever it is planned. If false, or where orders are searched with
    `training.deterministic`, each step is planned before it begins, with all `evaluations`; runs
    are then bit-identical."""
    time_fraction: float = Field(default=0.8, gt=0, le=1)
    """Share of a measured step that planning the next one may take."""
