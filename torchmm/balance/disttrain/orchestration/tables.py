"""Inputs of the search for parallelism degrees: unit costs as arrays, and shared plan settings."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchmm.balance.numba_utils import Float64s, Int64s


class UnitTables(NamedTuple):
    """`UnitCosts` of U units in pipeline order, for T tensor-parallel sizes."""

    tensor_T: Int64s
    seconds_UT: Float64s
    """Seconds per sample. Infinite if a unit has no costs for a tensor-parallel size."""
    relative_std_U: Float64s
    activation_bytes_UT: Float64s
    activation_margin_bytes_UT: Float64s
    max_activation_bytes_UT: Float64s
    workspace_bytes_UT: Float64s
    layers_U: Int64s
    virtual_U: Int64s
    replica_bytes_U: Float64s
    sharded_bytes_U: Float64s
    has_backward_U: NDArray[np.bool_]
    """Whether activations are saved for a backward pass."""
    transfer_s_U: Float64s
    grad_sync_s_U: Float64s
    max_devices_U: Int64s
    """Maximum number of devices of each unit."""


class PlanSettings(NamedTuple):
    """Properties that all plans share."""

    llm: int
    """Index of the LLM among the units."""
    batch: int
    """Number of microbatches of all data-parallel ranks of the LLM together."""
    microbatch_size: int
    devices: int
    memory_bytes: float
