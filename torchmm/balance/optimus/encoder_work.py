"""What encoders have to do in a step, as kernels on the devices of an LLM's pipeline.

An encoder with a parallel plan of its own (Optimus §4.1) has M pipelines where the LLM has one, on
the same devices. A task, some of a microbatch's images, goes through one of them, forward and
backward. What a stage does for a task is a chain of *kernels*: real ones, or groups as large as
layers or whole stages, which is how coarse the schedule will be. Tasks need not be alike: every one
has its own durations, as microbatches have different numbers of images.

Shape suffixes: N tasks, M pipelines, S pipeline stages, K kernels per stage (0 ms where a stage has
fewer).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from torchmm.balance.picoseconds import SimulationError, duration_problem
from torchmm.balance.step_costs import PlanCosts
from torchmm.costs.sizes import Array
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import Message, StageGraph, StageSpec


@dataclass(frozen=True, eq=False)
class EncoderWork:
    """One encoder's share of a step.

    Attributes:
        name: of the module.
        tasks: (microbatch, sub-microbatch) of each, by microbatch.
        devices_MS: who runs each stage of each pipeline, the first of `width`. An LLM rank is
            `tensor_groups` devices, numbered rank * tensor_groups + group, each with that share of
            what tensor parallelism splits.
        tensor_groups: devices of an LLM rank; of all encoders the same.
        forward_ms_NSK, backward_ms_NSK: durations of kernels; numbers of kernels may differ.
        forward_links_K, backward_links_K: which of them communicate; None: none does.
        hop_ms_NS: from a stage's rank to that of the next, from the last to the LLM's first; 0
            where that is the same rank. Gradients take as long. None: no time.
        width: devices that follow each other and run the encoder's kernels together, as one
            tensor-parallel group.

    Raises:
        ValueError: shapes do not fit each other, a duration is none, or devices are used twice.
    """

    name: str
    tasks: tuple[tuple[int, int], ...]
    devices_MS: NDArray[np.int32]
    forward_ms_NSK: Array
    backward_ms_NSK: Array
    tensor_groups: int = 1
    forward_links_K: NDArray[np.bool_] | None = None
    backward_links_K: NDArray[np.bool_] | None = None
    hop_ms_NS: Array | None = None
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
        """Those of all stages of all pipelines."""
        return (
            np.add.outer(self.devices_MS.flatten(), np.arange(self.width)).astype(np.int32).ravel()
        )

    @property
    def links(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which kernels communicate, forward and backward."""
        given = (self.forward_links_K, self.backward_links_K)
        shapes = (self.forward_ms_NSK.shape[2], self.backward_ms_NSK.shape[2])
        return tuple(  # type: ignore[return-value]
            np.zeros(n, bool) if flags is None else flags
            for flags, n in zip(given, shapes, strict=True)
        )

    @property
    def hops_ms_NS(self) -> Array:
        """`hop_ms_NS`, zeros where not given."""
        shape = self.forward_ms_NSK.shape[:2]
        return np.zeros(shape) if self.hop_ms_NS is None else self.hop_ms_NS

    @property
    def busy_ms(self) -> float:
        """All kernels together, on all devices."""
        return self.width * float(self.forward_ms_NSK.sum() + self.backward_ms_NSK.sum())


def pipeline_stages(graph: StageGraph, module: str) -> list[list[StageSpec]]:
    """An encoder's stages by pipeline stage: consecutive ones on the same ranks are slices of one;
    of mirrors the first.

    Raises:
        ValueError: its pipeline comes back to a rank.
    """
    own = [s for s in graph.layout.stages if s.module == module and not s.mirror]
    groups = [list(slices) for _, slices in groupby(own, key=lambda stage: stage.ranks)]
    ranks = [rank for slices in groups for rank in slices[0].ranks]
    if len(set(ranks)) < len(ranks):
        raise ValueError(
            f"{module}: its stages are on ranks {[list(s.ranks) for s in own]}; assign "
            "consecutive layers to each rank"
        )
    return groups


def encoder_work(graph: StageGraph, costs: PlanCosts, module: str) -> EncoderWork:
    """An encoder's work with its actions as kernels: what a plan of the graph can say.

    Args:
        graph: of the step; which replica runs which task is left open.
        costs: of the graph.

    Raises:
        SimulationError: a cost is missing.
        ValueError: the layout is none of pipelines on devices of their own.
    """
    groups = pipeline_stages(graph, module)
    tasks = [
        (microbatch, sub_microbatch)
        for microbatch in range(graph.microbatches)
        for sub_microbatch in range(graph.parts(groups[0][0].index, microbatch))
    ]
    slices = max(map(len, groups))
    forward, backward = (np.zeros((len(tasks), len(groups), slices)) for _ in range(2))
    hop = np.zeros((len(tasks), len(groups)))
    problems: list[str] = []
    for position, stages in enumerate(groups):
        for index, stage in enumerate(stages):
            for row, task in enumerate(tasks):
                action = Action(ActionType.F, stage.index, *task)
                forward[row, position, index] = _cost(costs, action, problems)
                if graph.needs_backward(stage.index, task[0]):
                    action = Action(ActionType.B, stage.index, *task)
                    backward[row, position, -len(stages) + index] = _cost(costs, action, problems)
        last = stages[-1].index
        after = graph.layout.destinations[last][0]  # mirrors are handed the same
        for row, task in enumerate(tasks):
            message = Message(last, after, *task)
            hop[row, position] = costs.transfer_ms.get((message, False), 0.0)
    if problems:
        raise SimulationError(problems)
    devices = np.array([slices[0].ranks for slices in groups], np.int32).T
    backward = backward[:, :, ::-1]  # starts with the last slice
    return EncoderWork(
        module,
        tuple(tasks),
        devices,
        forward,
        backward,
        tensor_groups=graph.layout.mirrors,
        width=len(graph.layout.mirrored[groups[0][0].index]),
        hop_ms_NS=hop,
    )


def in_pieces(work: EncoderWork, pieces: int) -> EncoderWork:
    """The work with every kernel cut into equal pieces, for bubbles that are shorter than it."""

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


def _cost(costs: PlanCosts, action: Action, problems: list[str]) -> float:
    found = costs.compute_ms.get(action)
    if found is None:
        problems.append(f"{action} has no duration; compute the costs from the graph of this step")
    return found or 0.0
