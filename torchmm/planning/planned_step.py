"""Encoded plan of a step with planning metrics, as sent between processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class PlannedStep:
    """Encoded plan of a step.

    Attributes:
        step: Number of the step.
        encoded_plan: Plan from `encode_plan`.
        statistics: Planning metrics, see `StepPlan`.
        finished: Whether the search was finished.
    """

    step: int
    encoded_plan: NDArray[np.int32]
    statistics: Mapping[str, Any] = field(default_factory=dict)
    finished: bool = True
