"""Peak memory of the models in `bubble_model`, and encoder plans that fit (Optimus §4.5).

The results correspond to figure 17 of the paper.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from support.models.bubble_model import (
    LLM_TOKENS,
    TENSOR,
    WHOLE,
    Model,
    Shape,
    Speed,
    chain_layers,
    image_parts,
)
from support.models.encoder_sizes import ColocatedPlan, colocated_plans, state_bytes
from torchmm.balance.optimus.bubble_scheduler import BubbleSchedule
from torchmm.costs.layers import StageParameters

DEVICE_BYTES = 80e9
KEPT_PER_LAYER = 34
"""Saved bytes of a layer per token and feature, without the attention matrix.

Source: Korthikanti et al., arXiv 2205.05198.
"""


def plans_that_fit(model: Model) -> list[ColocatedPlan]:
    """Return encoder plans with full TP groups that fit, starting with the most replicas.

    Encoder states, LLM states and LLM activations must fit into 80 GB on every device.
    """
    encoders = [
        replace(shape, name=f"vision{i}").describe("encoder")
        for i, shape in enumerate(model.encoders)
    ]
    llm_bytes = [round(n) for n in _llm_bytes(model)]
    plans = colocated_plans(encoders, model.sizes, llm_bytes, int(DEVICE_BYTES))
    return [
        plan for plan in plans if all(encoder.devices_per_rank == 1 for encoder in plan.encoders)
    ]


def activation_bytes(
    model: Model, speed: Speed, plan: ColocatedPlan, schedule: BubbleSchedule
) -> list[float]:
    """Return peak encoder activations in bytes for each LLM pipeline rank."""
    ranks = [0.0] * model.pipeline
    for index, (shape, encoder_plan) in enumerate(zip(model.encoders, plan.encoders, strict=True)):
        begins, ends = schedule.forward_start_ps[index], schedule.backward_start_ps[index]
        for pipeline, devices in enumerate(encoder_plan.devices_MS.tolist()):
            tasks = np.flatnonzero(schedule.pipeline_N[index] == pipeline)
            for stage, device in enumerate(devices):
                spans = [(begins[t, stage, 0], ends[t, stage, -1]) for t in tasks]
                most_tasks = max(
                    (sum(a <= begin < b for a, b in spans) for begin, _ in spans), default=0
                )
                kept = saved_bytes(shape, speed) / image_parts(speed)
                ranks[device] += most_tasks * kept * encoder_plan.layers[stage]
    return ranks


def baseline_bytes(model: Model, speed: Speed, *, encoders_keep: bool = False) -> float:
    """Return peak states and activations of the baseline with the lowest memory use.

    Args:
        encoders_keep: whether activations of encoders count, or the LLM's alone.
    """
    share = model.llm.layers / model.pipeline
    megatron = _state_bytes(model, model.llm, share)
    megatron += sum(_state_bytes(model, shape, shape.layers) for shape in model.encoders)
    megatron += saved_bytes(model.llm, WHOLE) * share * _in_flight(model, 1, 0)
    for shape in model.encoders if encoders_keep else ():
        megatron += saved_bytes(shape, speed) * shape.layers * _in_flight(model, 1, 0)
    if len(model.encoders) > 1:
        return megatron
    (encoder,) = model.encoders
    ranks = [0.0] * model.pipeline
    for index, (first, layers) in enumerate(chain_layers(model, speed)):
        rank = index % model.pipeline
        vision = max(0, min(first + layers, encoder.layers) - first)
        kept = saved_bytes(model.llm, WHOLE) * (layers - vision)
        kept += saved_bytes(encoder, speed) * vision * encoders_keep
        ranks[rank] += kept * _in_flight(model, model.balanced, rank)
        ranks[rank] += _state_bytes(model, encoder, vision)
        ranks[rank] += _state_bytes(model, model.llm, layers - vision)
    return min(megatron, max(ranks))


def saved_bytes(shape: Shape, speed: Speed) -> float:
    """Return activations of one layer and microbatch on a device, in bytes."""
    return KEPT_PER_LAYER * LLM_TOKENS * speed.patches * shape.width / TENSOR


def _state_bytes(model: Model, shape: Shape, layers: float) -> float:
    """Return state bytes of layers on a device, sharded like those of the LLM."""
    count = shape.describe("encoder").layers[0].parameters * layers / TENSOR
    return state_bytes(StageParameters(count, count), model.data)


def _in_flight(model: Model, virtual: int, rank: int) -> float:
    """Return the number of microbatches that a rank of interleaved 1F1B saves, over all layers."""
    behind = model.pipeline - rank - 1
    if virtual == 1:
        return min(model.microbatches, behind + 1)
    chunks = 2 * behind + (virtual - 1) * model.pipeline + 1
    return min(model.microbatches, chunks / virtual)


def _llm_bytes(model: Model) -> Iterator[float]:
    """Yield the LLM bytes on a device of each pipeline rank."""
    layers = model.llm.layers / model.pipeline
    kept = saved_bytes(model.llm, WHOLE) * layers
    for rank in range(model.pipeline):
        flight = _in_flight(model, model.virtual, rank)
        yield _state_bytes(model, model.llm, layers) + kept * flight
