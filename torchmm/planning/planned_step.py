"""An encoded plan with the statistics of planning it, as it is sent between processes."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmm.common.files import Arrays


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

    def arrays(self) -> Arrays:
        """Return the fields as arrays for a file."""
        values = {
            "step": self.step,
            "numbers": self.numbers,
            "planner_ms": self.planner_ms,
            "planner": self.planner or "",
            "predicted_ms": nan if self.predicted_ms is None else self.predicted_ms,
            "gain_over_natural": nan if self.gain_over_natural is None else self.gain_over_natural,
            "evaluations": self.evaluations or 0,
            "finished": self.finished,
        }
        return {name: np.asarray(value) for name, value in values.items()}

    @classmethod
    def of(cls, found: Arrays) -> PlannedStep:
        """Return the planned step with the arrays of a file."""
        values: dict[str, Any] = {n: a if a.ndim else a.item() for n, a in found.items()}
        for name in ("predicted_ms", "gain_over_natural"):
            values[name] = None if isnan(values[name]) else values[name]
        for name in ("planner", "evaluations"):
            values[name] = values[name] or None
        return cls(**values)
