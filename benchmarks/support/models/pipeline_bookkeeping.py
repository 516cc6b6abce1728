"""Runtime overhead of a pipeline schedule in torchmm and in PyTorch, with the same schedule.

Stages are linear layers so small that they take almost no time. On one rank nothing is sent, and a
plain loop of the same forwards and backwards is subtracted from both. On two ranks a step's time
is mostly that of sending.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from support.harness import Row
from support.ranks import run_ranks
from torchmm.parallel.p2p import P2PChannels
from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, StageSpec, Task
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import PipelinePlan, TensorSpec
from torchmm.pipelining.run.runtime import PipelineRuntime, channel_pairs
from torchmm.pipelining.run.stage import PipelineStage, StageOutput

STAGES, MICROBATCHES, WIDTH = 4, 16, 16
REPETITIONS = {"full": 300, "quick": 30, "tiny": 2}
GOAL_US, GOAL_SHARE = 10.0, 0.25
CPU = torch.device("cpu")
TORCH_KINDS = {"F": ActionType.F, "B": ActionType.B}


class Layer(PipelineStage):
    """Stage with one linear layer. The last stage sums its output."""

    def forward(
        self, task: Task, inputs: Sequence[tuple[Tensor, ...]], microbatch: Any, graph: StageGraph
    ) -> StageOutput:
        x = self.module(inputs[0][0] if inputs else microbatch)
        messages = graph.outgoing(task)
        return StageOutput([(x,)] * len(messages), None if messages else x.sum())


class Sides(NamedTuple):
    """Three programs that run the same forward and backward passes of this rank."""

    ours: Callable[[], object]
    torch: Callable[[], object]
    plain: Callable[[], object] | None
    """Program without a pipeline runtime, for one rank only."""
    tasks: int
    """Number of compute actions of this rank."""


def build_sides() -> Sides:
    """Return the programs of this rank. PyTorch determines the schedule."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(STAGES)]
    microbatches = list(torch.randn(MICROBATCHES, 1, WIDTH).unbind())
    example = torch.empty(1, WIDTH, requires_grad=True)
    torch_stages = [
        TorchStage(layers[i], i, STAGES, CPU, input_args=example, output_args=example)
        for i in range(rank, STAGES, ranks)
    ]
    schedule = ScheduleInterleaved1F1B(
        torch_stages, MICROBATCHES, lambda output, target: output.sum(), scale_grads=False
    )
    order = [
        [_translate(action) for action in schedule.pipeline_order[r] if action is not None]
        for r in range(ranks)
    ]
    batch = torch.cat(microbatches)
    arguments = (batch,) if rank == 0 else ()
    target = batch if rank == ranks - 1 else None

    plan = _plan(order, ranks)
    channels = P2PChannels(CPU, range(ranks), 60) if ranks > 1 else None
    if channels is not None:
        channels.warm_up(channel_pairs(plan.graph.layout))
    stages = {i: Layer(layers[i]) for i in range(rank, STAGES, ranks)}
    runtime = PipelineRuntime(rank, stages, channels, CPU)
    tasks = [action for action in order[rank] if action.type in COMPUTE]
    return Sides(
        lambda: runtime.step(plan, microbatches),
        lambda: schedule.step(*arguments, target=target, return_outputs=False),
        (lambda: _plain(tasks, layers, microbatches)) if ranks == 1 else None,
        len(tasks),
    )


def _translate(action: Any) -> Action:
    """Convert a PyTorch action to a torchmm action."""
    kind = TORCH_KINDS[action.computation_type.value]
    return Action(kind, action.stage_index, action.microbatch_index)


def _plan(order: Sequence[Sequence[Action]], ranks: int) -> PipelinePlan:
    stages = tuple(StageSpec(i, "layers", i, i + 1, (i % ranks,)) for i in range(STAGES))
    layout = StageLayout(stages, tuple((i, i + 1) for i in range(STAGES - 1)))
    graph = StageGraph(layout, MICROBATCHES)
    spec = (TensorSpec((1, WIDTH), torch.float32),)
    specs = {message: spec for task in graph.tasks() for message in graph.incoming(task)}
    plan = lower_plan(tuple(map(tuple, order)), graph, specs)
    validate_plan(plan).raise_for_problems()
    return plan


def _plain(
    tasks: Sequence[Action], layers: Sequence[nn.Module], microbatches: Sequence[Tensor]
) -> None:
    kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for kind, stage, index, *_ in tasks:
        if kind is ActionType.F:
            x = microbatches[index]
            if stage:
                x = kept[stage - 1, index][1].detach().requires_grad_()
            output = layers[stage](x)
            kept[stage, index] = x, output.sum() if stage == STAGES - 1 else output
        else:
            x, output = kept.pop((stage, index))
            gradient = None if stage == STAGES - 1 else kept.pop((-1, index))[0]
            torch.autograd.backward(output, gradient)
            if stage:
                kept[-1, index] = x.grad, x


def _seconds(program: Callable[[], object]) -> float:
    if dist.get_world_size() > 1:
        dist.barrier()
    begin_s = time.perf_counter()
    program()
    return time.perf_counter() - begin_s


def time_sides(repetitions: int) -> tuple[int, list[tuple[float, ...]]]:
    """Return the number of tasks, and the seconds of torchmm, torch and plain by repetition."""
    *programs, tasks = build_sides()
    programs = [program for program in programs if program is not None]
    times = []
    for turn in range(repetitions + 5):
        order = list(range(len(programs)))
        if turn % 2:
            order.reverse()
        seconds = {i: _seconds(programs[i]) for i in order}
        if turn >= 5:  # warm
            times.append(tuple(seconds[i] for i in range(len(programs))))
    return tasks, times


def measure(repetitions: int) -> list[Row]:
    """Return the rows of the results."""
    tasks, alone = run_ranks(time_sides, 1, repetitions)
    case = f"1 rank, {STAGES} stages, {MICROBATCHES} microbatches"
    ours = median(a - plain for a, _, plain in alone) / tasks * 1e6
    theirs = median(b - plain for _, b, plain in alone) / tasks * 1e6
    _, pair = run_ranks(time_sides, 2, repetitions)
    step_ms = [median(times) * 1e3 for times in zip(*pair, strict=True)]
    name = "overhead per compute action"
    return [
        Row(case, name, "us", ours, theirs, goal=GOAL_US, better="lower"),
        Row(
            case, f"{name} / torch's", "fraction", ours / theirs, 1, goal=GOAL_SHARE, better="lower"
        ),
        Row(case.replace("1 rank", "2 ranks", 1), "step time", "ms", *step_ms, better="lower"),
    ]
