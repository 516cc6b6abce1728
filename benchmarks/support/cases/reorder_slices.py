"""Sum over microbatches of the slowest rank, if all ranks synchronize in every layer; simulated.

The sequences of a step are those that a recipe assumes. All GPUs are FSDP2 shards without a
pipeline, so the step time is the sum over microbatches and modules of the slowest rank. Times come
from the cost model per sequence, without communication.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from support.harness import Row
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.disttrain.arrangement import build_step_reorder
from torchmm.balance.disttrain.reordering.group_balancing import balance_groups
from torchmm.balance.disttrain.reordering.lockstep_slices import slice_microbatches
from torchmm.balance.numba_utils import Float64s
from torchmm.balance.recipe_simulation.step_simulator import StepSample
from torchmm.balance.run_costs import build_cost_model
from torchmm.planning.resolved_recipe import resolve_recipe
from torchmm.planning.step import plan_layout
from torchmm.recipe.read import load_recipe

RECIPES = Path(__file__).parents[3] / "recipes"
LONG_VIDEOS = (
    "[{weight = 0.3, images = [120, 140]}, {weight = 0.7, samples = 16, images = [16, 48]}]"
)
"""30 % of the sequences are one video of 2 min, 70 % are 16 packed samples."""


class Case(NamedTuple):
    """A recipe on a number of GPUs, all of them FSDP2 shards."""

    name: str
    recipe: str
    gpus: int
    changes: tuple[str, ...] = ()


CASES = (
    Case("pipeweaver_vlm_s, 16 GPUs", "papers/pipeweaver_vlm_s", 16, ("--parallel.tensor=1",)),
    Case("qwen3_vl_8b, 16 GPUs", "zoo/qwen3_vl_8b", 16),
    Case(
        "qwen3_vl_8b, 64k tokens, 30 % long videos, 64 GPUs",
        "zoo/qwen3_vl_8b",
        64,
        ("--training.sequence_length=65536", f"--simulation.sequences={LONG_VIDEOS}"),
    ),
)


def step_rows(case: Case, seeds: int) -> list[Row]:
    """Return the step times of a case in three orders, and the time to arrange a step."""
    sums = np.array([_step_ms(case, seed) for seed in range(seeds)])
    natural, equal_sums, sliced, bound = sums.T
    title = f"synchronized ranks, {case.name}"
    gains, metric = natural / sliced, f"step, default order / torchmm, minimum of {seeds}"
    return [
        Row(title, "step, default order / torchmm", "x", float(gains.mean()), 1.0, goal=1.0,
            kind="simulated"),
        Row(title, metric, "x", float(gains.min()), 1.0, goal=1.0, kind="simulated"),
        Row(title, "step, equal sums / torchmm", "x", float((equal_sums / sliced).mean()), 1.0,
            goal=1.0, kind="simulated"),
        Row(title, "step / mean rank", "x", float((sliced / bound).mean()),
            float((natural / bound).mean()), better="lower", kind="simulated"),
    ]  # fmt: skip


def _step_ms(case: Case, seed: int) -> tuple[float, float, float, float]:
    """Return ms of a step: order of the data, equal sums, equal slices, mean rank."""
    changes = ["--parallel.pipeline=1", "--parallel.schedule=separated", "--data.reorder=intra"]
    changes += [f"--simulation.seed={seed}", *case.changes]
    recipe = load_recipe(RECIPES / f"{case.recipe}.toml", changes, case.gpus).recipe
    sample = StepSample(recipe)
    packs, modules = sample.packs, sample.modules
    run = resolve_recipe(recipe, case.gpus)
    model = build_cost_model(run, modules, load_profile(recipe.simulation.device))
    layout = plan_layout(recipe.parallel, modules, packs)
    reorder = build_step_reorder(run, modules, model, layout)
    times = reorder.stage_times(packs)
    size = recipe.training.microbatch_size
    natural = np.arange(len(packs)).reshape(run.data_parallel_size, -1, size)
    sums = balance_groups(times.totals_N, run.data_parallel_size).reshape(natural.shape)
    arranged = np.array(reorder(packs).places)
    steps_ns = [_slowest_ns(times, places_GMB) for places_GMB in (natural, sums, arranged)]
    default_order_ms, sums_ms, arranged_ms = (ns / 1e6 for ns in steps_ns)
    return (
        default_order_ms,
        sums_ms,
        arranged_ms,
        times.totals_N.sum() / run.data_parallel_size / 1e6,
    )


def _slowest_ns(times: tuple[Float64s, Float64s], places_GMB: np.ndarray) -> float:
    """Return the sum over microbatches, stages and directions of the slowest rank."""
    return sum(ns_SN[:, places_GMB].sum(axis=3).max(axis=1).sum() for ns_SN in times)


def time_rows(repetitions: int) -> list[Row]:
    """Return the time to slice a step of 1,024 ranks."""
    rng = np.random.default_rng(0)
    images = np.where(rng.random(8192) < 0.3, 0, rng.integers(1, 49, 8192))
    costs_KN = np.stack([1e6 * images, rng.integers(18e6, 22e6, 8192).astype(float)])
    slice_microbatches(costs_KN, 1, 1024)
    spent_s = []
    for _ in range(repetitions):
        begin_s = time.thread_time()
        slice_microbatches(costs_KN, 1, 1024)
        spent_s.append(time.thread_time() - begin_s)
    title = "synchronized ranks, 1024 x 8"
    return [Row(title, "time", "ms", 1e3 * min(spent_s), goal=10, better="lower")]
