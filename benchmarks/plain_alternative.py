"""Compare the best plan without a pipeline, the best pipeline, and the plan of the planner.

    python benchmarks/plain_alternative.py --rows rows.jsonl [--cases NAME ...] [--gpus N ...]

For each model, data and cluster of `support/workloads.py`, this benchmark simulates the best plan
without a pipeline (FSDP2 and HSDP, also with sequences reordered over the ranks) and the best plan
of each pipeline method of the planner (chain, separated, colocated, disaggregated). It then runs
the planner over all methods and checks that its plan is at least as fast. One cost model computes
all plans. No value is fitted and no device is measured.

Plans without a pipeline are enumerated by `support/cases/plain_methods.py`, and some pipelines ("by
hand") by `support/cases/hand_pipelines.py`, to check the planner. All plans have the same memory
limit. All methods but "FSDP2" and "HSDP" may reorder the sequences of a step.

`--rows` appends each finished row to a file of JSON lines. A later call with the same file skips
these rows. `--report` only prints the table of the file.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from support.cases.hand_pipelines import hand_pipelines
from support.cases.plain_methods import (
    PLANNED,
    REORDERED,
    Option,
    best_plain,
    describe,
    with_values,
)
from support.harness import (
    Row,
    describe_machine,
    make_parser,
    replace_table,
    report,
)
from support.workloads import (
    QUICK,
    WORKLOADS,
    Workload,
    add_options,
    measured_records,
    select_workloads,
)

from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.recipe_simulation.step_simulator import StepSample
from torchmm.balance.search.plan_search import search_plans
from torchmm.balance.search.result import SimulatedPlan
from torchmm.commands.plan import default_budget_s

BY_HAND = "by hand"
TYPES = {BY_HAND: "manual sizes", "chain": "single pipeline", "fsdp": "FSDP2 or HSDP"}
"""Types of plans on the page, by their names in records."""
PIPELINES = ("chain", "separated", "colocated", "disaggregated")
BUDGET_S = 20.0
TOLERANCE = 1.005
"""The planner has to be within this factor of the fastest plan."""
Record = dict[str, Any]


def plain_record(best: Mapping[str, Option | None]) -> Record:
    """Return step times in seconds and sizes of the plans without a pipeline."""
    return {
        method: None
        if option is None
        else {"step_s": option.step_ms / 1e3, "sizes": describe(option.recipe)}
        for method, option in best.items()
    }


def plan_record(found: SimulatedPlan | str) -> Record:
    """Return step time in seconds, MFU, memory and sizes of a plan, or the reason for no plan."""
    if isinstance(found, str):
        return {"problem": found}
    step = found.report.step
    assert step is not None
    return {
        "method": found.method,
        "step_s": found.step_ms / 1e3,
        "mfu": found.report.mfu,
        "memory_gib": max(step.peak_bytes) / 2**30,
        "sizes": found.sizes,
        "devices": found.devices,
    }


def measure(workload: Workload, budget_s: float, methods: Sequence[str] = PIPELINES) -> Record:
    """Return the row of a workload.

    Args:
        workload: Model, data and cluster.
        budget_s: Time limit of each search in seconds. The planner has at least the default of
            `torchmm plan`, which is longer for more than 200 GPUs.
        methods: Pipeline methods of the planner that are searched alone.
    """
    recipe = with_values(workload.load(), "data", reorder="intra")
    profile = load_profile(recipe.simulation.device)
    sample = StepSample(recipe)
    started = time.process_time()
    by_hand = hand_pipelines(recipe, workload.gpus, profile, sample)
    plain = best_plain(recipe, workload.gpus, profile, sample)
    pipelines = search_plans(
        recipe, workload.gpus, profile, methods=methods, budget_s=budget_s, sample=sample
    )
    found = {name: plan_record(each) for name, each in pipelines.best_by_method.items()}
    if by_hand is not None:
        found[BY_HAND] = {"step_s": by_hand[0].step_ms / 1e3, "sizes": by_hand[1]}
    found_s = time.process_time()
    planner_s = max(budget_s, default_budget_s(workload.gpus)) if budget_s == BUDGET_S else budget_s
    planned = search_plans(recipe, workload.gpus, profile, budget_s=planner_s, sample=sample)
    plain_planned = plan_record(planned.best_by_method["fsdp"])
    return {
        "workload": workload.title,
        "device": recipe.simulation.device,
        "plain": {**plain_record(plain), PLANNED: plain_planned},
        "pipelines": found,
        "planner": plan_record(planned.best or "no plan fits"),
        "planner_complete": planned.complete,
        "planner_s": planned.seconds,
        "opponents_cpu_s": found_s - started,
        "planner_cpu_s": time.process_time() - found_s,
    }


def best_step_s(records: Mapping[str, Record | None]) -> float:
    """Return the shortest step in seconds; infinite if there is no plan."""
    steps = [each["step_s"] for each in records.values() if each and "step_s" in each]
    return min(steps, default=float("inf"))


def best_name(records: Mapping[str, Record | None]) -> str:
    """Return the name of the fastest method."""
    least_s = best_step_s(records)
    names = [name for name, each in records.items() if each and each.get("step_s") == least_s]
    return names[0] if names else "none fits"


def picks_fastest(record: Record) -> bool:
    """Return True if the planner is at most `TOLERANCE` times as slow as the fastest plan."""
    fastest_s = min(best_step_s(record["plain"]), best_step_s(record["pipelines"]))
    return bool(record["planner"].get("step_s", float("inf")) <= TOLERANCE * fastest_s)


def table_rows(record: Record) -> list[Row]:
    """Return the rows of one workload for the common table and JSON format."""
    title, plain, pipelines = record["workload"], record["plain"], record["pipelines"]
    planner_s = record["planner"].get("step_s", float("inf"))
    plain_s, pipeline_s = best_step_s(plain), best_step_s(pipelines)
    by_name = {name: each["step_s"] for name, each in plain.items() if each and "step_s" in each}
    rows = [
        Row(title, f"step, {name}", "s", step_s, better="lower", kind="simulated")
        for name, step_s in by_name.items()
    ]
    rows += [
        Row(title, f"step, {name}", "s", each["step_s"], better="lower", kind="simulated")
        for name, each in pipelines.items()
        if "step_s" in each
    ]
    if max(plain_s, pipeline_s) < float("inf"):
        ratio = plain_s / pipeline_s
        rows.append(Row(title, "no pipeline over best pipeline", "x", ratio, kind="simulated"))
    if planner_s < float("inf"):
        fastest_s = min(plain_s, pipeline_s)
        rows.append(
            Row(title, f"planner, {record['planner']['method']}, over fastest", "x",
                planner_s / fastest_s, goal=TOLERANCE, better="lower", kind="simulated")
        )  # fmt: skip
    rows.append(Row(title, "time to plan", "s", record["planner_s"], better="lower"))
    return rows


def markdown(records: Sequence[Record]) -> str:
    """Return the table for the results page."""
    head = ["workload", REORDERED, "no pipeline, planner", "best pipeline", "type"]
    head += ["no pipeline / pipeline (x)", "planner selects the fastest"]
    lines = [f"| {' | '.join(head)} |", "|---|--:|--:|--:|---|--:|---|"]
    for record in records:
        plain, pipelines = record["plain"], record["pipelines"]
        plain_s, pipeline_s = best_step_s(plain), best_step_s(pipelines)
        ratio = plain_s / pipeline_s if max(plain_s, pipeline_s) < float("inf") else None
        name = best_name(pipelines)
        cells = [record["workload"]]
        cells += [_seconds((plain.get(each) or {}).get("step_s")) for each in (REORDERED, PLANNED)]
        cells += [_seconds(pipeline_s), TYPES.get(name, name)]
        cells += ["-" if ratio is None else f"{ratio:.2f}"]
        cells += ["yes" if picks_fastest(record) else "**no**"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _seconds(step_s: float | None) -> str:
    if step_s is None or step_s == float("inf"):
        return "-"
    return f"{step_s:.3g}"


def main() -> None:
    """Simulate the rows and print the table."""
    parser = make_parser((__doc__ or "").splitlines()[0])
    add_options(parser, BUDGET_S)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    workloads, budget_s = select_workloads(arguments, QUICK if arguments.quick else WORKLOADS)
    methods = PIPELINES[:1] if arguments.quick else PIPELINES
    shown = measured_records(
        arguments, workloads, lambda workload: measure(workload, budget_s, methods)
    )
    print(markdown(shown))
    if arguments.page is not None:
        replace_table(arguments.page, markdown(shown))
    rows = [row for record in shown for row in table_rows(record)]
    machine = describe_machine(torch.device("cpu"))
    report(f"No pipeline against pipelines, simulated; {machine}", rows, arguments.json)


if __name__ == "__main__":
    main()
