"""What arranging batches gives data-parallel groups: in windows, and by plans; simulated.

Windows of several global batches are compared with batches arranged one by one, on
DistTrain's recipes on 96 devices (§8.2), in the sizes that `benchmarks/disttrain_figures.py` finds
for them. Times are those of the slowest replica group of every step in the order of the schedule,
added up over the windows, as `data.reorder_window` itself compares them: without messages, gathers
and reductions.

Replicas of PipeWeaver's VLM-S under searched orders get packs as they come, by work alone, and by
what their plans take (`reordering.replicas`). Each is then planned as a run plans it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from support.harness import Row
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.orchestration.search import UnitSizes
from torchmm.balance.reordering.step import StepReorder
from torchmm.balance.reordering.window import WindowReorder
from torchmm.planning.search.disaggregated import sized_recipe
from torchmm.planning.executions import run_costs
from torchmm.planning.first_step import Workload
from torchmm.planning.forecast import Forecaster, StepSample
from torchmm.planning.reordering import arrangement, ordered_layout, reordered
from torchmm.recipe.read import load_recipe

RECIPES = Path(__file__).parents[3] / "recipes" / "papers"
STEPS = 16
"""Of each case."""
REPLICAS, PER_REPLICA, PIPELINE, TENSOR = 8, 8, 4, 4
SEARCHED_PARALLEL = {
    "schedule": "searched",
    "pipeline": PIPELINE,
    "tensor": TENSOR,
    "replicate": REPLICAS,
    "virtual_stages": 2,
    "vision.segments": 1,
    "vision.sub_microbatch_images": 12,
}
AS_IT_COMES, BY_WORK, BY_PLANS = "as it comes", "by work", "by plans"


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
    layout = forecaster.layout(parallel)
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


def replica_forecaster(seed: int, evaluations: int, per_replica: int) -> Forecaster:
    """VLM-S under searched orders, on several replicas."""
    changes = [f"--parallel.{name}={value}" for name, value in SEARCHED_PARALLEL.items()]
    changes += [f"--parallel.search.evaluations={evaluations}", f"--simulation.seed={seed}"]
    changes += ["--parallel.sequence_parallel=true", "--data.reorder=intra"]
    changes += [f"--training.global_batch_size={REPLICAS * per_replica}"]
    gpus = REPLICAS * PIPELINE * TENSOR
    recipe = load_recipe(RECIPES / "pipeweaver_vlm_s.toml", changes, gpus).recipe
    return Forecaster(recipe, gpus, load_profile(recipe.simulation.device))


def replica_steps_ms(seed: int, evaluations: int, per_replica: int) -> dict[str, np.ndarray]:
    """Steps of all replicas of one global batch, by how its packs are dealt."""
    forecaster = replica_forecaster(seed, evaluations, per_replica)
    recipe, modules, packs = forecaster.recipe, forecaster.modules, forecaster.sample.packs
    parallel = recipe.parallel
    layout = forecaster.layout(parallel)
    model = run_costs(forecaster.run, modules, forecaster.profile)
    shares = forecaster.run.shares
    runs = ordered_layout(parallel, layout)
    size = recipe.training.microbatch_size
    by_work = StepReorder(modules, model, runs, shares, size, balance=True, order=False)
    natural = [packs[i : i + per_replica] for i in range(0, len(packs), per_replica)]
    dealt = {
        AS_IT_COMES: natural,
        BY_WORK: reordered(by_work, packs),
        BY_PLANS: reordered(arrangement(recipe, modules, model, layout, shares), packs),
    }
    found = {}
    for name, groups in dealt.items():
        steps_ms = []
        for own in groups:
            forecaster.workload = Workload(own, 1.0)
            steps_ms.append(forecaster.forecast_parallel(parallel).iteration_ms)
        found[name] = np.array(steps_ms)
    return found


def replica_rows(seeds: int, evaluations: int, per_replica: int = PER_REPLICA) -> list[Row]:
    """How long the mean replica works of what the last one takes, and when that ends."""
    by_seed = [replica_steps_ms(seed, evaluations, per_replica) for seed in range(seeds)]
    case = f"pipeweaver_vlm_s, searched, {REPLICAS} replicas x {per_replica}, {seeds} seeds"
    rows = []
    for name in (AS_IT_COMES, BY_WORK, BY_PLANS):
        shares = [steps[name].mean() / steps[name].max() for steps in by_seed]
        gains = [steps[BY_WORK].max() / steps[name].max() for steps in by_seed]
        goal = 1.0 if name == BY_PLANS else None
        rows += [
            Row(case, f"mean replica's step of the longest, {name}", "share",
                float(np.mean(shares)), kind="simulated"),
            Row(case, f"longest step, {BY_WORK} / {name}, least", "x", min(gains), 1.0,
                kind="simulated"),
            Row(case, f"longest step, {BY_WORK} / {name}, mean", "x", float(np.mean(gains)), 1.0,
                goal=goal, kind="simulated"),
        ]  # fmt: skip
    return rows
