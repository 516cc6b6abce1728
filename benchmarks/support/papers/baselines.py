"""Placements without orchestration, to compare the optimum with, and plans as recipes.

- Rigid (Megatron-LM, DistTrain §2.1): one tensor- and data-parallel size for all units, one
  pipeline stage for every encoder and generator.
- FLOP ratio (DistTrain §8.2.1): nodes in proportion to the FLOPs of a unit. Sizes within the
  shares are the best that are found, which flatters the baseline: the paper does not say how it
  chooses them.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchmm.balance.disttrain.orchestration.problem import OrchestrationProblem
from torchmm.balance.disttrain.orchestration.search import (
    OrchestrationPlan,
    UnitSizes,
    evaluate_sizes,
)
from torchmm.balance.search.plan_space import with_recompute
from torchmm.common.module_names import LLM
from torchmm.recipe.mesh_sizes import AXES
from torchmm.recipe.recipe import Recipe


def rigid_plan(
    problem: OrchestrationProblem, tensor: int = 8, pipeline: int | None = None
) -> OrchestrationPlan:
    """Return the fastest plan of the form of Megatron-LM.

    Args:
        tensor: Tensor-parallel size of all units.
        pipeline: Pipeline size of the LLM. None: the fastest.

    Raises:
        ValueError: No plan fits.
    """
    batch = problem.global_batch_size // problem.microbatch_size
    llm = problem.llm
    count = len(problem.units)
    most = problem.units[llm].layers // problem.units[llm].virtual_stages
    best: OrchestrationPlan | None = None
    for stages in range(1, most + 1) if pipeline is None else [pipeline]:
        replicas = problem.devices // (tensor * (stages + count - 1))
        for data in range(1, replicas + 1):
            if batch % data:
                continue
            sizes = [UnitSizes(tensor, data, stages if i == llm else 1) for i in range(count)]
            plan = evaluate_sizes(problem, sizes)
            if plan.fits and (best is None or plan.step_s < best.step_s):
                best = plan
    if best is None:
        number = "any number of" if pipeline is None else pipeline
        raise ValueError(
            f"no rigid plan with tensor = {tensor} and {number} pipeline ranks of the LLM fits on "
            f"{problem.devices} devices; use more devices or other sizes"
        )
    return best


def ratio_shares(problem: OrchestrationProblem, node: int = 8) -> dict[str, int]:
    """Return the number of devices by unit, in proportion to `UnitCosts.flops`.

    Units receive complete nodes: one per unit, and each further node for the unit with the fewest
    devices for its FLOPs. Devices that no sizes use stay idle.

    Args:
        node: Devices of a node; fewer if there are fewer nodes than units.

    Raises:
        ValueError: FLOPs are missing.
    """
    if not sum(unit.flops for unit in problem.units) > 0:
        raise ValueError("FLOPs of all units are 0; set UnitCosts.flops")
    while problem.devices // node < len(problem.units):
        node -= 1
    nodes = {unit.name: 1 for unit in problem.units}
    for _ in range(problem.devices // node - len(problem.units)):
        poorest = max(problem.units, key=lambda unit: unit.flops / nodes[unit.name])
        nodes[poorest.name] += 1
    return {name: node * count for name, count in nodes.items()}


def sized_recipe(
    recipe: Recipe,
    sizes: Mapping[str, UnitSizes],
    *,
    schedule: str = "1f1b",
    stages: int = 1,
    recompute: str | None = None,
) -> Recipe:
    """Return the recipe with the sizes of a plan on separate ranks.

    Data-parallel ranks of a module are one FSDP2 group. Reordering is turned on, because ranks of
    encoders wait for each other without it. Other keys stay, unless they contradict the placement.

    Args:
        recipe: Recipe of the model.
        sizes: By module.
        schedule: Schedule, with `stages` of the LLM per rank.
        recompute: Mode of modules without their own. If None, that of the recipe.
    """
    module_sizes = {
        name: dict(zip(AXES, (size.pipeline, 1, size.data, size.tensor), strict=True))
        for name, size in sizes.items()
    }
    parallel = recipe.parallel.model_dump(exclude_none=True)
    for name in module_sizes:
        parallel.setdefault(name, {})
        parallel[name].pop("segments", None)
    parallel |= module_sizes.pop(LLM)
    for name, size in module_sizes.items():
        parallel[name] |= size
    parallel.pop(LLM, None)
    parallel |= {"placement": "disaggregated", "schedule": schedule, "virtual_stages": stages}
    if parallel["reshard_after_forward"] == "always":
        parallel["reshard_after_forward"] = "default"
    parallel["gradient_reduction"] = "step"
    if sizes[LLM].tensor == 1:
        parallel |= {"async_tensor_parallel": False, "async_tensor_backend": "auto"}
    table = recipe.model_dump(exclude_none=True)
    table["parallel"] = parallel
    table["data"]["reorder"] = "both"
    table["simulation"]["gpus"] = sum(size.devices for size in sizes.values())
    sized = Recipe.model_validate(table)
    return sized if recompute is None else with_recompute(sized, recompute)
