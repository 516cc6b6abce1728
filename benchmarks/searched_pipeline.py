"""Measure searched schedules, compared with 1F1B, static separated plans and PyTorch schedules.

    python benchmarks/searched_pipeline.py [--quick] [--json FILE] [--cases NAME ...]

    model         an image-text model on two ranks of one thread each
    small_model   the same with a smaller LLM; not with --quick
    sleep         eight ranks whose layers sleep
    varied        the same, 20 batches whose microbatches have 0 to 48 images
    varied_model  "model" on such batches
    planning      `planning_beside`: step time with background planning

Image counts are those of real documents (`documents`), mostly 6 to 16. In the varied cases, all
counts are equally likely. All programs run the same weights on the same microbatches in the same
processes, and the same step in each run. Compared are

    1F1B                  Megatron-LM's placement: the encoder before the first LLM stage
    static separated      modality-separated segments with the separated schedule
    torch interleaved     PyTorch's `ScheduleInterleaved1F1B`, two or three stages per rank

Segments, sub-microbatches and splits are selected in the same way for all: candidates are simulated
with measured (or known) times, the best few run, and the fastest is used. Searched schedules may
also use the stages of 1F1B or of a balanced single pipeline. Plans are made before the step, as in
training. Searches have the number of evaluations of a recipe's default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

import numpy as np
import torch
from bubble_runtime import Planned, PlannedSleep, played_s
from documents import load_documents
from support import sleepers
from support.cases import pipeline_model_case as model_case
from support.cases import pipeline_sleep_case as sleep_case
from support.cases import planning_beside
from support.cases.pipeline_model_case import Costs, OurProgram, ProgramChoice
from support.cases.planning_beside import ALL, SearchedChoice
from support.harness import Row, run_cases
from support.models.pipeline_model import IMAGE_TOKENS, SEED, Size, load_steps, steps_of
from support.models.stock_pipeline import StockProgram
from support.ranks import Comparison, Program, Stopwatch, print_choices, run_ranks

from torchmm.balance.online_calibration import ActionKind, scale_durations
from torchmm.balance.pipeweaver.planners import plan_pipeline_step
from torchmm.balance.schedules import SEARCHED_SCHEDULE
from torchmm.balance.section import SearchConfig
from torchmm.common.batch import Microbatch
from torchmm.common.processes import set_malloc_retention
from torchmm.models.multimodal import MultimodalModel
from torchmm.parallel.mesh import ParallelMesh, build_mesh
from torchmm.pipelining.plan.actions import Action
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.plan import ComputeOrder, PipelinePlan
from torchmm.pipelining.schedules.classic import interleaved_1f1b
from torchmm.pipelining.schedules.layouts import megatron_layout
from torchmm.pipelining.schedules.separated import separated
from torchmm.planning.step import plan_layout
from torchmm.recipe.parallel_section import ParallelConfig

SEARCHED, MEGATRON, SEPARATED, STOCK = (
    "searched", "1F1B", "static separated", "torch interleaved",
)  # fmt: skip
EVALUATIONS, PLAYED_EVALUATIONS = 2000, 100
"""Numbers of search evaluations: of executed schedules, and of schedules of candidates."""
SLEEP: dict[str, dict[str, Any]] = {"full": {"patience_s": 30}, "quick": {"layer_s": 1e-3}}
"""Differences from the settings of `pipeline_sleep_case`."""
VARIED = {
    "full": sleep_case.Setting(8e-3, 12, steps=20, runs=1, patience_s=30, tried=2),
    "quick": sleep_case.Setting(1e-3, 8, steps=4, runs=1, patience_s=0, tried=1),
    "tiny": sleep_case.Setting(2e-4, 8, steps=2, runs=1, patience_s=0, tried=1),
}
VARIED_MODEL = {
    "full": model_case.Setting(
        Size(12, 32, 96, 96), steps=20, runs=1, patience_s=30, turns=1, images=(4, 8, 16)
    ),
    "quick": model_case.Setting(
        Size(2, 5, 96, 96), microbatches=4, steps=3, runs=1, patience_s=0, tried=1, turns=1,
        images=(8,),
    ),
    "tiny": model_case.Setting(
        Size(2, 2, 32, 32), microbatches=4, steps=2, runs=1, patience_s=0, tried=1, turns=1,
        images=(8,),
    ),
}  # fmt: skip
MOST_IMAGES, TYPICAL = 48, 3
"""Maximum number of images per microbatch, and number of batches that select the plans."""
VARIED_TOKENS = (MOST_IMAGES + 2) * IMAGE_TOKENS
"""Tokens per microbatch: enough for all images and some text."""
CHAINS = ("megatron", "balanced")
"""Stage layouts of static plans that searched schedules may also use."""


@dataclass(frozen=True)
class MegatronChoice(ProgramChoice):
    """Placement of Megatron-LM with the 1F1B schedule."""

    def config(self) -> ParallelConfig:
        return ParallelConfig(pipeline=model_case.RANKS, schedule="megatron")

    def __str__(self) -> str:
        return "the tower in front of the LLM's first stage"


class PlannedProgram(OurProgram):
    """Program whose plans are made in advance.

    Args:
        rates: Seconds per FLOP.
    """

    def __init__(
        self,
        name: str,
        model: MultimodalModel,
        steps: Sequence[Sequence[Microbatch]],
        choice: ProgramChoice,
        mesh: ParallelMesh,
        rates: Mapping[ActionKind, float],
    ) -> None:
        super().__init__(name, model, steps, choice, mesh)
        self.plans = [
            plan_pipeline_step(self.pipeline, [m.task_meta for m in step], factors=rates)
            for step in steps
        ]

    def plan(self, index: int) -> PipelinePlan:
        return self.plans[index]


def searched_s(costs: Costs, choice: SearchedChoice) -> float:
    """Return the simulated time of the searched schedules of all steps in seconds."""
    config, rates = choice.config(), costs.rates(choice)

    def order(graph: StageGraph, flops: Callable[[Action], float]) -> ComputeOrder:
        return SEARCHED_SCHEDULE.plan(config, graph, scale_durations(flops, graph, rates))[1]

    layout = plan_layout(config, costs.descriptions, costs.metas)
    return costs.makespan_s(layout, choice.parts, order, rates)


def searched_choices(setting: model_case.Setting, costs: Costs) -> list[SearchedChoice]:
    """Return the fastest simulated choices of separated segments and of single pipelines."""
    separate = [
        SearchedChoice(*astuple(choice), PLAYED_EVALUATIONS)
        for choice in model_case.choices(setting)
    ]
    chains = [
        SearchedChoice(1, virtual, images, PLAYED_EVALUATIONS, stages)
        for stages in CHAINS
        for virtual in (1, 2)
        for images in (*setting.images, ALL)
        if virtual * model_case.RANKS <= setting.size.llm_layers
    ]
    kept = [
        choice
        for kind in (separate, chains)
        for choice in sorted(kind, key=partial(searched_s, costs))[: setting.tried]
    ]
    return [replace(choice, evaluations=EVALUATIONS) for choice in kept]


def run_model_rank(setting: model_case.Setting, varied: bool) -> dict[str, Any]:
    """Measure all programs on one of two ranks, and return the results.

    Args:
        setting: Sizes of the measurement.
        varied: Whether to use random image counts instead of those of real documents.
    """
    set_malloc_retention()  # as training does
    if varied:
        counts = varied_images(setting.steps, setting.microbatches)
        steps = steps_of(counts, VARIED_TOKENS)
    else:
        _, steps = load_steps(setting.steps, setting.microbatches)
    model = setting.size.build()
    descriptions = [module.describe() for module in model.modality_modules()]
    mesh = build_mesh(ParallelConfig(pipeline=model_case.RANKS), torch.device("cpu"))
    watch = Stopwatch(setting.patience_s, model_case.QUIET)
    typical = steps[:TYPICAL]
    timed = [OurProgram("", model, typical, ProgramChoice(1, 1, n), mesh) for n in setting.images]
    costs = Costs(descriptions, timed, watch)

    def make(name: str, choice: ProgramChoice) -> PlannedProgram:
        return PlannedProgram(name, model, steps, choice, mesh, costs.rates(choice))

    static = model_case.choose_ours(setting, costs, watch, partial(make, SEPARATED))
    exact = searched_choices(setting, costs)
    ours = watch.fastest([make(SEARCHED, choice) for choice in exact], setting.turns)
    every = islice(model_case.splits(costs.modules, 2 * model_case.RANKS), model_case.PLAYED)
    splits = sorted(every, key=costs.stock_s)[: setting.tried]
    stock = watch.fastest([StockProgram(STOCK, model, steps, s) for s in splits], setting.turns)
    programs: list[Program] = [ours, make(MEGATRON, MegatronChoice(1, 1, ALL)), static, stock]
    return {
        "images": [[m.meta.image_count for m in step] for step in steps],
        "choices": {SEARCHED: ours.choice, SEPARATED: static.choice, STOCK: stock.split},
        "difference": model_case.gradient_difference(model, programs),
        "comparison": watch.compare(programs, len(steps), setting.runs),
    }


def run_model(size: str) -> Iterator[list[Row]]:
    """Measure two computing ranks with the proportions of SmolVLM-500M."""
    yield from run_models(size, model_case.SETTINGS[size][:1])


def run_small_model(size: str) -> Iterator[list[Row]]:
    """Measure two computing ranks with the proportions of SmolVLM-256M (not in quick runs)."""
    yield from run_models(size, model_case.SETTINGS[size][1:])


def run_models(size: str, settings: Sequence[model_case.Setting]) -> Iterator[list[Row]]:
    """Measure each of several settings."""
    for setting in settings:
        if size == "quick":
            setting = replace(setting, size=Size(2, 5, 96, 96), microbatches=4)  # noqa: PLW2901
        elif size == "full":
            setting = replace(setting, runs=3, turns=1, patience_s=30)  # noqa: PLW2901
        found = run_ranks(run_model_rank, model_case.RANKS, setting, False)
        print_choices("model", found)
        yield model_rows(f"{model_title(setting)}, {setting.microbatches} microbatches", found)


def model_title(setting: model_case.Setting) -> str:
    """Return a title with the numbers of ranks and layers."""
    size = setting.size
    return f"{model_case.RANKS} ranks, {size.tower_layers} + {size.llm_layers} layers"


def model_rows(case: str, found: Mapping[str, Any]) -> list[Row]:
    """Return the rows of the results of two ranks."""
    difference = Row(
        case, "gradient difference", "relative", found["difference"],
        goal=model_case.TOLERANCE, better="lower",
    )  # fmt: skip
    return [*compared(case, found["comparison"], model_case.GOAL), difference]


@dataclass(frozen=True)
class SleepSeparated(sleepers.SleepChoice):
    """Separated segments with the separated schedule."""

    def plan(self, work: sleepers.SleepWork, index: int) -> Planned:
        """Return the task graph and the schedule of a step."""
        graph = self.graph(work, index)
        return Planned(graph, separated(graph, sleepers.durations(graph, work, index)))


@dataclass(frozen=True)
class SleepSearched(sleepers.SleepChoice):
    """Separated segments with searched schedules.

    Attributes:
        evaluations: Maximum number of evaluated schedules per step.
    """

    evaluations: int = EVALUATIONS

    def plan(self, work: sleepers.SleepWork, index: int) -> Planned:
        """Return the task graph and the schedule of a step."""
        graph = self.graph(work, index)
        search = SearchConfig(evaluations=self.evaluations)
        config = ParallelConfig(pipeline=sleepers.RANKS, schedule="searched", search=search)
        seconds = sleepers.durations(graph, work, index)
        return Planned(*SEARCHED_SCHEDULE.plan(config, graph, seconds))


@dataclass(frozen=True)
class SleepMegatron:
    """Placement of Megatron-LM with the 1F1B schedule."""

    def plan(self, work: sleepers.SleepWork, index: int) -> Planned:
        """Return the task graph and the schedule of a step."""
        images = work.images[index]
        layout = megatron_layout(sleepers.chain_modules(work), sleepers.RANKS, 1)
        graph = StageGraph(layout, len(images), {"vision": tuple(min(i, 1) for i in images)})
        return Planned(graph, interleaved_1f1b(graph))


SleepChoice = SleepSeparated | SleepSearched | SleepMegatron


def sleep_candidates(work: sleepers.SleepWork, tried: int) -> tuple[dict[str, list[Any]], list]:
    """Return the fastest simulated choices of torchmm plans and splits of PyTorch schedules."""
    sizes = [(tower, llm, n) for tower in (1, 2, 3) for llm in (2, 3, 4) for n in (2, 4, 8)]
    if tried == 1:  # --quick
        sizes = sizes[::3]
    rough = [SleepSearched(*size, PLAYED_EVALUATIONS) for size in sizes]
    best = partial(sorted, key=partial(played_s, work))
    chosen = {
        SEARCHED: [replace(c, evaluations=EVALUATIONS) for c in best(rough)[:tried]],
        MEGATRON: [SleepMegatron()],
        SEPARATED: best([SleepSeparated(*size) for size in sizes])[:tried],
    }
    splits = [
        split
        for stages in (2, 3)
        for front in (True, False)
        for split in sleep_case.splits(work, stages * sleepers.RANKS, front)
    ]
    return chosen, sorted(splits, key=partial(sleep_case.stock_s, work))[:tried]


def run_sleep_rank(
    setting: sleep_case.Setting,
    work: sleepers.SleepWork,
    chosen: dict[str, list[SleepChoice]],
    splits: list,
) -> dict[str, Any]:
    """Measure all programs on one of eight ranks."""
    watch = Stopwatch(setting.patience_s, sleep_case.QUIET)
    ours = [
        watch.fastest([PlannedSleep(name, work, choice) for choice in tried])
        for name, tried in chosen.items()
    ]
    stock = watch.fastest([sleepers.StockSleep(STOCK, work, split) for split in splits])
    programs: list[Program] = [*ours, stock]
    choices = {program.name: program.choice for program in ours if program.name != MEGATRON}
    return {
        "images": work.images,
        "choices": {**choices, STOCK: stock.split},
        "comparison": watch.compare(programs, len(work.images), setting.runs),
    }


def run_sleep(size: str) -> Iterator[list[Row]]:
    """Measure eight sleeping ranks."""
    for short in sleep_case.SETTINGS[size]:
        setting = replace(short, **SLEEP.get(size, {}))
        work = sleep_case.load_work(setting)
        candidates = sleep_candidates(work, setting.tried)
        found = run_ranks(run_sleep_rank, sleepers.RANKS, setting, work, *candidates)
        print_choices("sleep", found)
        case = (
            f"{sleepers.RANKS} sleeping ranks, {sleepers.TOWER_LAYERS} + {sleepers.LLM_LAYERS} "
            f"layers, {setting.microbatches} microbatches"
        )
        yield compared(case, found["comparison"], sleep_case.GOAL)


def varied_images(steps: int, microbatches: int) -> list[list[int]]:
    """Return random image counts of 0 to the maximum of a PipeWeaver sequence."""
    rng = np.random.default_rng(SEED)
    found: list[list[int]] = rng.integers(0, MOST_IMAGES + 1, (steps, microbatches)).tolist()
    return found


def varied_work(setting: sleep_case.Setting) -> sleepers.SleepWork:
    """Return varied batches for sleeping ranks, with the encoder fraction of the other cases."""
    steps = varied_images(setting.steps, setting.microbatches)
    layer_s = setting.layer_s
    share = sleep_case.TOWER_SHARE
    per_tower = share / (1 - share) * sleepers.LLM_LAYERS * layer_s
    image_s = per_tower / sleepers.TOWER_LAYERS / (MOST_IMAGES / 2)
    return sleepers.SleepWork(steps, layer_s, image_s)


def run_varied(size: str) -> Iterator[list[Row]]:
    """Measure eight sleeping ranks on varied batches.

    All programs are selected on the first batches.
    """
    setting = VARIED[size]
    work = varied_work(setting)
    typical = replace(work, images=work.images[:TYPICAL])
    candidates = sleep_candidates(typical, setting.tried)
    found = run_ranks(run_sleep_rank, sleepers.RANKS, setting, work, *candidates)
    print_choices("varied", found)
    case = (
        f"{sleepers.RANKS} sleeping ranks, {setting.steps} batches of {setting.microbatches} "
        f"microbatches of 0 to {MOST_IMAGES} images"
    )
    comparison = found["comparison"]
    yield [*compared(case, comparison, sleep_case.GOAL), *batch_rows(case, comparison)]


def run_varied_model(size: str) -> Iterator[list[Row]]:
    """Measure two computing ranks on varied batches.

    All programs are selected on the first batches.
    """
    setting = VARIED_MODEL[size]
    found = run_ranks(run_model_rank, model_case.RANKS, setting, True)
    print_choices("varied model", found)
    case = (
        f"{model_title(setting)}, {setting.steps} batches of {setting.microbatches} microbatches "
        f"of 0 to {MOST_IMAGES} images"
    )
    yield [*model_rows(case, found), *batch_rows(case, found["comparison"])]


def batch_rows(case: str, comparison: Comparison) -> list[Row]:
    """Return rows that compare searched schedules with the fastest static plan, per batch."""
    static = min((MEGATRON, SEPARATED, STOCK), key=comparison.wall_s)
    by_step: dict[int, list[float]] = {}
    pairs = zip(comparison.times[static], comparison.times[SEARCHED], strict=True)
    for step, (theirs, ours) in zip(comparison.steps, pairs, strict=True):
        by_step.setdefault(step, []).append(theirs.wall_s / ours.wall_s)
    ratios = [median(own) for own in by_step.values()]
    found = {"minimum": min(ratios), "median": median(ratios), "maximum": max(ratios)}
    return [
        Row(case, f"speedup of a batch, {name}, best static plan ({static})", "x", value, 1.0,
            goal=1.0 if name == "median" else None)
        for name, value in found.items()
    ]  # fmt: skip


def run_planning(size: str) -> Iterator[list[Row]]:
    """Measure two ranks with a concurrent planning process."""
    yield from planning_beside.measure(planning_beside.SETTINGS[size])


def compared(case: str, comparison: Comparison, goal: float) -> list[Row]:
    """Return rows that compare searched schedules with the three baselines.

    Args:
        case: Name of the case.
        comparison: Times of all programs.
        goal: Goal of the speedup compared with 1F1B. The goal of the other baselines is 1.
    """
    return comparison.rows(case, SEARCHED, {MEGATRON: goal, SEPARATED: 1.0, STOCK: 1.0})


CASES = {
    "model": run_model,
    "small_model": run_small_model,
    "sleep": run_sleep,
    "varied": run_varied,
    "varied_model": run_varied_model,
    "planning": run_planning,
}


def main() -> None:
    """Run the cases, and print and store the rows after each case."""
    conditions = f"documents: {load_documents().source}; seed {SEED}"
    run_cases("Searched schedules", __doc__, CASES, conditions)


if __name__ == "__main__":
    main()
