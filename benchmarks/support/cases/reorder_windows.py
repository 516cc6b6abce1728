"""What windows of several global batches gain over batches arranged one by one, simulated.

DistTrain's recipes on 96 devices (§8.2), in the sizes that `benchmarks/disttrain_figures.py` finds
for them. Times are those of the slowest replica group of every step in the order of the schedule,
added up over the windows, as `data.reorder_window` itself compares them: without messages, gathers
and reductions.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from support.harness import Row
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.orchestration.search import UnitSizes
from torchmm.balance.reordering.window import WindowReorder
from torchmm.planning.apart.problem import sized_recipe
from torchmm.planning.executions import run_costs
from torchmm.planning.forecast import Forecaster, StepSample
from torchmm.planning.reordering import arrangement
from torchmm.recipe.read import load_recipe

RECIPES = Path(__file__).parents[3] / "recipes" / "papers"
STEPS = 16
"""Of each case."""


class Case(NamedTuple):
    """A recipe and its sizes."""

    name: str
    batch: int
    sizes: dict[str, UnitSizes]
    stages: int
    """Of the LLM on each of its ranks."""


_SMALL = {
    "vision": UnitSizes(1, 8, 1),
    "llm": UnitSizes(2, 8, 5),
    "generator": UnitSizes(1, 8, 1),
}
CASES = (
    Case("disttrain_mllm_9b", 128, _SMALL, 4),
    Case("disttrain_mllm_15b", 64, _SMALL, 4),
    Case(
        "disttrain_mllm_72b",
        40,
        {
            "vision": UnitSizes(4, 2, 1),
            "llm": UnitSizes(8, 2, 5),
            "generator": UnitSizes(1, 2, 1),
        },
        4,
    ),
)


def window_rows(case: Case, windows: tuple[int, ...]) -> list[Row]:
    """A row for each length of windows."""
    changes = ["--training.global_batch_size", str(case.batch)]
    given = load_recipe(RECIPES / f"{case.name}.toml", changes).recipe
    schedule = "interleaved_1f1b" if case.stages > 1 else "1f1b"
    recipe = sized_recipe(given, case.sizes, schedule=schedule, stages=case.stages)
    devices = sum(sizes.devices for sizes in case.sizes.values())
    forecaster = Forecaster(recipe, devices, load_profile("a800"))
    many = recipe.training.model_copy(update={"global_batch_size": STEPS * case.batch})
    packs = StepSample(recipe.model_copy(update={"training": many}), forecaster.model).packs
    parallel = recipe.parallel.model_copy(update={"pipeline": forecaster.run.llm.pipeline})
    layout = forecaster._layout(parallel, packs)
    model = run_costs(forecaster.run, forecaster.modules, forecaster.profile)
    shares = forecaster.run.shares
    reorder = arrangement(recipe, forecaster.modules, model, layout, shares)
    window = WindowReorder(reorder)
    times = reorder.stage_times(packs)
    natural = np.arange(len(packs)).reshape(STEPS, -1)
    alone_ns = window.lasts_ns(times, natural)
    rows = []
    for length in windows:
        lasts_ns = 0.0
        for first in range(0, STEPS, length):
            own = natural[first : first + length].ravel()
            dealt = window([packs[n] for n in own], length)
            lasts_ns += window.lasts_ns(times, own[np.array(dealt)])
        title = (
            f"window of {length} steps, {case.name}, {devices} GPUs, "
            f"{reorder.pipelines} x {case.batch // reorder.pipelines}"
        )
        rows.append(
            Row(title, "step time, batches alone / window", "x", alone_ns / lasts_ns, 1.0,
                kind="simulated")
        )  # fmt: skip
    return rows
