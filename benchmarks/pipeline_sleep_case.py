"""Eight ranks whose layers sleep: what schedules do at a depth that this machine cannot compute.

A forward sleeps for as long as its layers would take, a backward twice as long. Everything else is
real: runtimes, processes, messages over gloo. Both sides choose among candidates that are played
through with the known times; the best few run for real, the fastest stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from documents import load_documents, pack_documents
from harness import Row
from ranks import Comparison, Program, Stopwatch
from stock_pipeline import Split, StockSchedule
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from torchmm.batch import even_ranges
from torchmm.parallel.p2p import P2PChannels
from torchmm.pipelining.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.classic import interleaved_1f1b
from torchmm.pipelining.graph import StageGraph, StageLayout, Task
from torchmm.pipelining.layouts import Cut, ModuleLayers, build_layout, separated_layout
from torchmm.pipelining.lowering import lower_plan
from torchmm.pipelining.partition import balanced_cuts
from torchmm.pipelining.plan import ComputeOrder, PipelinePlan, TensorSpec
from torchmm.pipelining.runtime import PipelineRuntime, channel_pairs
from torchmm.pipelining.separated import separated
from torchmm.pipelining.stage import PipelineStage, StageOutput
from torchmm.pipelining.timeline import uniform_timeline
from torchmm.pipelining.validation import validate_plan

RANKS = 8
TOWER_LAYERS, LLM_LAYERS = 24, 32
TOWER_SHARE = 0.57
"""Of the time, on average: the share of SmolVLM-500M's FLOPs."""
TOKENS, IMAGE_TOKENS, SEED = 2048, 64, 0
ROWS_PER_IMAGE, ROWS, WIDTH = 4, 64, 256
"""Messages are float32 (rows, width): 4 KB per image in the tower, 64 KB in the LLM."""
TRANSFER_S, ACTION_S = 5e-4, 1e-3
"""Assumed when playing through: until a message is there; posting, waiting and switching."""
GOAL = 1.3
FRONT, SPREAD, OURS = "tower in stage 0", "tower cut too", "ours"


@dataclass(frozen=True)
class Setting:
    """How long to measure what."""

    layer_s: float
    """Forward of an LLM layer."""
    microbatches: int
    steps: int
    runs: int
    patience_s: float
    """How long to wait for other programs to end."""
    tried: int
    """Candidates of each side that run for real."""


SETTINGS = {
    "full": Setting(layer_s=5e-3, microbatches=16, steps=3, runs=5, patience_s=1800, tried=3),
    "quick": Setting(layer_s=2e-3, microbatches=8, steps=1, runs=2, patience_s=0, tried=1),
    "tiny": Setting(layer_s=2e-4, microbatches=8, steps=1, runs=1, patience_s=0, tried=1),
}
"""The last is for tests."""


@dataclass(frozen=True)
class Work:
    """Images of every microbatch of every step, and how long layers take."""

    images: list[list[int]]
    layer_s: float
    image_s: float
    """Forward of one image through a tower layer."""

    def forward_s(self, tower: int, llm: int, images: int) -> float:
        """Of a number of layers of both modules."""
        return tower * images * self.image_s + llm * self.layer_s


def load_work(setting: Setting) -> Work:
    """The first steps of a run over the real documents."""
    packs = pack_documents(load_documents(), TOKENS, IMAGE_TOKENS, seed=SEED)
    counts = [sum(sample.images for sample in pack) for pack in packs]
    per_tower = TOWER_SHARE / (1 - TOWER_SHARE) * LLM_LAYERS * setting.layer_s
    size = setting.microbatches
    steps = [counts[i * size : (i + 1) * size] for i in range(setting.steps)]
    return Work(steps, setting.layer_s, per_tower / TOWER_LAYERS / mean(counts))


class Sleep(torch.autograd.Function):
    """Takes time instead of computing; gradients are zero."""

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
    """Has a weight, so that there is something to train."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))


class ChainSleeper(Sleeper):
    """A stock stage: layers of the tower and of the LLM, of the current step's microbatches."""

    def __init__(self, program: StockSleep, start: int, stop: int) -> None:
        super().__init__()
        self.program = [program]  # a list, which nn.Module does not look into
        self.tower = min(stop, TOWER_LAYERS) - min(start, TOWER_LAYERS)
        self.llm = stop - start - self.tower
        self.shape = program.shape(stop)

    def forward(self, x: Tensor, *, index: Tensor) -> Tensor:
        images = self.program[0].images[int(index)]
        seconds = self.program[0].work.forward_s(self.tower, self.llm, images)
        return Sleep.apply(x.float(), self.weight, self.shape, seconds)


class StockSleep:
    """Steps under torch's schedules."""

    def __init__(self, name: str, work: Work, split: Split) -> None:
        self.name, self.work, self.split = name, work, split
        self.images: list[int] = []
        self.most = max(count for step in work.images for count in step)
        self.schedule = StockSchedule(
            lambda start, stop: ChainSleeper(self, start, stop),
            split,
            self.shape,
            len(work.images[0]),
            lambda: 1.0,
        )

    def shape(self, start: int) -> tuple[int, ...]:
        """Of what the stage with layers from `start` on receives; tower messages are padded."""
        if start == TOWER_LAYERS + LLM_LAYERS:
            return (1,)
        return (self.most * ROWS_PER_IMAGE if start < TOWER_LAYERS else ROWS), WIDTH

    def step(self, index: int) -> float:
        self.images = self.work.images[index]
        return self.schedule.run()


@dataclass(frozen=True)
class Choice:
    """What a recipe can set for separated modules."""

    tower_segments: int
    llm_segments: int
    images: int
    """Per sub-microbatch, at most."""

    def __str__(self) -> str:
        return (
            f"segments {self.tower_segments} (tower) and {self.llm_segments} (LLM), "
            f"{self.images} images per sub-microbatch"
        )

    def graph(self, work: Work, index: int) -> StageGraph:
        """Tasks of a step."""
        segments = {"vision": self.tower_segments, "llm": self.llm_segments}
        layout = separated_layout(chain_modules(work), RANKS, segments)
        images = work.images[index]
        return StageGraph(
            layout, len(images), {"vision": tuple(ceil(i / self.images) for i in images)}
        )


class SleepStage(PipelineStage):
    """One of our stages; a microbatch is its number of images."""

    def __init__(self, work: Work, tower: int, llm: int) -> None:
        super().__init__(Sleeper())
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
    """Images of a task: its share of the microbatch's."""
    if not graph.layout.has_parts(task.stage):
        return 0
    return len(even_ranges(images, graph.parts(task.stage, task.microbatch))[task.sub_microbatch])


def message_rows(task: Task, graph: StageGraph, images: int) -> int:
    """Of a task's output."""
    own = images_of(task, graph, images)
    return own * ROWS_PER_IMAGE if graph.layout.has_parts(task.stage) else ROWS


class OurSleep:
    """Steps through our runtime. Plans are made before: in training, beside the step before."""

    def __init__(self, name: str, work: Work, choice: Choice) -> None:
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
    """(of the tower, of the LLM)"""
    return (layers, 0) if module == "vision" else (0, layers)


def durations(graph: StageGraph, work: Work, index: int) -> Callable[[Action], float]:
    """Seconds of the actions of a step."""

    def seconds(action: Action) -> float:
        stage = graph.layout.stages[action.stage]
        images = work.images[index][action.microbatch]
        own = images_of(Task(*action[1:4]), graph, images)
        forward_s = work.forward_s(*layers_of(stage.module, stage.stop - stage.start), own)
        return ACTION_S + forward_s * (1 if action.type is ActionType.F else 2)

    return seconds


def chain_modules(work: Work) -> list[ModuleLayers]:
    """Costs of an average microbatch."""
    images = mean(count for step in work.images for count in step)
    return [
        ModuleLayers("vision", "encoder", (images * work.image_s,) * TOWER_LAYERS, True),
        ModuleLayers("llm", "llm", (work.layer_s,) * LLM_LAYERS),
    ]


def chain_layout(work: Work, split: Split) -> StageLayout:
    """The stages of `StockSleep`, for playing it through."""
    cuts: dict[str, list[Cut]] = {"vision": [], "llm": []}
    for i, (start, stop) in enumerate(pairwise([sum(split[:i]) for i in range(len(split) + 1)])):
        tower = min(stop, TOWER_LAYERS) - min(start, TOWER_LAYERS)
        for name, layers in (("vision", tower), ("llm", stop - start - tower)):
            if layers:
                cuts[name].append(Cut(layers, (i % RANKS,), i // RANKS, i))
    return build_layout(chain_modules(work), cuts)


def makespan_s(
    work: Work, graph_of: Callable[[int], StageGraph], order: Callable[..., ComputeOrder]
) -> float:
    """Of all steps, played through."""
    total = 0.0
    for index in range(len(work.images)):
        graph = graph_of(index)
        seconds = durations(graph, work, index)
        records = uniform_timeline(order(graph, seconds), graph, seconds, TRANSFER_S)
        total += max(record.end_ms for record in records)
    return total


def stock_s(work: Work, split: Split) -> float:
    """Makespan of a stock schedule."""
    layout = chain_layout(work, split)

    def graph(index: int) -> StageGraph:
        images = work.images[index]
        return StageGraph(layout, len(images), {"vision": tuple(min(i, 1) for i in images)})

    return makespan_s(work, graph, lambda graph, seconds: interleaved_1f1b(graph))


def ours_s(work: Work, choice: Choice) -> float:
    """Makespan of separated segments."""
    return makespan_s(work, lambda index: choice.graph(work, index), separated)


def splits(work: Work, stages: int, front: bool) -> Iterator[Split]:
    """Sensible splits of the chain: evened out, for several assumptions of what the tower takes."""
    if front:
        for beside in range(LLM_LAYERS // 4):
            rest = LLM_LAYERS - beside
            if rest >= stages - 1:
                yield TOWER_LAYERS + beside, *balanced_cuts([1.0] * rest, stages - 1)
        return
    tower, llm = chain_modules(work)
    found = set()
    for percent in range(50, 155, 10):
        costs = [cost * percent / 100 for cost in tower.costs]
        found.add(tuple(balanced_cuts([*costs, *llm.costs], stages)))
    yield from sorted(found)


def run_rank(setting: Setting) -> dict[str, Any]:
    """Everything one rank does; what rank 0 reports."""
    work, watch = load_work(setting), Stopwatch(setting.patience_s)
    choices = [
        Choice(tower, llm, images)
        for tower in (1, 2, 3)
        for llm in (2, 3, 4)
        for images in (2, 4, 8)
    ]
    kept = sorted(choices, key=lambda choice: ours_s(work, choice))[: setting.tried]
    programs: list[Program] = [watch.fastest([OurSleep(OURS, work, choice) for choice in kept])]
    for name, front in ((FRONT, True), (SPREAD, False)):
        every = [s for n in (1, 2, 3) for s in splits(work, n * RANKS, front)]
        tried = sorted(every, key=lambda split: stock_s(work, split))[: setting.tried]
        programs.append(watch.fastest([StockSleep(name, work, split) for split in tried]))
    return {
        "images": work.images,
        "choice": str(programs[0].choice),
        "splits": {program.name: program.split for program in programs[1:]},
        "comparison": watch.compare(programs, len(work.images), setting.runs),
    }


def rows(setting: Setting, found: dict[str, Any]) -> list[Row]:
    """The table's lines."""
    comparison = found["comparison"]
    assert isinstance(comparison, Comparison)
    case = (
        f"{RANKS} sleeping ranks, {TOWER_LAYERS} + {LLM_LAYERS} layers, "
        f"{setting.microbatches} microbatches"
    )
    made = []
    for name in (FRONT, SPREAD):
        idle = comparison.idle_share(OURS), comparison.idle_share(name)
        times = (comparison.wall_s(n) for n in (OURS, name))
        ratio = comparison.speed_ratio(OURS, name)
        made += [
            Row(case, f"speed ratio, {name}", "x", ratio, 1.0, goal=GOAL),
            Row(case, f"step time, {name}", "s", *times, better="lower"),
            Row(case, f"idle share, {name}", "share", *idle, better="lower"),
        ]
    return made
