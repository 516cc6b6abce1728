"""An encoded plan with the metrics of planning it, as it is sent between processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmm.common.files import Arrays


@dataclass(frozen=True)
class PlannedStep:
    """The encoded plan of a step.

    Attributes:
        step: number of the step.
        numbers: plan from `encode_plan`.
        statistics: metrics of planning the step, see `StepPlan`.
        finished: Whether the search was finished.
    """

    step: int
    numbers: NDArray[np.int32]
    statistics: Mapping[str, Any] = field(default_factory=dict)
    finished: bool = True

    def arrays(self) -> Arrays:
        """Return all values except None as arrays for a file."""
        known = {name: value for name, value in self.statistics.items() if value is not None}
        values = {"step": self.step, "numbers": self.numbers, "finished": self.finished, **known}
        return {name: np.asarray(value) for name, value in values.items()}

    @classmethod
    def of(cls, found: Arrays) -> PlannedStep:
        """Return the planned step with the arrays of a file."""
        values: dict[str, Any] = {n: a if a.ndim else a.item() for n, a in found.items()}
        step, numbers, finished = (values.pop(name) for name in ("step", "numbers", "finished"))
        return cls(step, numbers, values, finished)
