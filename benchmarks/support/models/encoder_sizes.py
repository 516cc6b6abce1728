"""Parallel plans of encoders that are colocated with an LLM: the Optimus planner (§4.1, §4.5).

The PP and TP sizes of an encoder must divide those of the LLM. The remaining ranks are data
parallel. So the devices of one LLM pipeline run m = DP_enc / DP_llm encoder pipelines. More
pipelines have fewer stages and require more memory for replicas. This module returns the plans that
fit, and the bubble scheduler selects the fastest plan.

Memory is that of the rank with the highest memory use. Stages differ (embeddings, heads,
connectors), so the mean over all GPUs, as in the paper, can hide a rank that runs out of memory.
Memory includes weights in the compute dtype and float32 gradients. Unlike in the paper, it includes
optimizer states: float32 weights and two moments, sharded over data-parallel ranks. Frozen modules
have weights only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchmm.common.layers import ModuleDescription
from torchmm.costs.execution import FLOAT32, ParameterStates
from torchmm.costs.layers import StageParameters, stage_parameters
from torchmm.pipelining.schedules.layouts import balanced_split


class ParallelSizes(NamedTuple):
    """Parallelism degrees of a module."""

    data: int
    pipeline: int
    tensor: int

    @property
    def ranks(self) -> int:
        """Total number of ranks."""
        return self.data * self.pipeline * self.tensor


@dataclass(frozen=True)
class EncoderPlan:
    """Parallel plan of one encoder.

    Attributes:
        name: Name of the encoder.
        sizes: Parallelism degrees of the encoder.
        llm: Parallelism degrees of the LLM on the same ranks.
        layers: Number of layers of each pipeline stage.
        stage_bytes: Weights, gradients and optimizer states per device of each pipeline stage.
    """

    name: str
    sizes: ParallelSizes
    llm: ParallelSizes
    layers: tuple[int, ...]
    stage_bytes: tuple[int, ...]

    @property
    def pipelines(self) -> int:
        """Number m of encoder pipelines on the devices of one LLM pipeline."""
        return self.sizes.data // self.llm.data

    @property
    def devices_per_rank(self) -> int:
        """Number of encoder TP groups in one LLM TP group."""
        return self.llm.tensor // self.sizes.tensor

    @property
    def rank_bytes(self) -> tuple[int, ...]:
        """Encoder states in bytes per device, for each LLM pipeline rank."""
        return self.stage_bytes * (self.llm.pipeline // self.sizes.pipeline)

    @property
    def devices_MS(self) -> NDArray[np.int32]:
        """Device of each encoder pipeline and stage, (M, S), numbered as in `EncoderWork`."""
        ranks = np.arange(self.llm.pipeline).reshape(-1, 1, self.sizes.pipeline)
        devices = ranks * self.devices_per_rank + np.arange(self.devices_per_rank).reshape(1, -1, 1)
        return devices.reshape(-1, self.sizes.pipeline).astype(np.int32)


@dataclass(frozen=True)
class ColocatedPlan:
    """Plans of all encoders with the total memory.

    Attributes:
        encoders: Plan of each encoder.
        rank_bytes: Total bytes per device, for each LLM pipeline rank.
    """

    encoders: tuple[EncoderPlan, ...]
    rank_bytes: tuple[int, ...]

    @property
    def worst_bytes(self) -> int:
        """Bytes on the device with the highest memory use."""
        return max(self.rank_bytes)


def encoder_plans(
    encoder: ModuleDescription,
    llm: ParallelSizes,
    *,
    compute_bytes: int = 2,
    states: ParameterStates = FLOAT32,
) -> list[EncoderPlan]:
    """Return all plans of one encoder, starting with the plan with the most replicas.

    The list includes plans that do not fit. It omits plans with more stages than layers, and TP
    sizes that do not divide the number of heads.

    Args:
        encoder: Description of the encoder.
        llm: Parallelism degrees of the LLM.
        compute_bytes: Bytes per parameter in the compute dtype.
        states: Dtypes of the parameter states.

    Raises:
        ValueError: A size is less than 1.
    """
    if min(llm) < 1:
        raise ValueError(f"{llm}: all sizes must be at least 1")
    heads = {layer.heads for layer in encoder.layers}
    result = []
    for pipeline, tensor in product(_divisors(llm.pipeline), _divisors(llm.tensor)):
        if pipeline > len(encoder.layers) or any(count % tensor for count in heads):
            continue
        data = llm.ranks // (pipeline * tensor)
        layers = balanced_split([1.0] * len(encoder.layers), pipeline)
        stops = np.cumsum(layers).tolist()
        counts = [
            stage_parameters(encoder, stop - size, stop, tensor, states=states)
            for size, stop in zip(layers, stops, strict=True)
        ]
        nbytes = tuple(state_bytes(count, data, compute_bytes) for count in counts)
        sizes = ParallelSizes(data, pipeline, tensor)
        result.append(EncoderPlan(encoder.name, sizes, llm, tuple(layers), nbytes))
    return result


def colocated_plans(
    encoders: Sequence[ModuleDescription],
    llm: ParallelSizes,
    llm_bytes: Sequence[int],
    limit_bytes: int,
    *,
    compute_bytes: int = 2,
    states: ParameterStates = FLOAT32,
) -> list[ColocatedPlan]:
    """Return all combinations of encoder plans that fit.

    Every encoder has a separate plan (§4.4). As in the paper, encoder activations are omitted.

    Args:
        llm_bytes: States and activations of the LLM on a device, by pipeline rank.
        limit_bytes: Memory of a device in bytes.

    Raises:
        ValueError: No plan fits, or `llm_bytes` has a different number of ranks.
    """
    if len(llm_bytes) != llm.pipeline:
        raise ValueError(f"bytes of {len(llm_bytes)} ranks for a pipeline of {llm.pipeline}")
    all_plans = [
        ColocatedPlan(
            plans,
            tuple(
                rank_llm_bytes + sum(plan.rank_bytes[rank] for plan in plans)
                for rank, rank_llm_bytes in enumerate(llm_bytes)
            ),
        )
        for plans in product(
            *(encoder_plans(e, llm, compute_bytes=compute_bytes, states=states) for e in encoders)
        )
    ]
    if not all_plans:
        names = [encoder.name for encoder in encoders]
        raise ValueError(f"no plan of {names} has enough stages and heads for {llm}")
    fitting = [plan for plan in all_plans if plan.worst_bytes <= limit_bytes]
    if not fitting:
        smallest = min(all_plans, key=lambda plan: plan.worst_bytes)
        rank = smallest.rank_bytes.index(smallest.worst_bytes)
        sizes = ", ".join(f"{p.name} {tuple(p.sizes)}" for p in smallest.encoders)
        raise ValueError(
            "no encoder plan fits: the plan with the lowest memory use, (data, pipeline, tensor) = "
            f"{sizes}, needs {smallest.worst_bytes / 2**30:.1f} GiB on pipeline rank {rank} of "
            f"{limit_bytes / 2**30:.1f} GiB, of which the LLM uses "
            f"{llm_bytes[rank] / 2**30:.1f} GiB; use more ranks for the LLM, recompute "
            "activations, or place encoders on separate ranks"
        )
    return fitting


def state_bytes(count: StageParameters, data: int, compute_bytes: int = 2) -> int:
    """Return weights, gradients and optimizer states of a stage on one device, in bytes.

    Args:
        count: Parameter counts of the stage.
        data: Number of data-parallel ranks that shard the optimizer states.
        compute_bytes: Bytes per parameter in the compute dtype.
    """
    sharded = (count.weight_bytes + count.optimizer_bytes) / data
    return round(compute_bytes * count.total + count.gradient_bytes + sharded)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
