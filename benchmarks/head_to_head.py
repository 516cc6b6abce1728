"""Simulate all training methods on the same models, data and clusters.

    python benchmarks/head_to_head.py --rows rows.jsonl [--cases NAME ...] [--gpus N ...]
    python benchmarks/head_to_head.py --rows rows.jsonl --report [--plots DIRECTORY]

Without a pipeline: FSDP2, HSDP, the faster of both with sequences reordered over the ranks, and the
plan of the planner, which may also balance images over the ranks.
Pipelines: Megatron-LM (all encoder layers before the first LLM stage), Megatron-LM balanced (all
layers in one pipeline), a static plan for one representative batch (nnScaler* in PipeWeaver),
Optimus (encoders in the bubbles of the LLM, at action granularity as torchmm executes them, and at
kernel granularity as in the paper, which is a bound), PipeWeaver (separated modules in a searched
schedule) and DistTrain (modules on separate GPUs, sequences reordered).

One simulator with one cost model computes all methods. No value is fitted and no device is
measured. Every pipeline method uses the faster of the sizes in the paper and the sizes of the
planner. FSDP2 and HSDP use their best sizes, microbatches and recomputation. All plans have the
same memory limit.

`--rows` appends each finished workload to a file of JSON lines. A later call skips these.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from support.cases.head_to_head_methods import (
    CHAIN,
    KERNELS,
    MEGATRON,
    SEARCHED,
    SEPARATE,
    STATIC,
    WHOLE,
    Comparison,
    Result,
)
from support.cases.plain_methods import FSDP2, HSDP, PLANNED, REORDERED
from support.harness import (
    Row,
    append_record,
    describe_machine,
    make_parser,
    read_records,
    replace_table,
    report,
)
from support.workloads import COMPARED, QUICK, Workload, add_options, select_workloads

from torchmm.balance.costs.profiles import load_profile
from torchmm.pipelining.view.draw import Panel, timelines_svg
from torchmm.recipe.changes import reject_renamed_options

METHODS = (
    FSDP2, HSDP, REORDERED, PLANNED, MEGATRON, CHAIN, STATIC, WHOLE, KERNELS, SEARCHED, SEPARATE
)  # fmt: skip
HEADS = {WHOLE: "Optimus, action granularity"}
"""Column heads of methods whose names in records differ."""
NOT_DRAWN = (FSDP2, HSDP, REORDERED, PLANNED, MEGATRON)
"""Methods without a pipeline, and a step that is several times longer than the others."""
BUDGET_S = 75.0
Record = dict[str, Any]


def measure(workload: Workload, budget_s: float) -> tuple[Record, list[Result]]:
    """Return the record of a workload and its results.

    Args:
        workload: Model, data and cluster.
        budget_s: Time limit of the planner in seconds.
    """
    started = time.process_time()
    recipe = workload.load()
    profile = load_profile(recipe.simulation.device)
    results = list(Comparison(recipe, workload.gpus, profile, budget_s).results())
    methods = {
        each.method: {
            "step_s": each.step_s,
            "fits": each.fits,
            "mfu": each.report.mfu,
            "idle": each.idle,
            "memory_gib": each.peak_gib,
            "note": each.note,
        }
        for each in results
    }
    cpu_s = time.process_time() - started
    return {"workload": workload.title, "methods": methods, "cpu_s": cpu_s}, results


def fastest_method(record: Record) -> str:
    """Return the name of the fastest method that torchmm executes and that fits into memory."""
    steps_s = {
        name: each["step_s"]
        for name, each in record["methods"].items()
        if each["fits"] and name != KERNELS
    }
    return min(steps_s, key=steps_s.__getitem__, default="")


def record_rows(record: Record) -> list[Row]:
    """Return the rows of a workload; the baseline is the faster of FSDP2 and HSDP that fits."""
    plain = [record["methods"].get(name) for name in (FSDP2, HSDP)]
    base_s = min((each["step_s"] for each in plain if each and each["fits"]), default=None)
    fastest = fastest_method(record)
    rows = []
    for name, each in record["methods"].items():
        label = name + (" (fastest)" if name == fastest else "")
        label += "" if each["fits"] else " (does not fit)"
        for metric, unit, value in (
            ("step", "s", each["step_s"]),
            ("MFU", "", each["mfu"]),
            ("idle", "", each["idle"]),
            ("memory", "GiB", each["memory_gib"]),
        ):
            rows.append(
                Row(
                    record["workload"],
                    f"{metric}, {label}",
                    unit,
                    value,
                    base_s if metric == "step" else None,
                    better="higher" if metric == "MFU" else "lower",
                    kind="simulated",
                )
            )
    return rows


def summary(records: Sequence[Record]) -> str:
    """Return the table of step times in seconds, one line per workload."""
    heads = [HEADS.get(name, name) for name in METHODS]
    lines = [f"| workload | {' | '.join(heads)} |", "|---|" + "--:|" * len(METHODS)]
    for record in records:
        fastest = fastest_method(record)
        cells = []
        for name in METHODS:
            each = record["methods"].get(name)
            if each is None or not each["fits"]:
                cells.append("-" if each is None else f"{each['step_s']:.3g} †")
            else:
                cells.append(
                    f"{each['step_s']:.3g}".join(["**", "**"] if name == fastest else "  ")
                )
        lines.append(f"| {record['workload']} | {' | '.join(map(str.strip, cells))} |")
    return "\n".join(lines)


def draw(workload: Workload, results: Sequence[Result], directory: Path) -> Path:
    """Plot the steps of the pipelines on one time axis and return the file."""
    panels = [
        Panel(each.method, each.step.records, each.step.plan.graph.layout)
        for each in results
        if each.method not in NOT_DRAWN
    ]
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"head_to_head_{workload.name}.svg"
    file.write_text(timelines_svg(f"{workload.title}, simulated", panels, merge=True))
    return file


def main() -> None:
    """Simulate the workloads and print the tables."""
    parser = make_parser((__doc__ or "").splitlines()[0])
    add_options(parser, BUDGET_S)
    parser.add_argument(
        "--plots", type=Path, metavar="DIRECTORY", help="directory for plots of the steps"
    )
    reject_renamed_options(parser, "head_to_head")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    workloads, budget_s = select_workloads(arguments, QUICK if arguments.quick else COMPARED)
    records = {record["workload"]: record for record in read_records(arguments.rows)}
    for workload in () if arguments.report else workloads:
        if workload.title in records:
            continue
        record, results = measure(workload, budget_s)
        records[workload.title] = record
        print(json.dumps(record), flush=True)
        if arguments.rows is not None:
            append_record(record, arguments.rows)
        if arguments.plots is not None:
            print(draw(workload, results, arguments.plots))
    shown = [records[each.title] for each in workloads if each.title in records]
    print(summary(shown))
    if arguments.page is not None:
        replace_table(arguments.page, summary(shown))
    rows = [row for record in shown for row in record_rows(record)]
    machine = describe_machine(torch.device("cpu"))
    report(f"All methods, simulated; {machine}", rows, arguments.json)


if __name__ == "__main__":
    main()
