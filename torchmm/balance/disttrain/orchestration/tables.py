"""What the search for parallel sizes reads: costs of units as arrays, and what all plans share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchmm.balance.compiled import Float64s, Int64s


class UnitTables(NamedTuple):
    """`UnitCosts` of U units in the order of the pipeline, by T tensor-parallel sizes."""

    tensor_T: Int64s
    seconds_UT: Float64s
    """Infinite where the size is not offered."""
    unevenness_U: Float64s
    activation_bytes_UT: Float64s
    surge_bytes_UT: Float64s
    peak_bytes_UT: Float64s
    workspace_bytes_UT: Float64s
    layers_U: Int64s
    virtual_U: Int64s
    replica_bytes_U: Float64s
    sharded_bytes_U: Float64s
    keeps_U: NDArray[np.bool_]
    """Whether activations are kept for a backward."""
    transfer_s_U: Float64s
    sync_s_U: Float64s
    limit_U: Int64s
    """Devices that a unit may have."""


class PlanSetting(NamedTuple):
    """What is the same for all plans."""

    llm: int
    """Position of the LLM among the units."""
    batch: int
    """Microbatches of all data-parallel ranks of the LLM together."""
    microbatch_size: int
    devices: int
    memory_bytes: float
