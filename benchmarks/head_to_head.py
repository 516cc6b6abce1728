"""Ways of training a multimodal model, simulated on the same models, data and cluster.

    python benchmarks/head_to_head.py [--quick] [--json FILE] [--pictures DIRECTORY]

Megatron-LM (whole encoder before the LLM's first stage), Megatron-LM balanced (all layers in one
chain), Optimus (encoders in the LLM's bubbles), PipeWeaver (segments of each module in a searched
order; without its layer tuning) and DistTrain (modules on devices of their own, microbatches
reordered). All of them are plans of this repository, which its runtime executes, timed by one
simulator with one cost model: nothing is fitted, and no device was measured. Models and data are
those of the papers' recipes (recipes/papers), each paper's with its own; the first two differ in
how much microbatches differ.

Sizes: "printed" are the recipe's pipeline and tensor-parallel sizes, the same for all but
DistTrain, which chooses sizes itself. "chosen" lets the others choose too: the fastest that fits of
all pipeline and tensor-parallel sizes in powers of two, on as many devices. Optimus chooses encoder
plans in both, and DistTrain among its planner's six best, by simulation.

A step that does not fit into memory is shown, but not counted as the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import Row, describe_machine, make_parser, report

from torchmm.balance.cost_model import CostModel
from torchmm.balance.operators import Profile
from torchmm.balance.optimus import optimus
from torchmm.balance.plan_costs import plan_costs
from torchmm.balance.profiles import load_profile
from torchmm.balance.simulator import SimulatedStep, simulate
from torchmm.config import Recipe
from torchmm.encoder_pipelines import encoder_combinations, with_pipelines
from torchmm.errors import ConfigError
from torchmm.forecast import Forecast, Forecaster
from torchmm.module_costs import module_executions
from torchmm.orchestration import plan_recipe, planned_recipe
from torchmm.pipelining.draw import Panel, draw_timelines
from torchmm.pipelining.lowering import lower_plan
from torchmm.recipe import load_recipe
from torchmm.step_plan import plan_layout, step_graph

RECIPES = Path(__file__).parent.parent / "recipes" / "papers"
BASELINE = "Megatron-LM balanced"
EVALUATIONS, ALTERNATIVES = 64, 5


class Case(NamedTuple):
    """A model with its data on a cluster."""

    recipe: str
    gpus: int
    changes: tuple[str, ...] = ()
    choose: bool = False
    """Whether to let all methods choose their sizes."""

    @property
    def title(self) -> str:
        """Model and number of devices."""
        return f"{self.recipe}, {self.gpus} GPUs"


CASES = (
    Case("pipeweaver_vlm_s", 16, choose=True),
    Case("pipeweaver_vlm_m", 32, choose=True),
    Case("optimus_model_a", 64),
    Case("optimus_vit22b_gpt175b", 1536),
    Case("disttrain_mllm_72b", 160, ("--training.global_batch_size=64",)),
)
QUICK = (Case("pipeweaver_vlm_s", 16, ("--training.global_batch_size=12",)),)


@dataclass(frozen=True)
class Result:
    """A method's step."""

    method: str
    step: SimulatedStep
    mfu: float
    note: str = ""

    @property
    def step_s(self) -> float:
        """Duration."""
        return self.step.makespan_ms / 1e3

    @property
    def peak_gib(self) -> float:
        """Memory of the rank that needs most."""
        return max(self.step.peak_bytes) / 2**30


def loaded(case: Case, gpus: int | None = None, **parallel: Any) -> Recipe:
    """The case's recipe with other parallel sizes."""
    more = [f"--parallel.{key}={value}" for key, value in parallel.items()]
    return load_recipe(RECIPES / f"{case.recipe}.toml", [*case.changes, *more], gpus).recipe


def results(case: Case, profile: Profile, **parallel: Any) -> Iterator[Result]:
    """All methods with the recipe's sizes, or some others."""
    forecaster = Forecaster(loaded(case, case.gpus, **parallel), case.gpus, profile)
    methods: tuple[tuple[str, Callable[[], Result | None]], ...] = (
        ("Megatron-LM", lambda: _megatron(case, profile, parallel)),
        (BASELINE, lambda: _result(BASELINE, forecaster.forecast("megatron_balanced"))),
        ("Optimus", lambda: _optimus(forecaster)),
        ("PipeWeaver", lambda: _result("PipeWeaver", forecaster.forecast("searched"))),
    )
    for _, run in methods:
        found = run()
        if found is not None:
            yield found


def _result(method: str, forecast: Forecast, note: str = "") -> Result | None:
    """None where the method cannot run the model with these sizes."""
    if forecast.step is None:
        return None
    return Result(method, forecast.step, forecast.mfu, note)


def _megatron(case: Case, profile: Profile, parallel: dict[str, Any]) -> Result | None:
    """One stage per rank: the papers print no virtual stages for it."""
    recipe = loaded(case, case.gpus, **{**parallel, "virtual_stages": 1})
    forecast = Forecaster(recipe, case.gpus, profile).forecast("megatron")
    return _result("Megatron-LM", forecast)


def _optimus(forecaster: Forecaster) -> Result | None:
    """The fastest of all encoder plans that fit, planned with the costs that time it."""
    found: list[Result] = []
    for pipelines in encoder_combinations(forecaster):
        for images in (None, 4):
            recipe = with_pipelines(forecaster.recipe, pipelines, sub_microbatch_images=images)
            step = optimus_step(forecaster, recipe)
            forecast = forecaster.rate("optimus", step)
            sizes = ", ".join(f"{name} {size}" for name, size in pipelines.items())
            parts = f"; {images} images at once" if images else ""
            found.append(Result("Optimus", step, forecast.mfu, f"pipeline ranks: {sizes}{parts}"))
    return min(found, key=_key, default=None)


def optimus_step(forecaster: Forecaster, recipe: Recipe) -> SimulatedStep:
    """The step of colocated encoders in one plan."""
    changes = {"placement": "colocated", "schedule": "optimus"}
    parallel = recipe.parallel.model_copy(update={**changes, "pipeline": forecaster.ranks.pipeline})
    modules, metas = forecaster.modules, forecaster.workload.microbatches
    executions = module_executions(
        parallel, recipe.activation_checkpoint, modules, forecaster.ranks, {}
    )
    sharded = any(execution.shard > 1 for execution in executions.values())
    graph = step_graph(plan_layout(parallel, modules, metas), parallel, metas)
    model = CostModel(forecaster.profile, recipe.training.dtype, executions)
    costs = plan_costs(graph, modules, metas, model)
    sharding = "step" if sharded else "none"
    planned = optimus(graph, costs, sharding=sharding, evaluations=EVALUATIONS)
    plan = lower_plan(planned.order, planned.graph, {}, sharding=sharding)
    return simulate(plan, costs)


def _disttrain(case: Case, profile: Profile) -> Result | None:
    """The fastest of its planner's best plans, as simulated."""
    recipe, found = loaded(case), []
    try:
        planned = plan_recipe(recipe, case.gpus, profile, alternatives=ALTERNATIVES).found
    except ConfigError:
        return None
    for plan in (planned.best, *(other.plan for other in planned.alternatives)):
        try:
            forecast = Forecaster(planned_recipe(recipe, plan), plan.devices, profile).forecast()
        except ConfigError:  # a model cannot be cut for every plan
            continue
        sizes = (
            f"{unit.name} {s.pipeline} x {s.data} x {s.tensor}"
            for unit in plan.units
            for s in [unit.sizes]
        )
        note = f"pipeline x data x tensor: {', '.join(sizes)}; {plan.devices} devices"
        result = _result("DistTrain", forecast, note)
        found += [result] if result else []
    return min(found, key=_key, default=None)


def _key(found: Result) -> tuple[bool, float]:
    """Sorts: what fits first, then by time."""
    return not found.step.fits, found.step_s


def chosen(case: Case, profile: Profile) -> list[Result]:
    """Each method with its fastest sizes that fit."""
    best: dict[str, Result] = {}
    for tensor, pipeline in product((1, 2, 4, 8), (2, 4, 8, 16)):
        if case.gpus % (tensor * pipeline):
            continue
        sizes = {"pipeline": pipeline, "tensor": tensor, "sequence_parallel": _toml(tensor > 1)}
        try:
            every = list(results(case, profile, **sizes))
        except ConfigError:  # sizes the model cannot be cut for
            continue
        for found in every:
            own = f"pipeline {pipeline}, tensor {tensor}"
            note = f"{own}; {found.note}" if found.note else own
            mine = Result(found.method, found.step, found.mfu, note)
            if found.method not in best or _key(mine) < _key(best[found.method]):
                best[found.method] = mine
    return list(best.values())


def _toml(value: bool) -> str:
    return str(value).lower()


def case_rows(case: Case, title: str, every: list[Result]) -> list[Row]:
    """Rows of methods: step, MFU, memory."""
    base = next((found for found in every if found.method == BASELINE), None)
    fastest = min(every, key=_key)
    rows = []
    for found in every:
        name = found.method + (" (fastest)" if found is fastest else "")
        name += "" if found.step.fits else " (does not fit)"
        base_s = base.step_s if base else None

        def row(
            metric: str, unit: str, ours: float, base: float | None = None, name: str = name,
            **more: Any,
        ) -> Row:  # fmt: skip
            return Row(title, f"{metric}, {name}", unit, ours, base, kind="simulated", **more)

        rows += [
            row("step", "s", found.step_s, base_s, better="lower"),
            row("MFU", "", found.mfu),
            row("idle", "", found.step.timeline.bubble_fraction, better="lower"),
            row("memory", "GiB", found.peak_gib, better="lower"),
        ]
    return rows


def draw(case: Case, every: list[Result], directory: Path) -> Path:
    """All methods' steps on one time axis."""
    panels = [
        Panel(f"{found.method}", found.step.records, found.step.plan.graph.layout)
        for found in every
    ]
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"head_to_head_{case.recipe}.svg"
    file.write_text(draw_timelines(f"{case.title}, simulated", panels))
    return file


def run_case(case: Case, pictures: Path | None = None) -> list[Row]:
    """All rows of a case."""
    profile = load_profile(loaded(case).simulation.device)
    apart = _disttrain(case, profile)
    every = [*results(case, profile), *([apart] if apart else [])]
    rows = case_rows(case, f"{case.title}, printed sizes", every)
    for found in every:
        if found.note:
            print(f"{case.title}, {found.method}: {found.note}")
    if pictures is not None:
        print(draw(case, every, pictures))
    if case.choose:
        free = [*chosen(case, profile), *([apart] if apart else [])]
        rows += case_rows(case, f"{case.title}, chosen sizes", free)
        for found in free:
            print(f"{case.title}, chosen, {found.method}: {found.note}")
    return rows


def main() -> None:
    """Prints the table."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--cases", nargs="*", metavar="RECIPE", help="only those of these recipes")
    parser.add_argument("--pictures", type=Path, metavar="DIRECTORY", help="draw the steps there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = QUICK if arguments.quick else CASES
    if arguments.cases:
        cases = tuple(case for case in cases if case.recipe in arguments.cases)
    rows = [row for case in cases for row in run_case(case, arguments.pictures)]
    machine = describe_machine(torch.device("cpu"))
    report(f"Head to head, simulated; {machine}", rows, arguments.json)


if __name__ == "__main__":
    main()
