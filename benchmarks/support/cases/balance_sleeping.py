"""Eight ranks that sleep: FSDP2 with balanced data against pipelines, on the same sequences.

Layers sleep for a fraction of the time that the cost model gives them with the profile that was
measured on an H200. Shards of FSDP2 synchronize in every layer. Pipelines run through the runtime
of torchmm, with plans that are made before. All programs take turns on each batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean

import numpy as np
from bubble_runtime import Chain, Made, PlannedSleep, played_s
from reordering_clock import SleepingShards
from searched_pipeline import SleepSearched, SleepSeparated

from support.cases.balance_arms import CHAIN, EVEN, IMAGES, PLAIN, SEARCHED, SEPARATED, SORTED
from support.cases.balance_streams import Case, draw_batches
from support.harness import Row
from support.papers.paper_cells import in_one_chain
from support.ranks import Comparison, Program, Stopwatch, run_ranks
from support.sleepers import LLM_LAYERS, RANKS, TOWER_LAYERS, ShardedSleeper, SleepWork
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.run_costs import build_cost_model
from torchmm.costs.sizes import sequence_sizes
from torchmm.planning.recipe_model import recipe_model
from torchmm.planning.resolved_recipe import resolve_recipe

PROFILE = Path(__file__).parents[2] / "results" / "profile_h200.json"
ORDERS = {PLAIN: "natural", SORTED: "equal slices", IMAGES: "balanced images"}
TYPICAL = 2
"""Batches by which sizes of pipelines are chosen."""
SHARDED_LAYERS = 4
QUIET = 0.3


@dataclass(frozen=True)
class Setting:
    """Length of the measurement.

    Attributes:
        batches: Number of batches, each run once by every program.
        microbatch_s: Mean forward time of a sequence in seconds.
        patience_s: Time to wait for other programs to end, in seconds.
    """

    batches: int
    microbatch_s: float
    patience_s: float


SETTINGS = {
    "full": Setting(20, 0.1, 30),
    "quick": Setting(1, 0.01, 0),
    "tiny": Setting(1, 0.002, 0),
}


def draw_works(case: Case, setting: Setting) -> dict[bool, SleepWork]:
    """Return images per sequence and durations, by whether sequences are packed by their work.

    Durations of an image and of the text of a sequence have the ratio that the cost model gives
    with the profile of the H200.
    """
    recipe = case.recipe()
    modules = [module.describe() for module in recipe_model(recipe).modality_modules()]
    one = in_one_chain(recipe, schedule="1f1b", pipeline=1, tensor=1, shard=1, virtual_stages=1)
    model = build_cost_model(resolve_recipe(one, 1), modules, load_profile(PROFILE))
    batches_by_packing = {
        even: draw_batches(case, recipe, setting.batches, even) for even in (False, True)
    }
    packs = batches_by_packing[False].batches[0]
    forward_ms = {}
    for module in modules:
        _, sizes = sequence_sizes(module, packs)
        assert sizes is not None
        costs = model.stage_costs(module, 0, len(module.layers), sizes, True)
        forward_ms[module.kind] = float(costs.forward.total_ms.sum())
    scale = setting.microbatch_s * len(packs) / sum(forward_ms.values())
    images = sum(meta.image_count for meta in packs)
    image_s = scale * forward_ms["encoder"] / images / TOWER_LAYERS
    layer_s = scale * forward_ms["llm"] / len(packs) / LLM_LAYERS
    return {
        even: SleepWork([[m.image_count for m in b] for b in packed.batches], layer_s, image_s)
        for even, packed in batches_by_packing.items()
    }


def make_plans(works: Mapping[bool, SleepWork]) -> dict[str, tuple[bool, Made]]:
    """Return plans of all batches by name of the pipeline, with the packing of the sequences.

    Stages and segments are the fastest when the first batches are simulated.
    """
    work = works[False]
    typical = replace(work, images=work.images[:TYPICAL])
    sizes = [(tower, llm, images) for tower in (1, 2) for llm in (2, 4) for images in (4, 8)]
    candidates = {
        CHAIN: [Chain(1), Chain(2)],
        SEPARATED: [SleepSeparated(*size) for size in sizes],
    }
    best = {
        name: min(choices, key=partial(played_s, typical)) for name, choices in candidates.items()
    }
    segmented = best[SEPARATED]
    best[SEARCHED] = SleepSearched(*astuple(segmented))
    return {
        name + EVEN * even: (even, Made.of(choice, works[even]))
        for name, choice in best.items()
        for even in works
    }


def run_rank(
    setting: Setting, works: Mapping[bool, SleepWork], plans: Mapping[str, tuple[bool, Made]]
) -> Comparison:
    """Measure all programs on one rank."""
    model = ShardedSleeper(SHARDED_LAYERS)
    programs: list[Program] = [
        SleepingShards(name, order, works[False], model) for name, order in ORDERS.items()
    ]
    programs.append(SleepingShards(IMAGES + EVEN, ORDERS[IMAGES], works[True], model))
    programs += [PlannedSleep(name, works[even], steps) for name, (even, steps) in plans.items()]
    return Stopwatch(setting.patience_s, QUIET).compare(programs, setting.batches, 1)


def run(case: Case, size: str) -> list[Row]:
    """Return the rows of a case; baselines are plain FSDP2."""
    setting = SETTINGS[size]
    works = draw_works(case, setting)
    plans = make_plans(works)
    for name, (_, steps) in plans.items():
        print(f"{case.name}, {name}: {steps}")
    comparison = run_ranks(run_rank, RANKS, setting, works, plans)
    print(f"{case.name}: {comparison}")
    title = f"{case.name}, {RANKS} sleeping ranks"
    return [row for name in comparison.times for row in _rows(title, name, comparison, works)]


def _rows(
    title: str, name: str, comparison: Comparison, works: Mapping[bool, SleepWork]
) -> Iterator[Row]:
    work = works[name.endswith(EVEN)]
    walls_s = {each: [time.wall_s for time in comparison.times[each]] for each in (name, PLAIN)}
    total_s, plain = (
        sum(_work_s(each, i) for i in comparison.steps) for each in (work, works[False])
    )
    speed = total_s / sum(walls_s[name]) * sum(walls_s[PLAIN]) / plain
    case = f"{title}: {name}"
    late = {each: float(np.percentile(times_s, 95)) for each, times_s in walls_s.items()}
    yield Row(case, "work per second / FSDP2", "x", speed, 1.0)
    yield Row(case, "step, mean", "s", mean(walls_s[name]), mean(walls_s[PLAIN]), better="lower")
    yield Row(case, "step, 95th percentile", "s", late[name], late[PLAIN], better="lower")


def _work_s(work: SleepWork, index: int) -> float:
    """Return the forward time of a batch on one rank in seconds."""
    images = work.images[index]
    return work.forward_s(TOWER_LAYERS, len(images) * LLM_LAYERS, sum(images))
