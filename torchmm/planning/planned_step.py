"""An encoded plan with the metrics of planning it, as it is sent between processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


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
