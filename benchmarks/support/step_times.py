"""How long compiled schedules take in given orders of their microbatches."""

from __future__ import annotations

import numpy as np

from torchmm.balance.compiled import Float64s
from torchmm.balance.disttrain.reordering.program import StepProgram
from torchmm.balance.disttrain.reordering.program_kernels import advance


def makespans_ms(
    program: StepProgram,
    forward_ms_GSM: Float64s,
    backward_ms_GSM: Float64s,
    orders_GM: np.ndarray | None = None,
) -> Float64s:
    """End of the last action of every group.

    Args:
        forward_ms_GSM, backward_ms_GSM: by group, stage and microbatch; backwards that the schedule
            does not have are ignored.
        orders_GM: microbatch of each slot; None: in turn.

    Raises:
        ValueError: as `StepProgram.checked`.
    """
    costs_GKM = program.checked(forward_ms_GSM, backward_ms_GSM)
    if orders_GM is not None:
        costs_GKM = np.take_along_axis(costs_GKM, np.asarray(orders_GM)[:, None], axis=2)
    steps = len(program.tables.before_N)
    found = []
    for costs_KM in costs_GKM:
        ends = np.zeros(steps)
        advance(program.tables, np.append(costs_KM.ravel(), 0.0), ends, 1, steps)
        found.append(ends[program.tables.last_R].max())
    return np.array(found)
