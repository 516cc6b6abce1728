"""An encoded plan with the statistics of planning it, as it is sent between processes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class PlannedStep:
    """The encoded plan of a step and the statistics of planning it.

    Attributes:
        step: number of the step.
        numbers: plan from `encode_plan`.
        planner_ms: time since the request.
        planner: name of the schedule or search that found the order. None for the recipe's
            schedule.
        predicted_ms: predicted time of the forward and backward passes. None if it is unknown.
        gain_over_natural: relative time by which the natural order would be slower. None if the
            natural order does not fit into memory, or orders were not compared.
        evaluations: orders that the search timed. None without a search.
        finished: Whether the search was finished.
    """

    step: int
    numbers: NDArray[np.int32]
    planner_ms: float
    planner: str | None = None
    predicted_ms: float | None = None
    gain_over_natural: float | None = None
    evaluations: int | None = None
    finished: bool = True
