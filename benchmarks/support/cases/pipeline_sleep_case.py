"""Eight ranks whose layers sleep: what schedules do at a depth that this machine cannot compute.

Both sides choose among candidates that are simulated with the known times; the best few run
for real, the fastest stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean
from typing import Any

from documents import load_documents, pack_documents

from support.harness import Row
from support.models.stock_pipeline import Split
from support.ranks import Comparison, Program, Stopwatch, run_ranks
from support.sleepers import (
    LLM_LAYERS,
    RANKS,
    TOWER_LAYERS,
    OurSleep,
    SleepChoice,
    SleepWork,
    StockSleep,
    chain_modules,
    durations,
)
from torchmm.pipelining.plan.graph import StageGraph, StageLayout
from torchmm.pipelining.plan.plan import ComputeOrder
from torchmm.pipelining.schedules.classic import interleaved_1f1b
from torchmm.pipelining.schedules.layouts import StageSplit, balanced_split, build_layout
from torchmm.pipelining.schedules.separated import separated
from torchmm.pipelining.view.timeline import simulate_order

TOWER_SHARE = 0.57
"""Mean encoder fraction of the compute time, as for the FLOPs of SmolVLM-500M."""
TOKENS, IMAGE_TOKENS, SEED = 2048, 64, 0
TRANSFER_S = 5e-4
"""Assumed transfer time of a message in seconds in simulations."""
GOAL = 1.3
QUIET = 0.3
"""Fraction of CPU time that other programs may use. Sleep uses none."""
FRONT, SPREAD, OURS = "encoder in stage 0", "single pipeline", "torchmm"


@dataclass(frozen=True)
class Setting:
    """Extent of the measurement."""

    layer_s: float
    """Forward time of an LLM layer in seconds."""
    microbatches: int
    steps: int
    runs: int
    patience_s: float
    """Time limit in seconds for waiting until other programs finish."""
    tried: int
    """Number of measured candidates per program."""


SETTINGS = {
    "full": [
        Setting(layer_s=4e-3, microbatches=count, steps=2, runs=3, patience_s=1800, tried=2)
        for count in (8, 16)
    ],
    "quick": [Setting(layer_s=2e-3, microbatches=8, steps=1, runs=2, patience_s=0, tried=1)],
    "tiny": [Setting(layer_s=2e-4, microbatches=8, steps=1, runs=1, patience_s=0, tried=1)],
}
"""Settings by size. "tiny" is for tests."""


def load_work(setting: Setting) -> SleepWork:
    """Return the first steps of a run with real documents."""
    packs = pack_documents(load_documents(), TOKENS, IMAGE_TOKENS, seed=SEED)
    counts = [sum(sample.images for sample in pack) for pack in packs]
    per_tower = TOWER_SHARE / (1 - TOWER_SHARE) * LLM_LAYERS * setting.layer_s
    size = setting.microbatches
    steps = [counts[i * size : (i + 1) * size] for i in range(setting.steps)]
    return SleepWork(steps, setting.layer_s, per_tower / TOWER_LAYERS / mean(counts))


def chain_layout(work: SleepWork, split: Split) -> StageLayout:
    """Return the stages of `StockSleep` for simulation."""
    cuts: dict[str, list[StageSplit]] = {"vision": [], "llm": []}
    for i, (start, stop) in enumerate(pairwise([sum(split[:i]) for i in range(len(split) + 1)])):
        tower = min(stop, TOWER_LAYERS) - min(start, TOWER_LAYERS)
        for name, layers in (("vision", tower), ("llm", stop - start - tower)):
            if layers:
                cuts[name].append(StageSplit(layers, (i % RANKS,), i // RANKS, i))
    return build_layout(chain_modules(work), cuts)


def makespan_s(
    work: SleepWork, graph_of: Callable[[int], StageGraph], order: Callable[..., ComputeOrder]
) -> float:
    """Return the simulated time of all steps in seconds."""
    total = 0.0
    for index in range(len(work.images)):
        graph = graph_of(index)
        seconds = durations(graph, work, index)
        records = simulate_order(order(graph, seconds), graph, seconds, TRANSFER_S)
        total += max(record.end_ms for record in records)
    return total


def stock_s(work: SleepWork, split: Split) -> float:
    """Return the simulated time of a PyTorch schedule in seconds."""
    layout = chain_layout(work, split)

    def graph(index: int) -> StageGraph:
        images = work.images[index]
        return StageGraph(layout, len(images), {"vision": tuple(min(i, 1) for i in images)})

    return makespan_s(work, graph, lambda graph, seconds: interleaved_1f1b(graph))


def torchmm_s(work: SleepWork, choice: SleepChoice) -> float:
    """Return the simulated time of separated segments in seconds."""
    return makespan_s(work, lambda index: choice.graph(work, index), separated)


def splits(work: SleepWork, stages: int, front: bool) -> Iterator[Split]:
    """Yield even splits of a single pipeline for several assumed encoder costs."""
    if front:
        for extra in range(LLM_LAYERS // 4):
            rest = LLM_LAYERS - extra
            if rest >= stages - 1:
                yield TOWER_LAYERS + extra, *balanced_split([1.0] * rest, stages - 1)
        return
    tower, llm = chain_modules(work)
    cuts = set()
    for percent in range(50, 155, 10):
        costs = [cost * percent / 100 for cost in tower.costs]
        cuts.add(tuple(balanced_split([*costs, *llm.costs], stages)))
    yield from sorted(cuts)


@dataclass(frozen=True)
class Candidates:
    """Candidates to measure: the fastest of each type in simulation."""

    ours: list[SleepChoice]
    stock: dict[str, list[Split]]
    """Maps the name of a baseline to its splits."""


def shortlist(work: SleepWork, tried: int) -> Candidates:
    """Return the same number of candidates for each program."""
    choices = [
        SleepChoice(tower, llm, images)
        for tower in (1, 2, 3)
        for llm in (2, 3, 4)
        for images in (2, 4, 8)
    ]
    ours = sorted(choices, key=lambda choice: torchmm_s(work, choice))[:tried]
    stock = {}
    for name, front in ((FRONT, True), (SPREAD, False)):
        all_splits = [s for n in (1, 2, 3) for s in splits(work, n * RANKS, front)]
        stock[name] = sorted(all_splits, key=lambda split: stock_s(work, split))[:tried]
    return Candidates(ours, stock)


def run(setting: Setting) -> dict[str, Any]:
    """Time the case and return its rows."""
    work = load_work(setting)
    return run_ranks(run_rank, RANKS, setting, work, shortlist(work, setting.tried))


def run_rank(setting: Setting, work: SleepWork, candidates: Candidates) -> dict[str, Any]:
    """Measure all programs on this rank, and return the results."""
    watch = Stopwatch(setting.patience_s, QUIET)
    ours = watch.fastest([OurSleep(OURS, work, choice) for choice in candidates.ours])
    stock = [
        watch.fastest([StockSleep(name, work, split) for split in tried])
        for name, tried in candidates.stock.items()
    ]
    programs: list[Program] = [ours, *stock]
    return {
        "images": work.images,
        "choice": str(ours.choice),
        "splits": {program.name: program.split for program in stock},
        "comparison": watch.compare(programs, len(work.images), setting.runs),
    }


def rows(setting: Setting, results: dict[str, Any]) -> list[Row]:
    """Return the rows of the results."""
    comparison = results["comparison"]
    assert isinstance(comparison, Comparison)
    case = (
        f"{RANKS} sleeping ranks, {TOWER_LAYERS} + {LLM_LAYERS} layers, "
        f"{setting.microbatches} microbatches"
    )
    return comparison.rows(case, OURS, {FRONT: GOAL, SPREAD: None})
