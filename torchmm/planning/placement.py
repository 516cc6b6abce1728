"""Where a recipe's modules go: on devices of their own, or on the same ones, and what each takes.

    planned = plan_recipe(recipe, devices=1296, profile=load_profile("a800"))
    recipe = planned.judged.best.recipe

`apart.search` finds sizes of modules on devices of their own; here they are compared with simpler
rules, and with the other placements, whose schedules are simulated too. The result is an ordinary
recipe, which says what was found and can be changed by hand. DistTrain §3, §5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchmm.balance.costs.operators import Profile
from torchmm.balance.orchestration.baselines import ratio_shares, rigid_plan
from torchmm.balance.orchestration.problem import OrchestrationProblem
from torchmm.common.errors import ConfigError
from torchmm.planning.apart.problem import plan_variants
from torchmm.planning.apart.search import (
    EFFORT,
    EFFORT_AT_START,
    Candidate,
    JudgedPlans,
    judge,
    search_plans,
)
from torchmm.planning.executions import simulated_profile
from torchmm.planning.forecast import Forecaster, StepSample
from torchmm.planning.together.encoder_sizes import choose_encoders, leaves_encoders_open
from torchmm.planning.together.search import search_together
from torchmm.recipe.recipe import Recipe

RIGID_TENSOR = 8
BASELINE_SHARE = 0.25
"""Of the effort of the search, for the rule that is searched within."""


@dataclass(frozen=True)
class PlannedRun:
    """What was found for a recipe.

    Attributes:
        problem: that was solved, with the recipe's recomputation and one stage per rank.
        judged: plans of modules apart.
        baselines: what simpler rules give, by name: the fastest that fits, or the first that does
            not; a text where there is none.
    """

    problem: OrchestrationProblem
    judged: JudgedPlans
    baselines: Mapping[str, Candidate | str]


def plan_recipe(
    recipe: Recipe, devices: int, profile: Profile, *, effort: float = EFFORT
) -> PlannedRun:
    """The fastest plan of a recipe's modules on devices of their own, and simpler rules.

    Args:
        devices: of the cluster.
        profile: of one of them.
        effort: actions to simulate, at most.

    Raises:
        ConfigError: as `orchestration_problem`; nothing fits.
    """
    sample = StepSample(recipe)
    variants = plan_variants(recipe, devices, profile, sample)
    search = {"sample": sample, "variants": variants}
    judged = search_plans(recipe, devices, profile, effort=effort, **search)  # type: ignore[arg-type]
    _check_found(judged, devices)
    problem = variants[0].problem
    baselines: dict[str, Candidate | str] = _rigid(recipe, problem, profile, sample)
    within = search_plans(
        recipe,
        devices,
        profile,
        effort=BASELINE_SHARE * effort,
        limits=ratio_shares(problem),
        **search,  # type: ignore[arg-type]
    )
    baselines["FLOP ratio"] = within.best or "no plan within the shares fits"
    return PlannedRun(problem, judged, baselines)


def _check_found(judged: JudgedPlans, devices: int) -> None:
    if judged.best is not None:
        return
    if not judged.candidates:
        raise ConfigError(
            f"orchestration: no plan fits on {devices} devices; use more devices, recompute "
            "activations, or freeze modules"
        )
    steps = [c.forecast.step for c in judged.candidates if c.forecast.step is not None]
    least = min((max(step.peak_bytes) for step in steps), default=0) / 2**30
    problems = "; ".join(sorted({c.forecast.problem for c in judged.candidates} - {""}))
    raise ConfigError(
        f"orchestration: none of {len(judged.candidates)} plans that were simulated on {devices} "
        f"devices fits (the leanest needs {least:.1f} GiB) {problems[:200]}: use more devices, "
        "recompute activations, or freeze modules"
    )


def _rigid(
    recipe: Recipe, problem: OrchestrationProblem, profile: Profile, sample: StepSample
) -> dict[str, Candidate | str]:
    """Megatron-LM's form, with the recipe's pipeline and with the best one, as freely scheduled as
    ours."""
    common = set.intersection(*(set(unit.seconds) for unit in problem.units))
    tensor = max(size for size in common if size <= RIGID_TENSOR)
    pipeline = recipe.parallel.pipeline
    found: dict[str, Candidate | str] = {}
    for name, size in (
        (f"rigid, tensor {tensor}, LLM pipeline {pipeline}", pipeline),
        (f"rigid, tensor {tensor}, best pipeline", None),
    ):
        try:
            plan = rigid_plan(problem, tensor, size)
        except ValueError as error:
            found[name] = str(error)
            continue
        sizes = {unit.name: unit.sizes for unit in plan.units}
        tried = [
            judge(recipe, sizes, profile, sample, schedule=schedule, stages=stages)
            for schedule, stages in FREE_SCHEDULES
        ]
        fine = [each for each in tried if each is not None]
        key = lambda each: (each.step_ms, each.forecast.iteration_ms)  # noqa: E731
        found[name] = min(fine, key=key) if fine else "cannot be run"
    return found


FREE_SCHEDULES = (("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4), ("zero_bubble", 1))
"""With stages of the LLM per rank: what simpler rules may choose from."""


def orchestrated_units(recipe: Recipe, world_size: int) -> Recipe:
    """The recipe with sizes of all modules on ranks of their own that use exactly these ranks: a
    rank that is started is meant to work.

    Raises:
        ConfigError: as `plan_recipe`; no plan uses all ranks.
    """
    profile = simulated_profile(recipe)
    sample = StepSample(recipe)
    effort = EFFORT_AT_START
    judged = search_plans(recipe, world_size, profile, exact=True, effort=effort, sample=sample)
    if judged.best is not None:
        return judged.best.recipe
    fewer = search_plans(recipe, world_size, profile, effort=effort / 10, sample=sample)
    _check_found(fewer, world_size)
    assert fewer.best is not None
    raise ConfigError(
        f"parallel.orchestrate: no plan uses all {world_size} ranks; start {fewer.best.devices} "
        "ranks, or give sizes in [parallel] and [parallel.NAME]"
    )


def orchestrated(recipe: Recipe, world_size: int) -> Recipe:
    """The recipe with sizes of colocated encoders, or of modules apart, chosen if it asks for that.

    Raises:
        ConfigError: nothing fits into memory, or the device is unknown.
    """
    if recipe.parallel.leaves_units_open:
        return orchestrated_units(recipe, world_size)
    if not leaves_encoders_open(recipe):
        return recipe
    profile = simulated_profile(recipe)
    return choose_encoders(Forecaster(recipe, world_size, profile)).recipe


def choose_placement(recipe: Recipe, planned: PlannedRun, profile: Profile) -> list[Candidate]:
    """All placements, the fastest first: the plans that were found, and those of modules that share
    all ranks, of every schedule. Candidates that cannot be planned or do not fit come last.

    Args:
        planned: for the recipe.

    Raises:
        ConfigError: none can be run.
    """
    problem = planned.problem
    layers = min(unit.layers for unit in problem.units)
    candidates = [
        *planned.judged.candidates,
        *search_together(
            recipe,
            problem.devices,
            profile,
            StepSample(recipe),
            tensors=sorted(set.intersection(*(set(unit.seconds) for unit in problem.units))),
            pipelines=[2**n for n in range(layers.bit_length()) if 2**n <= layers],
        ),
    ]
    candidates.sort(key=lambda candidate: candidate.step_ms)
    if candidates[0].step_ms == float("inf"):
        raise ConfigError(
            "parallel: no placement fits into memory: "
            + "; ".join(f"{c.placement} {c.forecast.schedule}" for c in candidates)
        )
    return candidates
