"""Measure the planning time of a step: scheduling, lowering and validation.

Every step is planned, because image counts change. The step has 8 pipeline ranks, 32 microbatches
and at least 7,000 actions. Times are the minimum CPU time of many repetitions, one Python thread.
`planning_at_scale` adds the time that a rank spends on a step of 1,290 devices, with planning on
every rank and with background planning.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch
from support.cases import planning_at_scale
from support.harness import Row, describe_machine, make_parser, report

from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import MessageSpecs, TensorSpec
from torchmm.pipelining.schedules.layouts import ModuleLayers
from torchmm.pipelining.schedules.registry import ORDERS, schedule_layout

RANKS, MICROBATCHES = 8, 32
GOAL_MS = 30.0
SEGMENTS = {"separated": 2, "interleaved_1f1b": 3, "zero_bubble": 1}
"""By schedule: virtual stages per rank, or segments of the LLM."""


def step_graph(schedule: str) -> StageGraph:
    """Return the task graph with 0 to 2 sub-microbatches per microbatch, 1 on average."""
    modules = [
        ModuleLayers("vision", "encoder", (1.0,) * 24, sub_microbatched=True),
        ModuleLayers("llm", "llm", (2.0,) * 32),
    ]
    layout = schedule_layout(schedule, modules, RANKS, SEGMENTS[schedule])
    counts = [0, 1, 1, 2] * (MICROBATCHES // 4)
    random.Random(0).shuffle(counts)
    return StageGraph(layout, MICROBATCHES, {"vision": tuple(counts)})


def varying_specs(graph: StageGraph) -> MessageSpecs:
    """Return one bfloat16 tensor per message, each of a different length."""
    rng = random.Random(0)
    return {
        message: (TensorSpec((rng.randrange(1000, 8000), 4096), torch.bfloat16),)
        for task in graph.tasks()
        for message in graph.incoming(task)
    }


def best_ms(function: Callable[[], object], repetitions: int) -> float:
    """Return the minimum CPU time of several calls in milliseconds."""
    best = float("inf")
    for _ in range(repetitions):
        begin_s = time.thread_time()
        function()
        best = min(best, time.thread_time() - begin_s)
    return best * 1e3


def measure(schedule: str, repetitions: int) -> list[Row]:
    """Return the rows of one schedule."""
    graph = step_graph(schedule)
    specs = varying_specs(graph)
    order = ORDERS[schedule](graph)
    plan = lower_plan(order, graph, specs, sharding="step")
    validate_plan(plan).raise_for_problems()
    count = sum(map(len, plan.actions))
    case = f"{schedule}, {RANKS} ranks, {MICROBATCHES} microbatches, {count} actions"

    def row(metric: str, function: Callable[[], object], goal: float | None = None) -> Row:
        ours = best_ms(function, repetitions)
        return Row(case, metric, "ms", ours, goal=goal, better="lower")

    return [
        row("schedule", lambda: ORDERS[schedule](graph)),
        row("lowering", lambda: lower_plan(order, graph, specs, sharding="step")),
        row("validation", lambda: validate_plan(plan), GOAL_MS),
    ]


def main() -> None:
    """Print the table."""
    arguments = make_parser((__doc__ or "").splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    repetitions = 10 if arguments.quick else 100
    rows = [row for schedule in SEGMENTS for row in measure(schedule, repetitions)]
    rows += planning_at_scale.rows(max(3, repetitions // 10))
    title = f"Planning a step, best of {repetitions}; {describe_machine(torch.device('cpu'))}"
    report(title, rows, arguments.json)


if __name__ == "__main__":
    main()
