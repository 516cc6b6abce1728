"""Simulate an upper bound on the gain of balancing images over the replicas of a pipeline.

    python benchmarks/balanced_pipelines.py --rows rows.jsonl [--cases NAME ...] [--gpus N ...]

Pipelines do not support `data.balance = "images"`. In this simulation, replicas exchange images of
microbatch i without cost and do not wait for each other, so a real run would gain less. Arms:

- "own": each replica encodes its own images.
- "replicas": the images of microbatch i of all replicas are distributed evenly.
- "even": the images of the complete step are distributed evenly over replicas and microbatches.
  Replicas that exchange images of one microbatch cannot reach this.

The planner searches plans for "own" and "replicas", and all arms simulate the plans of both. The
baseline is the best plan without a pipeline, which may balance its images. No value is fitted and
no device is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from support.harness import (
    Row,
    describe_machine,
    make_parser,
    replace_table,
    report,
)
from support.workloads import QUICK, Workload, add_options, measured_records, select_workloads

from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.image_balancing import (
    ImageBalancer,
    balance_microbatch_images,
    balance_step_images,
)
from torchmm.balance.recipe_simulation.first_microbatches import most_loaded_rank
from torchmm.balance.recipe_simulation.step_simulator import StepSample, StepSimulator
from torchmm.balance.search import plan_search
from torchmm.balance.search.result import SimulatedPlan, fits
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.errors import ConfigError

WORKLOADS = (
    Workload("recipes/papers/pipeweaver_vlm_s", 8),
    Workload("recipes/papers/pipeweaver_vlm_s", 16),
    Workload("recipes/papers/pipeweaver_vlm_s", 64, 128),
    Workload("recipes/papers/pipeweaver_vlm_m", 32),
    Workload("recipes/papers/pipeweaver_vlm_l", 64),
    Workload("recipes/zoo/qwen3_vl_8b", 16),
    Workload("recipes/zoo/qwen3_vl_8b", 64),
    Workload("recipes/zoo/internvit_qwen2_5_7b", 16),
)
METHODS = ("separated", "colocated", "chain")
BUDGET_S = 15.0
LEAST_GAIN = 1.02
"""Gain over the best plan from which a runtime would be worth its lines."""
Shares = list[list[MicrobatchMeta]]
Record = dict[str, Any]


def distribute_over_replicas(balance: ImageBalancer, shares: Shares) -> Shares:
    """Return the tasks of every replica if replicas exchange images of the same microbatch."""
    return _in_groups(balance_step_images(balance, shares))


def distribute_evenly(balance: ImageBalancer, shares: Shares) -> Shares:
    """Return the tasks of every replica if all microbatches of a step exchange images."""
    metas = [meta for share in shares for meta in share]
    even = balance_microbatch_images(metas, balance(metas))
    count = len(shares[0])
    return _in_groups([even[i : i + count] for i in range(0, len(even), count)])


def _in_groups(shares: Shares) -> Shares:
    """Return microbatches whose images pipelines may divide into groups."""
    return [[replace(meta, balanced=False) for meta in share] for share in shares]


class ReplicaForecaster(StepSimulator):
    """Forecasts pipelines whose replicas exchange images of the same microbatch."""

    distribute = staticmethod(distribute_over_replicas)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        modules = tuple(module for module in self.modules if module.kind != "llm")
        self.shares = self.distribute(ImageBalancer(modules), self.shares)
        self.workload = most_loaded_rank(self.modules, self.shares)


class EvenForecaster(ReplicaForecaster):
    """Forecasts pipelines whose microbatches all have images of equal cost."""

    distribute = staticmethod(distribute_evenly)


ARMS: dict[str, type[StepSimulator]] = {
    "own": StepSimulator,
    "replicas": ReplicaForecaster,
    "even": EvenForecaster,
}


def searched_plans(
    workload: Workload,
    sample: StepSample,
    methods: Sequence[str],
    budget_s: float,
    forecaster: type[StepSimulator] = StepSimulator,
) -> list[SimulatedPlan]:
    """Return the best plan of each method.

    Args:
        workload: Model, data and cluster.
        sample: Model and first step of the recipe.
        methods: Methods to search.
        budget_s: Time limit of the search of each method in seconds.
        forecaster: Simulates the plans of the search.
    """
    recipe = sample.recipe
    profile = load_profile(recipe.simulation.device)
    with patch.object(plan_search, "StepSimulator", forecaster):
        found = [
            plan_search.search_plans(
                recipe, workload.gpus, profile, methods=(name,), budget_s=budget_s, sample=sample
            )
            for name in methods
        ]
    return [result.best for result in found if result.best is not None]


def simulated_s(plan: SimulatedPlan, sample: StepSample, forecaster: type[StepSimulator]) -> float:
    """Return the step of a plan in seconds; infinite if the plan does not fit."""
    recipe = plan.recipe
    profile = load_profile(recipe.simulation.device)
    try:
        simulated = forecaster(recipe, plan.devices, profile, sample=sample)
        forecast = simulated.simulate_parallel(recipe.parallel)
    except ConfigError:
        return float("inf")
    if forecast.step is None or not fits(forecast.step):
        return float("inf")
    return forecast.iteration_ms / 1e3


def measure(workload: Workload, budget_s: float, methods: Sequence[str] = METHODS) -> Record:
    """Return the row of a workload.

    Args:
        workload: Model, data and cluster.
        budget_s: Time limit of the search of each method and arm in seconds.
        methods: Pipeline methods.
    """
    sample = StepSample(workload.load())
    plain = searched_plans(workload, sample, ("fsdp",), budget_s)
    plans = searched_plans(workload, sample, methods, budget_s)
    fitting = [each.method for each in plans]
    plans += searched_plans(workload, sample, fitting, budget_s, ReplicaForecaster)
    arms: dict[str, Record] = {}
    for arm, forecaster in ARMS.items():
        steps = [(simulated_s(each, sample, forecaster), i) for i, each in enumerate(plans)]
        step_s, best = min(steps)
        sizes = f"{plans[best].method}, {plans[best].plan.schedule}: {plans[best].sizes}"
        arms[arm] = {"step_s": step_s, "sizes": sizes}
    return {
        "workload": workload.title,
        "search_s": budget_s,
        "no pipeline": {"step_s": plain[0].step_ms / 1e3, "sizes": plain[0].sizes}
        if plain
        else None,
        "pipelines": arms,
    }


def gain(record: Record, arm: str) -> float:
    """Return the step time of the best plan without an arm over that with the arm."""
    plain = record["no pipeline"]
    before = [record["pipelines"]["own"]["step_s"], *([plain["step_s"]] if plain else [])]
    return float(min(before) / min([record["pipelines"][arm]["step_s"], *before]))


def markdown(records: Sequence[Record]) -> str:
    """Return the table of the results page."""
    head = ["workload", "search (CPU s)", "no pipeline (s)"]
    head += [f"pipeline, {arm} (s)" for arm in ARMS]
    head += ["own / replicas (x)", "gain (x)"]
    lines = [f"| {' | '.join(head)} |", "|---|" + "--:|" * (len(head) - 1)]
    for record in records:
        arms, plain = record["pipelines"], record["no pipeline"]
        cells = [record["workload"], f"{record['search_s']:g}"]
        cells += [f"{plain['step_s']:.3g}" if plain else "-"]
        cells += [f"{arms[arm]['step_s']:.3g}" for arm in ARMS]
        cells += [f"{arms['own']['step_s'] / arms['replicas']['step_s']:.3f}"]
        cells += [f"{gain(record, 'replicas'):.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table_rows(record: Record) -> list[Row]:
    """Return the rows of one workload for the common table and JSON format."""
    title, plain = record["workload"], record["no pipeline"]
    steps = {f"pipeline, {arm}": each["step_s"] for arm, each in record["pipelines"].items()}
    if plain:
        steps["no pipeline, balanced images"] = plain["step_s"]
    rows = [
        Row(title, f"step, {name}", "s", step_s, better="lower", kind="simulated")
        for name, step_s in steps.items()
    ]
    value = gain(record, "replicas")
    return [
        *rows,
        Row(title, "best plan without / with", "x", value, goal=LEAST_GAIN, kind="simulated"),
    ]


def main() -> None:
    """Simulate the rows and print the table."""
    parser = make_parser((__doc__ or "").splitlines()[0])
    add_options(parser, BUDGET_S)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    workloads, budget_s = select_workloads(arguments, QUICK if arguments.quick else WORKLOADS)
    methods = METHODS[:1] if arguments.quick else METHODS
    shown = measured_records(
        arguments, workloads, lambda workload: measure(workload, budget_s, methods)
    )
    print(markdown(shown))
    if arguments.page is not None:
        replace_table(arguments.page, markdown(shown))
    rows = [row for record in shown for row in table_rows(record)]
    machine = describe_machine(torch.device("cpu"))
    report(f"Images balanced over pipeline replicas, simulated; {machine}", rows, arguments.json)


if __name__ == "__main__":
    main()
