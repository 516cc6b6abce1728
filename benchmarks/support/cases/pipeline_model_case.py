"""Real wall clock on two ranks: torch's schedules against separated segments with sub-microbatches.

Both sides run the same weights on the same microbatches in the same processes. What each side may
choose, it chooses the same way: all candidates are simulated with the layers' measured speed,
the best few of each kind run for real, the fastest stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, islice, pairwise
from math import ceil
from typing import Any

import torch
import torch.distributed as dist

from support.harness import Row
from support.models.pipeline_model import Size, load_steps, stages_of_rank
from support.models.stock_pipeline import Split, StockProgram
from support.ranks import Comparison, Program, Stopwatch
from torchmm.balance.online_calibration import ActionKind
from torchmm.common.batch import Microbatch
from torchmm.common.layers import ModuleDescription
from torchmm.costs.flops import module_layers, task_durations
from torchmm.models.multimodal import MultimodalModel
from torchmm.parallel.mesh import ParallelMesh, build_mesh
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, StageLayout
from torchmm.pipelining.plan.plan import ComputeOrder, PipelinePlan
from torchmm.pipelining.schedules.classic import interleaved_1f1b
from torchmm.pipelining.schedules.layouts import ModuleLayers, StageSplit, build_layout
from torchmm.pipelining.schedules.separated import separated
from torchmm.pipelining.view.timeline import simulate_order
from torchmm.planning.step import plan_layout
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.training.pipeline import Pipeline

RANKS = 2
GOAL, TOLERANCE = 1.15, 1e-5
QUIET = 0.05
"""Fraction of CPU time that other programs may use. Ranks need all of it."""
ACTION_S = 2e-3
"""Assumed overhead of a simulated action in seconds, mostly for messages."""
FRONT, SPREAD, OURS = "encoder in stage 0", "single pipeline", "torchmm"


@dataclass(frozen=True)
class Setting:
    """Sizes and extent of the measurement."""

    size: Size
    microbatches: int = 8
    steps: int = 2
    runs: int = 5
    patience_s: float = 1800
    """Time limit in seconds for waiting until other programs finish."""
    tried: int = 2
    """Number of measured candidates per type."""
    turns: int = 2
    """Number of runs per candidate."""
    images: tuple[int, ...] = (2, 4, 8)
    """Candidate numbers of images per sub-microbatch."""


SETTINGS = {
    "full": [Setting(Size(12, 32, 96, 96)), Setting(Size(12, 30, 96, 64))],
    "quick": [
        Setting(
            Size(4, 10, 96, 96), microbatches=6, steps=1, runs=2, patience_s=0, tried=1, turns=1,
            images=(4,),
        )
    ],
    "tiny": [
        Setting(
            Size(2, 2, 32, 32), microbatches=4, steps=1, runs=1, patience_s=0, tried=1, turns=1,
            images=(4,),
        )
    ],
}  # fmt: skip
"""Proportions of SmolVLM-500M and SmolVLM-256M, a third of the layers of the former, and tests."""
PLAYED = 200
"""Number of simulated splits per type, starting with the most even splits."""


@dataclass(frozen=True)
class ProgramChoice:
    """Recipe settings of separated modules."""

    tower_segments: int
    llm_segments: int
    images: int
    """Maximum number of images per sub-microbatch."""

    def config(self) -> ParallelConfig:
        return ParallelConfig.model_validate(
            {
                "pipeline": RANKS,
                "schedule": "separated",
                "virtual_stages": self.llm_segments,
                "vision": {
                    "segments": self.tower_segments,
                    "sub_microbatch_images": self.images,
                },
            }
        )

    def parts(self, images: int) -> int:
        """Return the number of sub-microbatches of a microbatch."""
        return ceil(images / self.images)

    def __str__(self) -> str:
        return (
            f"segments {self.tower_segments} (tower) and {self.llm_segments} (LLM), "
            f"{self.images} images per sub-microbatch"
        )


class OurProgram:
    """Program that plans and runs steps with `Pipeline`, as in the trainer."""

    def __init__(
        self,
        name: str,
        model: MultimodalModel,
        steps: Sequence[Sequence[Microbatch]],
        choice: ProgramChoice,
        mesh: ParallelMesh,
    ) -> None:
        self.name, self.choice = name, choice
        self.model, self.steps = model, steps
        config = choice.config()
        descriptions = [module.describe() for module in model.modality_modules()]
        layout = plan_layout(config, descriptions, [m.meta for s in steps for m in s])
        stages = stages_of_rank(model, layout, mesh.plan_rank)
        self.pipeline = Pipeline(model, stages, layout, descriptions, config, mesh, torch.float32)
        self.busy_s: dict[ActionKind, float] = {}
        """Maps (module, action type) to the busy seconds of the last step on this rank."""

    def plan(self, index: int) -> PipelinePlan:
        """Return the plan of a step."""
        return self.pipeline.plan_training(self.steps[index])

    def step(self, index: int) -> float:
        microbatches = self.steps[index]
        self.model.zero_grad()
        targets = sum(m.target_count for m in microbatches)
        plan = self.plan(index)
        result = self.pipeline.run(plan, microbatches, loss_scale=1 / targets)
        stages = plan.graph.layout.stages
        self.busy_s = {}
        for record in result.records or ():
            if record.action.type in COMPUTE:
                kind = stages[record.action.stage].module, record.action.type
                took_s = (record.end_ms - record.start_ms) / 1e3
                self.busy_s[kind] = self.busy_s.get(kind, 0.0) + took_s
        return sum(self.busy_s.values())


class Costs:
    """Task durations in seconds, from FLOPs and measured speeds as in the trainer.

    Speeds are measured for forward and backward passes of each module.

    Args:
        descriptions: Modules of the model.
        programs: One program per sub-microbatch size, whose speed is measured.
        watch: Timer of the programs.
    """

    def __init__(
        self,
        descriptions: Sequence[ModuleDescription],
        programs: Sequence[OurProgram],
        watch: Stopwatch,
    ) -> None:
        self.descriptions = descriptions
        self.steps = programs[0].steps
        self.metas = [m.meta for step in self.steps for m in step]
        """Metadata of the microbatches of all steps."""
        self.modules: list[ModuleLayers] = module_layers(descriptions, self.metas)
        self.seconds: dict[int, dict[ActionKind, float]] = {}
        """Maps images per sub-microbatch and action type to seconds per FLOP."""
        self.tower_share = 0.0
        """Encoder fraction of the compute time with the largest sub-microbatches."""
        for program in sorted(programs, key=lambda program: program.choice.images):
            flops = self._flops(program)
            for _ in range(2):  # the first warms up
                watch.time(program, 0)
            busy = torch.tensor([program.busy_s.get(kind, 0.0) for kind in flops])
            dist.all_reduce(busy)
            speed = {k: s / flops[k] for k, s in zip(flops, busy.tolist(), strict=True)}
            for (module, kind), seconds in list(speed.items()):
                if kind is ActionType.B:
                    speed |= {(module, half): seconds for half in (ActionType.I, ActionType.W)}
            self.seconds[program.choice.images] = speed
            tower = [module == "vision" for module, _ in flops]
            self.tower_share = (busy[tower].sum() / busy.sum()).item()

    def rates(self, choice: ProgramChoice) -> dict[ActionKind, float]:
        """Return seconds per FLOP for the sub-microbatch size of a choice, or the largest one."""
        return self.seconds.get(choice.images, self.seconds[max(self.seconds)])

    def _flops(self, program: OurProgram) -> dict[ActionKind, float]:
        """Return the FLOPs of the first step for each action type."""
        layout = program.pipeline.layout
        graph, duration = self.graph_of(layout, 0, program.choice.parts)
        flops: dict[ActionKind, float] = {}
        for row in separated(graph):
            for action in row:
                kind = layout.stages[action.stage].module, action.type
                flops[kind] = flops.get(kind, 0.0) + duration(action)
        return flops

    def graph_of(
        self, layout: StageLayout, index: int, parts: Callable[[int], int]
    ) -> tuple[StageGraph, Callable[[Action], float]]:
        """Return the task graph of a step and the FLOPs of its actions."""
        step = self.steps[index]
        counts = tuple(parts(len(m.meta.patches("vision"))) for m in step)
        graph = StageGraph(layout, len(step), {"vision": counts})
        targets = [m.target_count for m in step]
        return graph, task_durations(graph, self.descriptions, [m.meta for m in step], targets)

    def makespan_s(
        self,
        layout: StageLayout,
        parts: Callable[[int], int],
        order: Callable[[StageGraph, Callable[[Action], float]], ComputeOrder],
        speed: Mapping[ActionKind, float],
    ) -> float:
        """Return the simulated time of all steps in seconds."""
        total = 0.0
        for index in range(len(self.steps)):
            graph, flops = self.graph_of(layout, index, parts)
            seconds = self.seconds_of(layout, flops, speed)
            records = simulate_order(order(graph, flops), graph, seconds)
            total += max(record.end_ms for record in records)
        return total

    def seconds_of(
        self,
        layout: StageLayout,
        flops: Callable[[Action], float],
        speed: Mapping[ActionKind, float],
    ) -> Callable[[Action], float]:
        """Return a function that maps actions to durations in seconds."""

        def seconds(action: Action) -> float:
            kind = layout.stages[action.stage].module, action.type
            return ACTION_S + flops(action) * speed[kind]

        return seconds

    def stock_s(self, split: Split) -> float:
        """Return the simulated time of a PyTorch schedule, without sub-microbatches."""
        layout = chain_layout(self.modules, split)
        speed = self.seconds[max(self.seconds)]
        return self.makespan_s(layout, lambda n: min(n, 1), lambda g, _: interleaved_1f1b(g), speed)

    def torchmm_s(self, choice: ProgramChoice) -> float:
        """Return the simulated time of separated segments in seconds."""
        layout = plan_layout(choice.config(), self.descriptions, self.metas)
        return self.makespan_s(layout, choice.parts, separated, self.seconds[choice.images])


def chain_layout(modules: Sequence[ModuleLayers], split: Split) -> StageLayout:
    """Return the stages of `StockProgram` for simulation."""
    depth = len(modules[0].costs)
    cuts: dict[str, list[StageSplit]] = {module.name: [] for module in modules}
    for i, (start, stop) in enumerate(pairwise([sum(split[:i]) for i in range(len(split) + 1)])):
        inside = min(stop, depth) - min(start, depth), max(stop, depth) - max(start, depth)
        for module, layers in zip(modules, inside, strict=True):
            if layers:
                cuts[module.name].append(StageSplit(layers, (i % RANKS,), i // RANKS, i))
    return build_layout(modules, cuts)


def splits(modules: Sequence[ModuleLayers], stages: int, slack: float = 1.15) -> Iterator[Split]:
    """Yield the splits of a single pipeline, starting with the most even split.

    The load of the most loaded rank is at most `slack` times the minimum over all splits.
    """
    costs = [cost for module in modules for cost in module.costs_with_ends]
    loads: dict[Split, float] = {}
    for ends in combinations(range(1, len(costs)), stages - 1):
        split = tuple(b - a for a, b in pairwise((0, *ends, len(costs))))
        sums = [sum(costs[a:b]) for a, b in pairwise((0, *ends, len(costs)))]
        loads[split] = max(sum(sums[rank::RANKS]) for rank in range(RANKS))
    least = {front: min((v for s, v in loads.items() if in_front(modules, s) is front), default=0)
             for front in (True, False)}  # fmt: skip
    for split, load in sorted(loads.items(), key=lambda item: item[1]):
        if load <= slack * least[in_front(modules, split)]:
            yield split


def in_front(modules: Sequence[ModuleLayers], split: Split) -> bool:
    """Return True if the full encoder is in stage 0."""
    return split[0] >= len(modules[0].costs)


def choices(setting: Setting) -> list[ProgramChoice]:
    """Return all torchmm plans."""
    size = setting.size
    return [
        ProgramChoice(tower, llm, images)
        for tower in (1, 2, 4)
        for llm in (1, 2, 4)
        for images in setting.images
        if tower * RANKS <= size.tower_layers and llm * RANKS <= size.llm_layers
    ]


def choose_ours(
    setting: Setting, costs: Costs, watch: Stopwatch, make: Callable[[ProgramChoice], OurProgram]
) -> OurProgram:
    """Return the fastest torchmm program."""
    kept = sorted(choices(setting), key=costs.torchmm_s)[: setting.tried]
    return watch.fastest([make(choice) for choice in kept], setting.turns)


def choose_stock(
    setting: Setting,
    costs: Costs,
    watch: Stopwatch,
    front: bool,
    make: Callable[[Split], StockProgram],
) -> StockProgram:
    """Return the fastest split under 1F1B or interleaved 1F1B."""
    tried: list[Split] = []
    for stages in (RANKS, 2 * RANKS):
        all_splits = splits(costs.modules, stages)
        matching = (split for split in all_splits if in_front(costs.modules, split) is front)
        tried += sorted(islice(matching, PLAYED), key=costs.stock_s)[: setting.tried]
    return watch.fastest([make(split) for split in tried], setting.turns)


def run_rank(setting: Setting) -> dict[str, Any]:
    """Measure all programs on this rank, and return the results."""
    source, steps = load_steps(setting.steps, setting.microbatches)
    model = setting.size.build()
    descriptions = [module.describe() for module in model.modality_modules()]
    mesh = build_mesh(ParallelConfig(pipeline=RANKS), torch.device("cpu"))

    def make(choice: ProgramChoice) -> OurProgram:
        return OurProgram(OURS, model, steps, choice, mesh)

    watch = Stopwatch(setting.patience_s, QUIET)
    costs = Costs(
        descriptions, [make(ProgramChoice(1, 1, images)) for images in setting.images], watch
    )
    ours = choose_ours(setting, costs, watch, make)
    stock = [
        choose_stock(setting, costs, watch, front, partial(StockProgram, name, model, steps))
        for name, front in ((FRONT, True), (SPREAD, False))
    ]
    programs: list[Program] = [ours, *stock]
    difference = gradient_difference(model, programs)
    return {
        "source": source,
        "images": [[m.meta.image_count for m in step] for step in steps],
        "tower share": costs.tower_share,
        "choice": str(ours.choice),
        "splits": {program.name: program.split for program in stock},
        "difference": difference,
        "comparison": watch.compare(programs, len(steps), setting.runs),
    }


def gradient_difference(model: MultimodalModel, programs: Sequence[Program]) -> float:
    """Return the largest |g - g'| / |g| of any parameter against the first program."""
    reference: list[torch.Tensor] = []
    worst = 0.0
    for program in programs:
        program.step(0)
        for i, parameter in enumerate(model.parameters()):
            gradient = parameter.grad
            summed = torch.zeros_like(parameter) if gradient is None else gradient.clone()
            dist.all_reduce(summed)
            if program is programs[0]:
                reference.append(summed)
            else:
                error = (summed - reference[i]).norm() / reference[i].norm()
                worst = max(worst, error.item())
    return worst


def rows(setting: Setting, results: dict[str, Any]) -> list[Row]:
    """Return the rows of the results."""
    size, comparison = setting.size, results["comparison"]
    assert isinstance(comparison, Comparison)
    case = (
        f"{RANKS} ranks, {size.tower_layers} + {size.llm_layers} layers, "
        f"{setting.microbatches} microbatches"
    )
    table = comparison.rows(case, OURS, {FRONT: GOAL, SPREAD: None})
    difference = results["difference"]
    table.append(
        Row(case, "gradient difference", "relative", difference, goal=TOLERANCE, better="lower")
    )
    return table
