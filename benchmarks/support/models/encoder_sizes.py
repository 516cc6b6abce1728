"""Which parallel plans encoders may have alongside an LLM's: Optimus' model planner (§4.1, §4.5).

Given the LLM's sizes (data, pipeline, tensor), an encoder may have any pipeline size that divides
the LLM's and any tensor size that does; the rest of the ranks is data parallelism. So the devices
of one LLM pipeline hold m = DP_enc / DP_llm pipelines of the encoder. More pipelines have fewer
stages to wait for and more copies to store. Which is best, the bubble scheduler says; here are
those that fit.

Memory is that of the rank that needs most: stages differ (embeddings, heads, connectors), so the
paper's mean over all GPUs hides what does not fit. Counted are weights in the compute dtype,
float32 gradients and, unlike in the paper, optimizer state: float32 weights and two moments,
sharded over data-parallel ranks. A frozen module has weights only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchmm.common.layers import ModuleDescription
from torchmm.costs.execution import FLOAT32, States
from torchmm.costs.layers import Parameters, stage_parameters
from torchmm.pipelining.schedules.layouts import balanced_cuts


class ParallelSizes(NamedTuple):
    """How many ranks a module is spread over, in each way."""

    data: int
    pipeline: int
    tensor: int

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.data * self.pipeline * self.tensor


@dataclass(frozen=True)
class EncoderPlan:
    """One encoder's parallel plan.

    Attributes:
        name: of the encoder.
        sizes: its own.
        llm: those of the LLM, on the same ranks.
        layers: by pipeline stage.
        stage_bytes: by pipeline stage: weights, gradients and optimizer state on one device.
    """

    name: str
    sizes: ParallelSizes
    llm: ParallelSizes
    layers: tuple[int, ...]
    stage_bytes: tuple[int, ...]

    @property
    def pipelines(self) -> int:
        """m: pipelines of the encoder on the devices of one of the LLM."""
        return self.sizes.data // self.llm.data

    @property
    def tensor_groups(self) -> int:
        """Tensor-parallel groups of the encoder in one of the LLM."""
        return self.llm.tensor // self.sizes.tensor

    @property
    def rank_bytes(self) -> tuple[int, ...]:
        """By pipeline rank of the LLM: the encoder's states on a device there."""
        return self.stage_bytes * (self.llm.pipeline // self.sizes.pipeline)

    @property
    def devices_MS(self) -> NDArray[np.int32]:
        """By pipeline and stage: the device, as `EncoderWork` numbers them."""
        ranks = np.arange(self.llm.pipeline).reshape(-1, 1, self.sizes.pipeline)
        devices = ranks * self.tensor_groups + np.arange(self.tensor_groups).reshape(1, -1, 1)
        return devices.reshape(-1, self.sizes.pipeline).astype(np.int32)


@dataclass(frozen=True)
class ColocatedPlan:
    """A plan for each encoder, and what everything takes.

    Attributes:
        rank_bytes: by pipeline rank of the LLM: on a device there, everything included.
    """

    encoders: tuple[EncoderPlan, ...]
    rank_bytes: tuple[int, ...]

    @property
    def worst_bytes(self) -> int:
        """On the device that needs most."""
        return max(self.rank_bytes)


def encoder_plans(
    encoder: ModuleDescription,
    llm: ParallelSizes,
    *,
    compute_bytes: int = 2,
    states: States = FLOAT32,
) -> list[EncoderPlan]:
    """All plans of one encoder, fitting or not; those with most copies first.

    Left out are more stages than layers, and tensor sizes that do not divide the heads.

    Args:
        compute_bytes: per parameter in the compute dtype.
        states: of parameters.

    Raises:
        ValueError: a size is below 1.
    """
    if min(llm) < 1:
        raise ValueError(f"{llm}: all sizes must be at least 1")
    heads = {layer.heads for layer in encoder.layers}
    found = []
    for pipeline, tensor in product(_divisors(llm.pipeline), _divisors(llm.tensor)):
        if pipeline > len(encoder.layers) or any(count % tensor for count in heads):
            continue
        data = llm.ranks // (pipeline * tensor)
        layers = balanced_cuts([1.0] * len(encoder.layers), pipeline)
        stops = np.cumsum(layers).tolist()
        counts = [
            stage_parameters(encoder, stop - size, stop, tensor, states=states)
            for size, stop in zip(layers, stops, strict=True)
        ]
        nbytes = tuple(state_bytes(count, data, compute_bytes) for count in counts)
        sizes = ParallelSizes(data, pipeline, tensor)
        found.append(EncoderPlan(encoder.name, sizes, llm, tuple(layers), nbytes))
    return found


def colocated_plans(
    encoders: Sequence[ModuleDescription],
    llm: ParallelSizes,
    llm_bytes: Sequence[int],
    limit_bytes: int,
    *,
    compute_bytes: int = 2,
    states: States = FLOAT32,
) -> list[ColocatedPlan]:
    """All combinations of encoder plans that fit on the device that needs most.

    Every encoder has a separate plan (§4.4). Activations of encoders are left out, as in the
    paper.

    Args:
        llm_bytes: States and activations of the LLM on a device, by pipeline rank.
        limit_bytes: of a device.

    Raises:
        ValueError: no plan fits (the message has the lowest memory use). Or `llm_bytes` are
            of other ranks.
    """
    if len(llm_bytes) != llm.pipeline:
        raise ValueError(f"bytes of {len(llm_bytes)} ranks for a pipeline of {llm.pipeline}")
    every = [
        ColocatedPlan(
            plans,
            tuple(
                own + sum(plan.rank_bytes[rank] for plan in plans)
                for rank, own in enumerate(llm_bytes)
            ),
        )
        for plans in product(
            *(encoder_plans(e, llm, compute_bytes=compute_bytes, states=states) for e in encoders)
        )
    ]
    if not every:
        names = [encoder.name for encoder in encoders]
        raise ValueError(f"no plan of {names} has enough stages and heads for {llm}")
    fitting = [plan for plan in every if plan.worst_bytes <= limit_bytes]
    if not fitting:
        leanest = min(every, key=lambda plan: plan.worst_bytes)
        rank = leanest.rank_bytes.index(leanest.worst_bytes)
        sizes = ", ".join(f"{p.name} {tuple(p.sizes)}" for p in leanest.encoders)
        raise ValueError(
            "no encoder plan fits: the plan with the lowest memory use, (data, pipeline, tensor) = "
            f"{sizes}, needs {leanest.worst_bytes / 2**30:.1f} GiB on pipeline rank {rank} of "
            f"{limit_bytes / 2**30:.1f} GiB, of which the LLM uses "
            f"{llm_bytes[rank] / 2**30:.1f} GiB; use more ranks for the LLM, recompute "
            "activations, or place encoders on separate ranks"
        )
    return fitting


def state_bytes(count: Parameters, data: int, compute_bytes: int = 2) -> int:
    """Weights, gradients and optimizer state of a stage on one device.

    Args:
        data: data-parallel ranks, among which optimizer state is sharded.
    """
    sharded = (count.weight_bytes + count.optimizer_bytes) / data
    return round(compute_bytes * count.all + count.gradient_bytes + sharded)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
