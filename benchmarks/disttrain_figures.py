"""DistTrain's figures 15 to 20, simulated: overall, orchestration, reordering, frozen modules.

Models are the recipes of MLLM-9B, -15B and -72B on A800 devices, which nobody has measured here: no
number is fitted. A plan's step is simulated action by action on a global batch of sampled
sequences, in the replica groups with most to do. Megatron-LM is as in §8: tensor 8; LLM pipelines
of 1, 2 and 10; one stage each for encoder and generator, which are copied to the eight devices of a
stage and divide a microbatch's images among them; batches as sampled. "FLOP ratio" gets nodes in
proportion to FLOPs and the best sizes within. Ours: of the three best plans the one whose simulated
step is fastest, with samples reordered, and interleaved 1F1B in the LLM where that is faster.

The paper prints most bars only as pictures and gives ranges over models in the text: where a value
is a range, its ends stand next to the least and the most of ours. Throughput is of the whole job,
whose number of devices differs a little; MFU is of the devices in use. U-Net and LAION-400M have
stand-ins, see recipes/papers/bases/disttrain.toml.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from support.harness import Row, describe_machine, make_parser, report

from torchmm.balance.costs.execution import Execution
from torchmm.balance.costs.flops import microbatch_flops
from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.costs.step_costs import plan_costs
from torchmm.balance.orchestration.baselines import ratio_plan, rigid_plan
from torchmm.balance.orchestration.search import OrchestrationPlan, orchestrate
from torchmm.balance.reordering.step import StepReorder
from torchmm.balance.simulation.simulator import simulate
from torchmm.balance.simulation.workload import sample_microbatches
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.errors import ConfigError, PlanError
from torchmm.common.layers import ModuleDescription
from torchmm.planning.placement import fits, orchestration_problem, planned_recipe
from torchmm.planning.reordering import reordered
from torchmm.planning.resolved import recipe_model
from torchmm.planning.step import plan_layout, plan_step
from torchmm.recipe.placement_sizes import resolve_units
from torchmm.recipe.read import load_recipe
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.sizes import MeshSizes, replica_groups

RECIPES = Path(__file__).parents[1] / "recipes" / "papers"
PROFILE = load_profile("a800")
MODELS = {"9b": 1, "15b": 2, "72b": 10}
"""Pipeline ranks of the LLM under Megatron-LM."""
LARGE = 1296, dict.fromkeys(MODELS, 1920)
SMALL = 96, {"9b": 128, "15b": 64, "72b": 40}
"""Devices ("up to" 1296, and up to 98) and global batches of §8.1 and §8.2."""
TENSOR = 8
PARTS = ("vision", "llm", "generator")
FROZEN = {
    "only projectors": PARTS,
    "encoder": ("llm", "generator"),
    "LLM": ("vision", "generator"),
    "generator": ("vision", "llm"),
}
"""By what is trained in addition to the projectors: what is not (§8.3.1)."""
VIRTUAL_STAGES = (1, 2, 4)
SIMULATED = 3
"""Best plans of which the fastest is chosen by simulation."""
HEAVIEST = 3
"""Replica groups that are simulated: those with most to do."""


class Step(NamedTuple):
    """A simulated step of a whole job."""

    seconds: float
    mfu: float
    devices: int
    fits: bool


@dataclass(frozen=True)
class Case:
    """A model on a cluster.

    Attributes:
        name: of the recipe.
        frozen: modules that are not trained.
    """

    name: str
    devices: int
    batch: int
    frozen: tuple[str, ...] = ()

    @property
    def recipe(self) -> Recipe:
        """The model's recipe with this batch and these frozen modules."""
        changes = ["--training.global_batch_size", str(self.batch)]
        changes += ["--freeze.modules", str(list(self.frozen))]
        return load_recipe(RECIPES / f"disttrain_mllm_{self.name}.toml", changes).recipe


@cache
def modules_of(case: Case) -> list[ModuleDescription]:
    """Encoder, LLM and generator."""
    model = recipe_model(case.recipe)
    return [module.describe() for module in model.modality_modules()]


@cache
def packs_of(case: Case) -> list[MicrobatchMeta]:
    """The global batch."""
    recipe = case.recipe
    length = recipe.training.sequence_length
    return sample_microbatches(recipe.simulation, case.batch, sequence_length=length)


@cache
def problem_of(case: Case) -> Any:
    """The case for the orchestrator."""
    return orchestration_problem(case.recipe, case.devices, PROFILE)


@cache
def best_plan(case: Case) -> tuple[OrchestrationPlan, int]:
    """Of the best plans, each with several numbers of virtual stages of the LLM, the one that is
    fastest when simulated, and fits."""
    found = orchestrate(problem_of(case), alternatives=SIMULATED - 1)
    plans = [found.best, *found.alternatives]
    tried = [(plan, stages) for plan in plans for stages in VIRTUAL_STAGES]

    def seconds(choice: tuple[OrchestrationPlan, int]) -> float:
        step = run_plan(case, choice[0], "both", choice[1])
        return step.seconds if step is not None and step.fits else float("inf")

    return min(tried, key=seconds)


def ours(case: Case, reorder: str = "both") -> Step:
    """The best plan."""
    step = run_plan(case, best_plan(case)[0], reorder, best_plan(case)[1])
    assert step is not None
    return step


@cache
def run_plan(
    case: Case, plan: OrchestrationPlan, reorder: str, virtual_stages: int = 1
) -> Step | None:
    """A plan, simulated; None if the LLM has too few layers."""
    recipe = planned_recipe(case.recipe, plan)
    if virtual_stages > 1:
        changes = {"schedule": "interleaved_1f1b", "virtual_stages": virtual_stages}
        parallel = recipe.parallel.model_copy(update=changes)
        recipe = recipe.model_copy(update={"parallel": parallel})
    try:
        return run(case, recipe, plan.devices, reorder)
    except (ConfigError, PlanError):
        return None


@cache
def megatron(case: Case) -> Step:
    """Rigid sizes; images of a microbatch are divided among the devices of a stage."""
    plan = rigid_plan(problem_of(case), TENSOR, MODELS[case.name])
    return run(case, *copied_in_stages(planned_recipe(case.recipe, plan), plan), "none")


@cache
def flop_ratio(case: Case) -> Step:
    """Nodes in proportion to FLOPs."""
    plan = ratio_plan(problem_of(case))
    return run(case, planned_recipe(case.recipe, plan), plan.devices, "both")


def copied_in_stages(recipe: Recipe, plan: OrchestrationPlan) -> tuple[Recipe, int]:
    """Encoder and generator whole on every device of their stages, image by image."""
    table = recipe.model_dump(exclude_none=True)
    for unit in plan.units:
        if unit.name != "llm":
            table["parallel"][unit.name] |= {
                "tensor": 1, "shard": unit.sizes.data * TENSOR, "sub_microbatch_images": 1,
            }  # fmt: skip
    return Recipe.model_validate(table), plan.devices


def run(case: Case, recipe: Recipe, devices: int, reorder: str) -> Step:
    """Simulates a step of modules on devices of their own.

    Args:
        recipe: with their sizes.
        reorder: as `data.reorder`.
    """
    modules, packs = modules_of(case), packs_of(case)
    units = resolve_units(recipe.parallel, [m.name for m in modules], devices)
    groups = replica_groups(units)
    model = cost_model(recipe, units)
    layout = plan_layout(recipe.parallel, modules, packs[:256], units)
    balance, order = reorder in ("intra", "both"), reorder in ("inter", "both")
    schedule = recipe.parallel.schedule
    arrange = StepReorder(
        modules, model, layout, schedule, groups, 1, balance=balance, order=order
    )  # fmt: skip
    shares = reordered(arrange, packs)
    steps = [
        simulate(plan, plan_costs(plan.graph, modules, share, model))
        for share in heaviest(shares, arrange)
        for plan in [plan_step(layout, recipe.parallel, modules, share)]
    ]
    seconds = max(step.makespan_ms for step in steps) / 1e3
    flops = sum(
        f.forward + f.backward for pack in packs for f in microbatch_flops(modules, pack).values()
    )
    peak = PROFILE.device.peak_flops[recipe.training.dtype]
    return Step(seconds, flops / (seconds * devices * peak), devices, all(map(fits, steps)))


def cost_model(recipe: Recipe, units: dict[str, MeshSizes]) -> CostModel:
    """Costs of modules with their own sizes."""
    executions = {
        name: Execution(
            tensor=own.tensor,
            sequence_parallel=recipe.parallel.sequence_parallel,
            shard=own.shard,
            recompute=recipe.activation_checkpoint.mode,
        )
        for name, own in units.items()
    }
    return CostModel(PROFILE, recipe.training.dtype, executions)


def heaviest(
    shares: Sequence[list[MicrobatchMeta]], arrange: StepReorder
) -> list[list[MicrobatchMeta]]:
    """The groups with most to do at any place of the pipeline."""
    most = []
    for share in shares:
        forward_SN, backward_SN = arrange.pack_ms(share)
        most.append(float((forward_SN + backward_SN).sum(axis=1).max()))
    first = sorted(range(len(shares)), key=lambda i: -most[i])[:HEAVIEST]
    return [shares[i] for i in first]


def overall_rows(names: Sequence[str]) -> list[Row]:
    """Figures 15 and 16."""
    rows = []
    gains: dict[str, list[float]] = {"MFU": [], "throughput": []}
    for name in names:
        case = Case(name, LARGE[0], LARGE[1][name])
        found, baseline = ours(case), megatron(case)
        title = f"Fig. 15/16, {title_of(case)}"
        rows += step_rows(title, found, baseline, 54.7 if name == "72b" else None)
        ratios = found.mfu / baseline.mfu, baseline.seconds / found.seconds
        if name == "72b":
            rows += [
                row(title, "MFU over Megatron-LM", "x", ratios[0], paper=1.2),
                row(title, "throughput over Megatron-LM", "x", ratios[1], paper=1.3),
            ]
        else:
            gains["MFU"].append(ratios[0])
            gains["throughput"].append(ratios[1])
    rows += range_rows("Fig. 15, 9B and 15B", "MFU over Megatron-LM", gains["MFU"], 1.7, 2.8)
    rows += range_rows(
        "Fig. 16, 9B and 15B", "throughput over Megatron-LM", gains["throughput"], 1.7, 2.2
    )
    return rows


def orchestration_rows(names: Sequence[str]) -> list[Row]:
    """Figure 17."""
    rows, mfu, throughput = [], [], []
    for name in names:
        case = Case(name, SMALL[0], SMALL[1][name])
        found = ours(case)
        for rival, step in (("Megatron-LM", megatron(case)), ("FLOP ratio", flop_ratio(case))):
            rows += step_rows(f"Fig. 17, {title_of(case)}, against {rival}", found, step, None)
            mfu.append(found.mfu / step.mfu)
            throughput.append(step.seconds / found.seconds)
    rows += range_rows("Fig. 17, all", "MFU over baselines", mfu, 1.3, 2.7)
    return rows + range_rows("Fig. 17, all", "throughput over baselines", throughput, 1.4, 2.7)


def reordering_rows(names: Sequence[str]) -> list[Row]:
    """Figure 18."""
    rows, gains = [], []
    for name in names:
        case = Case(name, SMALL[0], SMALL[1][name])
        steps = {mode: ours(case, mode) for mode in ("none", "intra", "inter", "both")}
        title = f"Fig. 18, {title_of(case)}"
        rows += [
            row(title, f"throughput, {mode} over random order", "x", steps["none"].seconds / s)
            for mode in ("intra", "inter", "both")
            for s in [steps[mode].seconds]
        ]
        gains.append(steps["none"].seconds / steps["both"].seconds)
    return rows + range_rows("Fig. 18, all", "throughput over random order", gains, 1.03, 1.11)


def frozen_rows(names: Sequence[str]) -> list[Row]:
    """Figures 19 and 20."""
    rows, mfu, throughput = [], [], []
    for name in names:
        for trained, frozen in FROZEN.items():
            case = Case(name, SMALL[0], SMALL[1][name], tuple(frozen))
            found, step = ours(case), megatron(case)
            rows += step_rows(f"Fig. 19/20, {title_of(case)}, {trained}", found, step, None)
            mfu.append(found.mfu / step.mfu)
            throughput.append(step.seconds / found.seconds)
    rows += range_rows("Fig. 19, all", "MFU over Megatron-LM", mfu, 1.4, 2.9)
    return rows + range_rows("Fig. 20, all", "throughput over Megatron-LM", throughput, 1.2, 2.9)


def title_of(case: Case) -> str:
    """A case in words."""
    return f"MLLM-{case.name.upper()}, batch {case.batch}"


def step_rows(title: str, found: Step, baseline: Step, paper_mfu: float | None) -> list[Row]:
    """MFU and time of both."""
    devices = f"{found.devices} and {baseline.devices} devices"
    return [
        Row(title, f"MFU, {devices}", "%", 100 * found.mfu, 100 * baseline.mfu, paper_mfu,
            kind="simulated"),
        Row(title, "step", "s", found.seconds, baseline.seconds, None, None, "lower", "simulated"),
    ]  # fmt: skip


def row(title: str, metric: str, unit: str, value: float, paper: float | None = None) -> Row:
    """A ratio, 1 being the baseline's."""
    return Row(title, metric, unit, value, 1.0, paper, kind="simulated")


def range_rows(
    title: str, metric: str, gains: Sequence[float], least: float, most: float
) -> list[Row]:
    """The ends of a range; none of nothing."""
    if not gains:
        return []
    return [
        row(title, f"{metric}, least", "x", min(gains), least),
        row(title, f"{metric}, most", "x", max(gains), most),
    ]


FIGURES: dict[str, Callable[[Sequence[str]], list[Row]]] = {
    "overall": overall_rows,
    "orchestration": orchestration_rows,
    "reordering": reordering_rows,
    "frozen": frozen_rows,
}


def main() -> None:
    """Prints the table."""
    arguments = make_parser(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    # In short runs the overall figures are left out: plans of 1296 devices take longest.
    names = ["9b"] if arguments.quick else list(MODELS)
    figures = [f for f in FIGURES if f != "overall" or not arguments.quick]
    rows = [row for figure in figures for row in FIGURES[figure](names)]
    title = f"DistTrain's figures, simulated; {describe_machine(torch.device('cpu'))}"
    report(title, rows, arguments.json)


if __name__ == "__main__":
    main()
