"""Pipeline stages that sleep instead of computing, for PyTorch schedules and for the runtime.

A forward pass sleeps for the time of its layers, and a backward pass sleeps twice as long.
Runtimes, processes and messages over gloo are real.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.fsdp import fully_shard

from support.models.stock_pipeline import Split, StockSchedule
from torchmm.common.batch import split_evenly
from torchmm.parallel.exchange import ExchangeCounts, exchange
from torchmm.parallel.p2p import P2PChannels
from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, Task
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import PipelinePlan, TensorSpec
from torchmm.pipelining.run.runtime import PipelineRuntime, channel_pairs
from torchmm.pipelining.run.stage import PipelineStage, StageOutput
from torchmm.pipelining.schedules.layouts import ModuleLayers, separated_layout
from torchmm.pipelining.schedules.separated import separated

RANKS = 8
TOWER_LAYERS, LLM_LAYERS = 24, 32
ROWS_PER_IMAGE, ROWS, WIDTH = 4, 64, 256
"""Shape (rows, width) of float32 messages: 4 KB per image in the encoder, 64 KB in the LLM."""
ACTION_S = 1e-3
"""Assumed overhead of an action in seconds when schedules are planned."""


@dataclass(frozen=True)
class SleepWork:
    """Image counts (step, microbatch) and layer times of a benchmark case."""

    images: list[list[int]]
    layer_s: float
    image_s: float
    """Forward time of an encoder layer for one image, in seconds."""
    frozen: bool = False
    """Whether the encoder is frozen, so that it has no backward pass."""

    def forward_s(self, tower: int, llm: int, images: int) -> float:
        """Return the forward time of `tower` encoder layers and `llm` LLM layers in seconds."""
        return tower * images * self.image_s + llm * self.layer_s


class Sleep(torch.autograd.Function):
    """Autograd function that sleeps instead of computing. Gradients are zero."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, weight: Tensor, shape: tuple[int, ...], seconds: float
    ) -> Tensor:
        ctx.input_shape, ctx.seconds = x.shape, seconds  # type: ignore[attr-defined]
        time.sleep(seconds)
        return weight.new_zeros(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0].new_zeros(ctx.input_shape), gradients[0].new_zeros(1), None, None


class Sleeper(nn.Module):
    """Module with one weight, so that it has a trainable parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))


class ShardedSleeper(nn.Module):
    """Encoder and LLM layers sharded with FSDP2, so that ranks synchronize in every layer.

    Args:
        layers: Number of layers of each module.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tower = nn.ModuleList(nn.Linear(WIDTH, RANKS, bias=False) for _ in range(layers))
        self.llm = nn.ModuleList(nn.Linear(WIDTH, RANKS, bias=False) for _ in range(layers))
        for module in (*self.tower, *self.llm):
            module.forward = partial(self._sleep, module)  # type: ignore[method-assign]
            fully_shard(module)
        fully_shard(self)

    @staticmethod
    def _sleep(module: nn.Linear, x: Tensor, seconds: float) -> Tensor:
        return Sleep.apply(x, module.weight.sum().reshape(1), (1, WIDTH), seconds)

    def forward(self, tower_s: float, llm_s: float, images: ExchangeCounts | None = None) -> Tensor:
        """Run a microbatch.

        Args:
            tower_s: Forward time of the encoder in seconds.
            llm_s: Forward time of the LLM in seconds.
            images: Number of images that this rank encodes for each rank, and that each rank
                encodes for this rank. If None, every rank encodes its local images.
        """
        x = torch.zeros(1, WIDTH)
        for module in self.tower:
            x = module(x, tower_s / len(self.tower))
        if images is not None:
            rows = x.expand(sum(images.sent) * ROWS_PER_IMAGE, WIDTH)
            counts = ExchangeCounts(*([n * ROWS_PER_IMAGE for n in counts] for counts in images))
            x = exchange(rows, counts, dist.group.WORLD).sum(0, keepdim=True)
        for module in self.llm:
            x = module(x, llm_s / len(self.llm))
        return x.sum()


class ChainSleeper(Sleeper):
    """Stage of a PyTorch schedule with encoder and LLM layers."""

    def __init__(self, program: StockSleep, start: int, stop: int) -> None:
        super().__init__()
        self.program = [program]  # a list, so that nn.Module does not register the program
        self.tower = min(stop, TOWER_LAYERS) - min(start, TOWER_LAYERS)
        self.llm = stop - start - self.tower
        self.shape = program.shape(stop)

    def forward(self, x: Tensor, *, index: Tensor) -> Tensor:
        images = self.program[0].images[int(index)]
        seconds = self.program[0].work.forward_s(self.tower, self.llm, images)
        return Sleep.apply(x.float(), self.weight, self.shape, seconds)


class StockSleep:
    """Program that runs steps under a PyTorch schedule."""

    def __init__(self, name: str, work: SleepWork, split: Split) -> None:
        self.name, self.work, self.split = name, work, split
        self.images: list[int] = []
        self.max_images = max(count for step in work.images for count in step)
        self.schedule = StockSchedule(
            lambda start, stop: ChainSleeper(self, start, stop),
            split,
            self.shape,
            len(work.images[0]),
            lambda: 1.0,
        )

    def shape(self, start: int) -> tuple[int, ...]:
        """Return the input shape of the stage whose first layer is `start`.

        Encoder messages are padded to the maximum number of images.
        """
        if start == TOWER_LAYERS + LLM_LAYERS:
            return (1,)
        return (self.max_images * ROWS_PER_IMAGE if start < TOWER_LAYERS else ROWS), WIDTH

    def step(self, index: int) -> float:
        self.images = self.work.images[index]
        return self.schedule.run()


@dataclass(frozen=True)
class SleepChoice:
    """Recipe settings of separated modules."""

    tower_segments: int
    llm_segments: int
    images: int
    """Maximum number of images per sub-microbatch."""

    def __str__(self) -> str:
        return (
            f"segments {self.tower_segments} (tower) and {self.llm_segments} (LLM), "
            f"{self.images} images per sub-microbatch"
        )

    def graph(self, work: SleepWork, index: int) -> StageGraph:
        """Return the task graph of a step."""
        segments = {"vision": self.tower_segments, "llm": self.llm_segments}
        layout = separated_layout(chain_modules(work), RANKS, segments)
        images = work.images[index]
        return StageGraph(
            layout, len(images), {"vision": tuple(ceil(i / self.images) for i in images)}
        )


class SleepStage(PipelineStage):
    """Stage of the torchmm runtime. A microbatch is represented by its image count."""

    def __init__(self, work: SleepWork, tower: int, llm: int) -> None:
        super().__init__(Sleeper().requires_grad_(not (tower and work.frozen)))
        self.work, self.tower, self.llm = work, tower, llm

    def forward(
        self, task: Task, inputs: Sequence[tuple[Tensor, ...]], microbatch: Any, graph: StageGraph
    ) -> StageOutput:
        images = images_of(task, graph, microbatch)
        seconds = self.work.forward_s(self.tower, self.llm, images)
        weight = self.module.weight
        x = torch.cat([x for (x,) in inputs]) if inputs else torch.zeros(1, WIDTH)
        messages = graph.outgoing(task)
        shape = message_rows(task, graph, microbatch), WIDTH
        output = Sleep.apply(x, weight, shape, seconds)
        return StageOutput([(output,)] * len(messages), None if messages else output.sum())


def images_of(task: Task, graph: StageGraph, images: int) -> int:
    """Return the image count of a task, whose sub-microbatch has a part of `images`."""
    if not graph.layout.has_sub_microbatches(task.stage):
        return 0
    return len(
        split_evenly(images, graph.task_count(task.stage, task.microbatch))[task.sub_microbatch]
    )


def message_rows(task: Task, graph: StageGraph, images: int) -> int:
    """Return the number of rows of the output of a task."""
    task_images = images_of(task, graph, images)
    return task_images * ROWS_PER_IMAGE if graph.layout.has_sub_microbatches(task.stage) else ROWS


class OurSleep:
    """Program that runs steps with the torchmm runtime. All plans are made in advance."""

    def __init__(self, name: str, work: SleepWork, choice: SleepChoice) -> None:
        self.name, self.work, self.choice = name, work, choice
        self.plans = [self._plan(index) for index in range(len(work.images))]
        layout = self.plans[0].graph.layout
        rank = dist.get_rank()
        stages = {
            s.index: SleepStage(work, *layers_of(s.module, s.stop - s.start))
            for s in layout.stages
            if rank in s.ranks
        }
        channels = P2PChannels(torch.device("cpu"), range(RANKS), 120)
        channels.warm_up(channel_pairs(layout))
        self.runtime = PipelineRuntime(rank, stages, channels)

    def _plan(self, index: int) -> PipelinePlan:
        graph = self.choice.graph(self.work, index)
        images = self.work.images[index]
        specs = {
            message: (
                TensorSpec(
                    (message_rows(task, graph, images[task.microbatch]), WIDTH), torch.float32
                ),
            )
            for task in graph.tasks()
            for message in graph.outgoing(task)
        }
        order = separated(graph, durations(graph, self.work, index))
        plan = lower_plan(order, graph, specs)
        validate_plan(plan).raise_for_problems()
        return plan

    def step(self, index: int) -> float:
        result = self.runtime.step(self.plans[index], self.work.images[index], record=True)
        done = (r for r in result.records or () if r.action.type in COMPUTE)
        return sum(r.end_ms - r.start_ms for r in done) / 1e3


def layers_of(module: str, layers: int) -> tuple[int, int]:
    """Return (encoder layers, LLM layers) for a number of layers of one module."""
    return (layers, 0) if module == "vision" else (0, layers)


def durations(graph: StageGraph, work: SleepWork, index: int) -> Callable[[Action], float]:
    """Return a function that maps the actions of a step to their durations in seconds."""

    def seconds(action: Action) -> float:
        stage = graph.layout.stages[action.stage]
        images = work.images[index][action.microbatch]
        task_images = images_of(Task(*action[1:4]), graph, images)
        forward_s = work.forward_s(*layers_of(stage.module, stage.stop - stage.start), task_images)
        return ACTION_S + forward_s * (1 if action.type is ActionType.F else 2)

    return seconds


def chain_modules(work: SleepWork) -> list[ModuleLayers]:
    """Return the modules with the layer costs of an average microbatch."""
    images = mean(count for step in work.images for count in step)
    images /= 3 if work.frozen else 1  # frozen: only the forward pass remains of 1 + 2 units
    trained = not work.frozen
    return [
        ModuleLayers(
            "vision",
            "encoder",
            (images * work.image_s,) * TOWER_LAYERS,
            True,
            trainable=(trained,) * TOWER_LAYERS,
            embedding_trainable=trained,
            head_trainable=trained,
        ),
        ModuleLayers("llm", "llm", (work.layer_s,) * LLM_LAYERS),
    ]
