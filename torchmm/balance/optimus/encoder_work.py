"""Encoder work of a step, as kernels on the devices of an LLM pipeline.

An encoder with a separate parallelism config (Optimus §4.1) has M pipelines on the devices of one
LLM pipeline:

    LLM pipeline    rank 0   rank 1   rank 2   rank 3
    encoder         |  pipeline 0  |  |  pipeline 1  |       M = 2 pipelines of S = 2 stages

A task is a group of images of a microbatch. It passes one of the pipelines forward and backward. A
stage runs a chain of *kernels* for each task. Kernels can be GPU kernels, layers or complete
stages, which defines the granularity of the schedule. Tasks have individual durations, because
microbatches have different numbers of images.

Shape suffixes: N tasks, M pipelines, S pipeline stages, K kernels per stage (padded with 0 ms).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from torchmm.balance.picoseconds import SimulationError, duration_problem
from torchmm.balance.plan_costs import PlanCosts
from torchmm.costs.sizes import Array
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import Message, StageGraph, StageSpec


@dataclass(frozen=True, eq=False)
class EncoderWork:
    """Work of one encoder in a step.

    Attributes:
        name: Name of the module.
        tasks: (microbatch, sub-microbatch) of each task, sorted.
        devices_MS: First of the `width` devices that run each stage of each pipeline. An LLM rank
            has `devices_per_rank` devices with numbers rank * devices_per_rank + group.
        forward_ms_NSK: Durations of forward kernels.
        backward_ms_NSK: Durations of backward kernels. The number of kernels can differ from
            forward.
        devices_per_rank: Devices per LLM rank, equal for all encoders.
        forward_links_K: Whether each forward kernel communicates. None if no kernel does.
        backward_links_K: Whether each backward kernel communicates. None if no kernel does.
        transfer_ms_NS: Transfer time from the rank of a stage to that of the next stage, and from
            the last stage to the first LLM rank. 0 on the same rank. Gradients have the same time.
            None for 0.
        width: Number of adjacent devices that run the kernels together as a tensor-parallel group.

    Raises:
        ValueError: Shapes do not match, a duration is invalid, or devices are used twice.
    """

    name: str
    tasks: tuple[tuple[int, int], ...]
    devices_MS: NDArray[np.int32]
    forward_ms_NSK: Array
    backward_ms_NSK: Array
    devices_per_rank: int = 1
    forward_links_K: NDArray[np.bool_] | None = None
    backward_links_K: NDArray[np.bool_] | None = None
    transfer_ms_NS: Array | None = None
    width: int = 1

    def __post_init__(self) -> None:
        leading = (len(self.tasks), self.devices_MS.shape[1])
        for name, array in (("forward", self.forward_ms_NSK), ("backward", self.backward_ms_NSK)):
            if array.ndim != 3 or array.shape[:2] != leading:
                raise ValueError(
                    f"{self.name}: {name} kernels of shape {list(array.shape)} for "
                    f"{leading[0]} tasks on {leading[1]} stages; use (tasks, stages, kernels)"
                )
            worst = float(array.max(initial=0.0)), float(array.min(initial=0.0))
            if not np.isfinite(array).all() or any(duration_problem(ms) for ms in worst):
                raise ValueError(f"{self.name}: {name} kernels of {min(worst)} to {max(worst)} ms")
        if list(self.tasks) != sorted(set(self.tasks)):
            raise ValueError(f"{self.name}: tasks must be in order, each once")
        if len(np.unique(self.devices)) < len(self.devices):
            raise ValueError(f"{self.name}: a device has two stages of {self.devices_MS.tolist()}")

    @property
    def devices(self) -> NDArray[np.int32]:
        """Devices of all stages of all pipelines."""
        return (
            np.add.outer(self.devices_MS.flatten(), np.arange(self.width)).astype(np.int32).ravel()
        )

    @property
    def links(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Flags of the kernels that communicate, forward and backward."""
        flags_by_pass = (self.forward_links_K, self.backward_links_K)
        shapes = (self.forward_ms_NSK.shape[2], self.backward_ms_NSK.shape[2])
        return tuple(  # type: ignore[return-value]
            np.zeros(n, bool) if flags is None else flags
            for flags, n in zip(flags_by_pass, shapes, strict=True)
        )

    @property
    def transfer_times_ms_NS(self) -> Array:
        """Transfer times of `transfer_ms_NS`, or zeros."""
        shape = self.forward_ms_NSK.shape[:2]
        return np.zeros(shape) if self.transfer_ms_NS is None else self.transfer_ms_NS

    @property
    def busy_ms(self) -> float:
        """Total duration of all kernels on all devices."""
        return self.width * float(self.forward_ms_NSK.sum() + self.backward_ms_NSK.sum())


def pipeline_stages(graph: StageGraph, module: str) -> list[list[StageSpec]]:
    """Return the stages of an encoder, grouped by pipeline stage.

    Consecutive stages on the same ranks are slices of one pipeline stage. Of mirrors, the first is
    included.

    Raises:
        ValueError: The pipeline returns to a rank.
    """
    stages = [s for s in graph.layout.stages if s.module == module and not s.mirror]
    groups = [list(slices) for _, slices in groupby(stages, key=lambda stage: stage.ranks)]
    ranks = [rank for slices in groups for rank in slices[0].ranks]
    if len(set(ranks)) < len(ranks):
        raise ValueError(
            f"{module}: its stages are on ranks {[list(s.ranks) for s in stages]}; assign "
            "consecutive layers to each rank"
        )
    return groups


def encoder_work(graph: StageGraph, costs: PlanCosts, module: str) -> EncoderWork:
    """Return the work of an encoder with actions as kernels, the granularity of plans.

    Args:
        graph: Tasks of the step. The replicas of tasks are not used.
        costs: Costs of the graph.
        module: Name of the encoder.

    Raises:
        SimulationError: A cost is missing.
        ValueError: Encoder pipelines are not on disjoint devices.
    """
    groups = pipeline_stages(graph, module)
    tasks = [
        (microbatch, sub_microbatch)
        for microbatch in range(graph.microbatches)
        for sub_microbatch in range(graph.task_count(groups[0][0].index, microbatch))
    ]
    slices = max(map(len, groups))
    forward, backward = (np.zeros((len(tasks), len(groups), slices)) for _ in range(2))
    hop = np.zeros((len(tasks), len(groups)))
    problems: list[str] = []
    for position, stages in enumerate(groups):
        for index, stage in enumerate(stages):
            for row, task in enumerate(tasks):
                action = Action(ActionType.F, stage.index, *task)
                forward[row, position, index] = _compute_ms(costs, action, problems)
                if graph.needs_backward(stage.index, task[0]):
                    action = Action(ActionType.B, stage.index, *task)
                    backward[row, position, -len(stages) + index] = _compute_ms(
                        costs, action, problems
                    )
        last = stages[-1].index
        after = graph.layout.destinations[last][0]  # all mirrors receive the same message
        for row, task in enumerate(tasks):
            message = Message(last, after, *task)
            hop[row, position] = costs.transfer_ms.get((message, False), 0.0)
    if problems:
        raise SimulationError(problems)
    devices = np.array([slices[0].ranks for slices in groups], np.int32).T
    backward = backward[:, :, ::-1]  # backward passes start with the last slice
    return EncoderWork(
        module,
        tuple(tasks),
        devices,
        forward,
        backward,
        devices_per_rank=graph.layout.mirror_count,
        width=len(graph.layout.mirror_stages[groups[0][0].index]),
        transfer_ms_NS=hop,
    )


def split_kernels(work: EncoderWork, pieces: int) -> EncoderWork:
    """Split every kernel into equal pieces, for bubbles that are shorter than a kernel."""

    def cut(ms_NSK: Array) -> Array:
        return np.repeat(ms_NSK / pieces, pieces, axis=2)

    forward, backward = (np.repeat(flags, pieces) for flags in work.links)
    return replace(
        work,
        forward_ms_NSK=cut(work.forward_ms_NSK),
        backward_ms_NSK=cut(work.backward_ms_NSK),
        forward_links_K=forward,
        backward_links_K=backward,
    )


def _compute_ms(costs: PlanCosts, action: Action, problems: list[str]) -> float:
    duration_ms = costs.compute_ms.get(action)
    if duration_ms is None:
        problems.append(f"{action} has no duration; compute the costs from the graph of this step")
    return duration_ms or 0.0
