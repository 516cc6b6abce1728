"""How modules are placed without orchestration: what the optimum is compared with.

- Rigid (Megatron-LM, DistTrain §2.1): one tensor- and data-parallel size for all units, one
  pipeline stage for every encoder and generator.
- FLOP ratio (DistTrain §8.2.1): nodes in proportion to the FLOPs of a unit. Sizes within the
  shares are the best that are found, which flatters the baseline: the paper does not say how it
  chooses them.
"""

from __future__ import annotations

from torchmm.balance.disttrain.orchestration.problem import OrchestrationProblem
from torchmm.balance.disttrain.orchestration.search import OrchestrationPlan, UnitSizes, plan_with


def rigid_plan(
    problem: OrchestrationProblem, tensor: int = 8, pipeline: int | None = None
) -> OrchestrationPlan:
    """The fastest plan of Megatron-LM's form.

    Args:
        tensor: size for all units.
        pipeline: of the LLM; None: the best.

    Raises:
        ValueError: none fits.
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
            plan = plan_with(problem, sizes)
            if plan.fits and (best is None or plan.step_s < best.step_s):
                best = plan
    if best is None:
        wanted = "any number of" if pipeline is None else pipeline
        raise ValueError(
            f"no rigid plan with tensor = {tensor} and {wanted} pipeline ranks of the LLM fits on "
            f"{problem.devices} devices; use more devices or other sizes"
        )
    return best


def ratio_shares(problem: OrchestrationProblem, node: int = 8) -> dict[str, int]:
    """Devices in proportion to `UnitCosts.flops`, by unit.

    Nodes are given whole: one to each unit, the others one by one to the unit that has least for
    its FLOPs. Devices that no sizes make use of stay idle.

    Args:
        node: devices of a node; less if there are not as many nodes as units.

    Raises:
        ValueError: FLOPs are not given.
    """
    if not sum(unit.flops for unit in problem.units) > 0:
        raise ValueError("FLOPs of all units are 0: give UnitCosts.flops")
    while problem.devices // node < len(problem.units):
        node -= 1
    nodes = {unit.name: 1 for unit in problem.units}
    for _ in range(problem.devices // node - len(problem.units)):
        poorest = max(problem.units, key=lambda unit: unit.flops / nodes[unit.name])
        nodes[poorest.name] += 1
    return {name: node * count for name, count in nodes.items()}
