"""What the search for parallel sizes reads: costs of units as arrays, and what all plans share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchmm.balance.compiled import Float64s, Int64s


class UnitTables(NamedTuple):
    """What a step takes, by unit in the order of the pipeline; T tensor-parallel sizes."""

    tensor_T: Int64s
    seconds_UT: Float64s
    """Forward and backward of one sample; infinite where the size is not offered."""
    unevenness_U: Float64s
    """Standard deviation of samples' seconds, as a share of the mean."""
    activation_bytes_UT: Float64s
    """Kept of one sample, on one rank of that size."""
    surge_bytes_UT: Float64s
    """What n samples may keep beyond n times that, divided by the square root of n."""
    peak_bytes_UT: Float64s
    """Kept of the largest sample."""
    workspace_bytes_UT: Float64s
    """Largest temporary of one sample, on one rank of that size."""
    layers_U: Int64s
    virtual_U: Int64s
    """Virtual stages per rank."""
    replica_bytes_U: Float64s
    """On every data-parallel rank: weights and gradients."""
    sharded_bytes_U: Float64s
    """Divided among data-parallel ranks: optimizer state."""
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
