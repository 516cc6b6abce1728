"""Measure per-layer activation checkpointing (PipeWeaver section 6.3): solve time and speedup.

Solve time: each rank solves one problem per step, independent of other ranks. The step is VLM-L (8
ranks, 64 microbatches, models and image sizes of the paper, image counts of torchmm) with separated
modules. Limits are between the memory of full recomputation and that of saving all activations.
Times are the minimum CPU time of several runs, one thread. The gap is proven. HiGHS solves the same
problem of one rank of a smaller step, with the 5 % gap of the paper.

Speedup: simulated steps under a memory limit, compared with the best of nine fixed modes (none,
selective or full recomputation for each of two modules), selected separately for every step. "fixed
modes" over many steps are the best that fit into memory in all of them, as in a recipe. The paper
value is the last row of its table 5 (17.61 s and 16.05 s on 16 H800, searched schedule). Its memory
limit and previous recomputation are not printed.

Offloading: cost per GiB of copying to host memory and back, or of recomputation, and the minimum
memory of a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from support.harness import Row, run_cases
from support.integer_program import solve_exactly
from support.memory_needs import memory_needs

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.costs.step_costs import compute_plan_costs
from torchmm.balance.pipeweaver.activation_checkpointing.lagrangian import solve_lagrangian
from torchmm.balance.pipeweaver.activation_checkpointing.rank_problems import (
    CandidateTables,
    RankProblem,
    build_rank_problems,
)
from torchmm.balance.pipeweaver.activation_checkpointing.recompute_costs import (
    LAYER_MODES,
    PINNED_BANDWIDTH_FRACTION,
)
from torchmm.balance.pipeweaver.activation_checkpointing.tuning import LayerTuning, tune_layers
from torchmm.balance.recipe_simulation.step_simulator import StepSimulator
from torchmm.balance.simulation.simulator import simulate
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.errors import PlanError
from torchmm.costs.execution import RecomputeSetting
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.run.messages import message_specs
from torchmm.planning.executions import module_executions
from torchmm.planning.step import plan_layout, plan_step
from torchmm.recipe.read import load_recipe
from torchmm.recipe.recipe import Recipe

ROOT = Path(__file__).parent.parent
GPUS = {"vlm_s": 16, "vlm_m": 32, "vlm_l": 64}
SHARES = (0.9, 0.6, 0.3, 0.1)
"""Limits: 0 is what full recomputation needs, 1 what keeping everything takes."""
GOAL_MS, GOAL_GAP = 10.0, 0.05
PAPER_GAIN = 17.61 / 16.05
GIB = 2**30


class Step:
    """Plan of a step of a paper model, with costs for all recomputation modes."""

    def __init__(self, name: str, microbatches: int, seed: int = 0) -> None:
        recipe = load_recipe(ROOT / f"recipes/papers/pipeweaver_{name}.toml", []).recipe
        self.recipe: Recipe = recipe.model_copy(
            update={
                "training": recipe.training.model_copy(update={"global_batch_size": microbatches}),
                "simulation": recipe.simulation.model_copy(update={"seed": seed}),
            }
        )
        self.forecaster = StepSimulator(
            self.recipe, GPUS[name], load_profile(recipe.simulation.device)
        )
        self.modules = self.forecaster.modules
        self.metas: list[MicrobatchMeta] = self.forecaster.workload.microbatches
        parallel = self.recipe.parallel
        self.plan: PipelinePlan = plan_step(
            plan_layout(parallel, self.modules, self.metas),
            parallel,
            self.modules,
            self.metas,
            specs=partial(
                message_specs,
                modules={m.name: m for m in self.forecaster.model.modality_modules()},
                microbatches=self.metas,
                dtype=torch.bfloat16,
            ),
            sharding="step" if self.forecaster.run.llm.shard > 1 else "none",
        )

    @property
    def names(self) -> frozenset[str]:
        return frozenset(module.name for module in self.modules)

    def model(self, modes: Sequence[RecomputeSetting] = ()) -> CostModel:
        """Return costs with one mode per module. Modules without a mode save all activations."""
        device = self.forecaster.profile.device.type
        executions = module_executions(self.forecaster.run, self.modules, device)
        given = dict(zip([m.name for m in self.modules], modes, strict=False))
        changed = {
            name: replace(execution, recompute=given.get(name, "none"))
            for name, execution in executions.items()
        }
        return CostModel(self.forecaster.profile, self.recipe.training.dtype, changed)

    def tuning(self, limit_bytes: int, *, offloads: bool = True) -> LayerTuning:
        names = self.names if offloads else frozenset()
        return LayerTuning(self.model(), self.names, limit_bytes, offloads=names)

    def uniform(self, modes: Sequence[RecomputeSetting]) -> tuple[float, int]:
        """Return (ms, peak bytes) with one mode per module."""
        costs = compute_plan_costs(self.plan.graph, self.modules, self.metas, self.model(modes))
        step = simulate(self.plan, costs)
        return step.makespan_ms, max(step.peak_bytes)

    def tuned(self, limit_bytes: int) -> tuple[float, int]:
        """Return (ms, peak bytes) with selective recomputation."""
        found = tune_layers(self.plan, self.modules, self.metas, self.tuning(limit_bytes))
        step = simulate(found.plan, found.costs)
        return step.makespan_ms, max(step.peak_bytes)

    def needs(self, *, offloads: bool) -> tuple[int, int]:
        """Return the minimum and the maximum memory of the most loaded rank, in bytes."""
        tuning = self.tuning(0, offloads=offloads)
        ranks = memory_needs(self.plan, self.modules, self.metas, tuning)
        least, most = (max(each) for each in zip(*ranks, strict=True))
        return least, most

    def limit(self, share: float) -> int:
        least, most = self.needs(offloads=False)
        return round(least + share * (most - least))

    def problems(self, limit_bytes: int) -> list[RankProblem]:
        given = self.plan.graph, self.modules, self.metas
        tuning = self.tuning(limit_bytes)
        costs = compute_plan_costs(*given, tuning.model)
        rows = CandidateTables(costs, tuning.choices(*given), tuning.candidates)
        return build_rank_problems(self.plan, costs, rows, limit_bytes)


def least_ms(function: Callable[[], object], repetitions: int) -> float:
    """Return the minimum CPU time of a call in ms, after one call that may compile."""
    function()
    best = float("inf")
    for _ in range(repetitions):
        begin_s = time.thread_time()
        function()
        best = min(best, time.thread_time() - begin_s)
    return best * 1e3


def solving_rows(step: Step, case: str, repetitions: int) -> list[Row]:
    """Return the solve time and the proven gap over all ranks."""
    rows = []
    for share in SHARES:
        problems = [each.problem for each in step.problems(step.limit(share))]
        times = [least_ms(partial(solve_lagrangian, p), repetitions) for p in problems]
        solved = [s for s in map(solve_lagrangian, problems) if s is not None]
        assert len(solved) == len(problems)
        extra = sum(s.extra_ms for s in solved)
        bound = sum(s.bound_ms for s in solved)
        name = f"{case}, {sum(map(len, problems))} pairs, limit at {share:.0%}"
        rows += [
            Row(name, "one solve, slowest rank", "ms", max(times), goal=GOAL_MS, better="lower"),
            Row(
                name, f"all {len(times)} solves, sequential", "ms", sum(times),
                goal=GOAL_MS, better="lower",
            ),
            Row(
                name, "proven gap", "fraction", (extra - bound) / extra if extra else 0.0,
                goal=GOAL_GAP, better="lower", kind="simulated",
            ),
        ]  # fmt: skip
    return rows


def highs_rows(step: Step, case: str, limit_s: float) -> list[Row]:
    """Return rows that compare the integer program of the paper (5 % gap) with memory prices."""
    problem = step.problems(step.limit(0.3))[0].problem
    begin_s = time.thread_time()
    exact = solve_exactly(problem, gap=GOAL_GAP, time_limit_s=limit_s)
    exact_s = time.thread_time() - begin_s
    quick = solve_lagrangian(problem)
    assert quick is not None
    quick_ms = least_ms(partial(solve_lagrangian, problem), 3)
    name = f"{case}, rank 0, {len(problem)} pairs, limit at 30%"
    rows = [Row(name, "dual solver, HiGHS", "ms", quick_ms, exact_s * 1e3,
                better="lower")]  # fmt: skip
    if exact is not None:
        rows.append(Row(name, "time added", "ms", quick.extra_ms, exact.extra_ms, better="lower",
                        kind="simulated"))  # fmt: skip
    return rows


def offload_rows(step: Step, case: str) -> list[Row]:
    """Return the cost of saved memory with offload and with recomputation, and minimum memory."""
    rows = []
    rate = PINNED_BANDWIDTH_FRACTION * step.forecaster.profile.device.host_bytes_per_s
    stages = step.plan.graph.layout.stages
    first = {stages[index].module: own for index, own in step.tuning(0).choices(
        step.plan.graph, step.modules, step.metas).items()}  # fmt: skip
    for module, own in first.items():
        extra_M = (own.forward_ms_KMN + own.backward_ms_KMN)[0].mean(1)
        kept_M = own.kept_bytes_KMN[0].mean(1)
        rows += [
            Row(f"{case}, {module}", f"{LAYER_MODES[mode]} recomputation, offloading", "ms/GiB",
                extra_M[mode] / (kept_M[0] - kept_M[mode]) * GIB, 2e3 * GIB / rate,
                better="lower", kind="simulated")
            for mode in (1, 2)
        ]  # fmt: skip
    (least, _), (without, _) = (step.needs(offloads=offloads) for offloads in (True, False))
    rows.append(Row(case, "minimum memory, without offloading", "GiB", least / GIB, without / GIB,
                    better="lower", kind="simulated"))  # fmt: skip
    tuned_ms, _ = step.tuned(least)
    full_ms, _ = step.uniform(("full",) * len(step.modules))
    rows.append(Row(case, "step at minimum memory, full recomputation", "ms", tuned_ms,
                    full_ms, better="lower", kind="simulated"))  # fmt: skip
    return rows


def gain_rows(step: Step, case: str, limits: Sequence[float]) -> list[Row]:
    """Return rows that compare tuned steps with the best uniform mode, per memory limit."""
    device_bytes = step.forecaster.profile.device.memory_bytes
    uniform = {
        modes: step.uniform(modes) for modes in product(LAYER_MODES, repeat=len(step.modules))
    }
    rows = []
    for share in limits:
        limit = round(share * device_bytes)
        name = f"{case}, limit {limit / GIB:.1f} GiB"
        fitting = {modes: ms for modes, (ms, peak) in uniform.items() if peak <= limit}
        try:
            tuned_ms, peak = step.tuned(limit)
        except PlanError:
            continue
        rows += [
            Row(name, "step", "ms", tuned_ms, min(fitting.values(), default=None), better="lower",
                kind="simulated"),
            Row(name, "memory / limit", "fraction", peak / limit, better="higher",
                kind="simulated"),
        ]  # fmt: skip
        full: tuple[RecomputeSetting, ...] = ("full",) * len(step.modules)
        full_ms, full_peak = uniform[full]
        if fitting:
            rows.append(
                Row(name, "speedup over the best fixed modes", "x",
                    min(fitting.values()) / tuned_ms, 1.0, kind="simulated")
            )  # fmt: skip
        if full_peak <= limit:
            rows.append(Row(name, "speedup over full recomputation", "x", full_ms / tuned_ms, 1.0,
                            PAPER_GAIN if case.startswith("vlm_s") else None,
                            kind="simulated"))  # fmt: skip
    return rows


def fixed_rows(name: str, case: str, limit_share: float, steps: int) -> list[Row]:
    """Compare many tuned steps with the fixed modes that the largest step needs."""
    every = [Step(name, 32, seed) for seed in range(steps)]
    limit = round(limit_share * every[0].forecaster.profile.device.memory_bytes)
    fixed: dict[tuple[str, ...], float] = {}
    for modes in product(LAYER_MODES, repeat=len(every[0].modules)):
        found = [step.uniform(modes) for step in every]
        if max(peak for _, peak in found) <= limit:
            fixed[modes] = sum(ms for ms, _ in found) / steps
    tuned = [step.tuned(limit) for step in every]
    mean_ms = sum(ms for ms, _ in tuned) / steps
    label = f"{case}, {steps} steps, limit {limit / GIB:.1f} GiB"
    rows = [
        Row(label, "mean step", "ms", mean_ms, min(fixed.values(), default=None), better="lower",
            kind="simulated"),
        Row(label, "largest peak / limit", "fraction", max(p for _, p in tuned) / limit, goal=1.0,
            better="lower", kind="simulated"),
    ]  # fmt: skip
    if fixed:
        rows.append(Row(label, "speedup over the best fixed modes", "x",
                        min(fixed.values()) / mean_ms, 1.0, kind="simulated"))  # fmt: skip
    return rows


def solving(size: str) -> list[list[Row]]:
    """Return the times of solves and their gaps."""
    full = size == "full"
    count = 64 if full else 16
    rows = solving_rows(Step("vlm_l", count), f"vlm_l, {count} microbatches", 20 if full else 3)
    return [rows, highs_rows(Step("vlm_s", 8), "vlm_s, 8 microbatches", 60 if full else 10)]


def gains(size: str) -> Iterator[list[Row]]:
    """Yield the gains over fixed modes and the costs of offloading, one model after the other."""
    limits = (0.4, 0.6, 0.85) if size == "full" else (0.5, 0.85)
    for name in GPUS if size == "full" else ("vlm_s",):
        case = f"{name}, 32 microbatches"
        yield [*offload_rows(Step(name, 32), case), *gain_rows(Step(name, 32), case, limits)]


def fixed(size: str) -> list[list[Row]]:
    """Return the gain over modes that fit in many steps."""
    steps = 10 if size == "full" else 3
    return [fixed_rows("vlm_s", "vlm_s, 32 microbatches", 0.5, steps)]


CASES: dict[str, Callable[[str], Iterable[list[Row]]]] = {
    "solving": solving,
    "gains": gains,
    "fixed": fixed,
}


def main() -> None:
    """Print the tables."""
    run_cases("Per-layer activation checkpointing", __doc__, CASES, "seed 0")


if __name__ == "__main__":
    main()
