"""Measure simulated steps per second on one core, and the gain from reusing equal subgraphs.

Schedule search has seconds to evaluate a step under thousands of schedules (PipeWeaver section 6).
Steps have 8 ranks, 64 microbatches, encoder tasks of 0 to many sub-microbatches of up to 8 images,
LLM tasks in 3 to 5 segments, and 7,000 to 14,000 forward and backward tasks. Costs are synthetic,
in the ratio of PipeWeaver's examples (6.75 ms for a ViT-5B layer and 8 images, 10.5 ms for a layer
of a 32B LLM), with random lengths, seed 0.

- Dispatcher: an evaluation returns the step time for new priorities.
- Plan: an evaluation returns the time of a lowered plan for new durations.
- Command: a complete `scripts/simulate.py`, which builds the model, plans and simulates.

Values are CPU time of one thread, the best of several batches or runs. Tests in tests/unit/balance
compare the results with slow reference simulators.
"""

from __future__ import annotations

import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from support.harness import Row, describe_machine, make_parser, report
from support.subgraphs import Part, Subgraph, SubgraphCache

from torchmm.balance.numba_utils import Int64s
from torchmm.balance.pipeweaver.schedule_search.dispatcher import Dispatcher
from torchmm.balance.plan_costs import PlanCosts
from torchmm.balance.simulation.graph_kernels import time_nodes
from torchmm.balance.simulation.operator_graph import CompiledOperatorGraph, OperatorGraph
from torchmm.balance.simulation.plan_graph import build_plan_graph
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, Task
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.plan.transfers import transfers
from torchmm.pipelining.schedules.layouts import ModuleLayers, separated_layout

RANKS, MICROBATCHES, IMAGES_PER_PART = 8, 64, 8
ROOT = Path(__file__).parents[1]
COMMAND_RECIPE, COMMAND_GPUS = Path("recipes/papers/optimus_vit22b_gpt175b.toml"), 3072
SEED = 0


@dataclass(frozen=True)
class Size:
    """Size of a simulated step."""

    name: str
    tasks: int
    """Number of forward and backward tasks."""
    segments: int
    """Number of LLM segments."""
    goal: float
    """Goal of evaluations per second."""


SIZES = (
    Size("7k", 7_000, 3, 4000),
    Size("10k", 10_000, 4, 2500),
    Size("14k", 14_000, 5, 1600),
)


def step_graph(size: Size) -> StageGraph:
    """Return a task graph whose uneven sub-microbatches add up to the number of tasks."""
    modules = [
        ModuleLayers("vision", "encoder", (1.0,) * 64, sub_microbatched=True),
        ModuleLayers("llm", "llm", (1.0,) * 120),
    ]
    layout = separated_layout(modules, RANKS, {"llm": size.segments})
    parts = round(size.tasks / (2 * RANKS)) - size.segments * MICROBATCHES
    rng = random.Random(SEED)
    weights = [rng.choice((0, 0, 1, 1, 2, 3, 6)) for _ in range(MICROBATCHES)]
    counts = [0] * MICROBATCHES
    for microbatch in rng.choices(range(MICROBATCHES), weights, k=parts):
        counts[microbatch] += 1
    return StageGraph(layout, MICROBATCHES, {"vision": tuple(counts)})


def forward_ms(graph: StageGraph, task: Task, rng: random.Random) -> float:
    """Return the forward time of a stage. The last sub-microbatch may have few images."""
    stage = graph.layout.stages[task.stage]
    layers = stage.stop - stage.start
    if stage.module == "llm":
        return 10.5 * layers * (0.9 + 0.2 * rng.random())
    last = task.sub_microbatch == graph.task_count(task.stage, task.microbatch) - 1
    images = rng.randint(1, IMAGES_PER_PART) if last else IMAGES_PER_PART
    return 6.75 * layers * images / IMAGES_PER_PART


def step_costs(graph: StageGraph, transfer_ms: float) -> PlanCosts:
    """Return costs that are equal on all ranks for the same task of a microbatch."""
    compute: dict[Action, float] = {}
    for task in graph.tasks():
        stage = graph.layout.stages[task.stage]
        rng = random.Random(repr((SEED, stage.module, stage.segment, *task[1:])))
        length_ms = forward_ms(graph, task, rng)
        compute[Action(ActionType.F, *task)] = length_ms
        compute[Action(ActionType.B, *task)] = 2 * length_ms
    wires = {(t.message, t.backward): transfer_ms for t in transfers(graph)} if transfer_ms else {}
    return PlanCosts(compute, transfer_ms=wires)


def best_s(calls: list[Callable[[], object]], batches: int) -> float:
    """Return the minimum over batches of the mean CPU time of a call, in seconds."""
    best = float("inf")
    for _ in range(batches):
        begin_s = time.thread_time()
        for call in calls:
            call()
        best = min(best, (time.thread_time() - begin_s) / len(calls))
    return best


def dispatcher_rows(size: Size, batches: int) -> list[Row]:
    """Return evaluations of priorities per second, without and with transfer times."""
    rows = []
    for transfer_ms, what, goal in ((0.0, "", size.goal), (0.3, " with transfers", None)):
        graph = step_graph(size)
        dispatcher = Dispatcher(graph, step_costs(graph, transfer_ms))
        rng = np.random.default_rng(SEED)
        groups = len(dispatcher.groups)
        orders = [dispatcher.order_of_groups(rng.permutation(groups)) for _ in range(20)]
        seconds = best_s([partial(dispatcher.evaluate, order) for order in orders], batches)
        case = f"{size.name}: {len(dispatcher.actions)} tasks"
        rows.append(Row(case, f"dispatcher{what}", "evaluations/s", 1 / seconds, goal=goal))
    return rows


def natural_plan(size: Size) -> tuple[PipelinePlan, PlanCosts]:
    """Return the plan of the natural order of the dispatcher."""
    graph = step_graph(size)
    costs = step_costs(graph, 0.3)
    order = Dispatcher(graph, costs).dispatch().order
    return lower_plan(order, graph, {}, sharding="step"), costs


def makespan_ps(graph: CompiledOperatorGraph, duration_ps: Int64s) -> int:
    """Return the end of the last operator for new durations, in picoseconds."""
    start_ps = np.zeros_like(duration_ps)
    end_ps = np.empty_like(duration_ps)
    time_nodes(duration_ps, graph.pointers, graph.sources, start_ps, end_ps)
    return int(end_ps.max())


def plan_rows(size: Size, batches: int) -> list[Row]:
    """Return evaluations of durations per second."""
    plan, costs = natural_plan(size)
    graph = build_plan_graph(plan, costs).graph
    rng = np.random.default_rng(SEED)
    durations = [
        (graph.duration_ps * rng.uniform(0.5, 1.5, len(graph.duration_ps))).astype(np.int64)
        for _ in range(20)
    ]
    seconds = best_s([partial(makespan_ps, graph, each) for each in durations], batches)
    case = f"{size.name}: {len(costs.compute_ms)} tasks"
    metric = f"plan of {len(graph.duration_ps)} operators"
    return [Row(case, metric, "evaluations/s", 1 / seconds, goal=size.goal)]


LAYER_PARTS = (
    # queue, share of the layer's time: norm, projections, attention, collectives, feed-forward
    *(("gpu", s) for s in (0.02, 0.15, 0.14, 0.06)),
    ("nic", 0.05),
    *(("gpu", s) for s in (0.02, 0.3, 0.04, 0.15)),
    ("nic", 0.05),
)
"""Dependencies: each part runs after the previous part."""


def layer_subgraph(length_ms: float) -> Subgraph:
    """Return a subgraph of ten sequential operators."""
    return Subgraph(
        tuple(
            Part(queue, share * length_ms, (index - 1,) if index else ())
            for index, (queue, share) in enumerate(LAYER_PARTS)
        )
    )


def subgraph_rows(size: Size) -> list[Row]:
    """Return rows that compare subgraphs with one graph of all operators."""
    graph = step_graph(size)
    costs = step_costs(graph, 0.0)
    order = Dispatcher(graph, costs).dispatch().order
    stages = graph.layout.stages
    layers = {action: stages[action.stage].stop - stages[action.stage].start
              for action in costs.compute_ms}  # fmt: skip

    def flat() -> OperatorGraph:
        operators = OperatorGraph()
        for rank, program in enumerate(order):
            for action in program:
                for _ in range(layers[action]):
                    for _queue, share in LAYER_PARTS:
                        operators.add(rank, share * costs.compute_ms[action] / layers[action])
        return operators

    def reused() -> SubgraphCache:
        cache = SubgraphCache()
        for action, whole_ms in costs.compute_ms.items():
            layer = layer_subgraph(whole_ms / layers[action])
            cache.simulate(Subgraph((Part("gpu", layer),) * layers[action]))
        return cache

    begin_s = time.thread_time()
    operators = flat()
    operators.compile().times_ps()
    flat_s = time.thread_time() - begin_s
    begin_s = time.thread_time()
    cache = reused()
    reused_s = time.thread_time() - begin_s
    case = f"{size.name}: {len(operators)} operators"
    share = cache.simulated / (cache.simulated + cache.reused)
    return [
        Row(case, "subgraphs simulated", "fraction", share, 1.0, better="lower"),
        Row(case, "operators as subgraphs", "s", reused_s, flat_s, better="lower"),
        Row(case, "speedup by subgraphs", "x", flat_s / reused_s, 1.0),
    ]


def command_rows(runs: int) -> list[Row]:
    """Return the CPU time of `scripts/simulate.py` in a separate process, including imports."""
    command = [sys.executable, "scripts/simulate.py", "--config", str(COMMAND_RECIPE)]
    command += ["--schedule", "megatron_balanced"]
    seconds = []
    for _ in range(runs):
        begin = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [*command, "--gpus", str(COMMAND_GPUS)], check=True, cwd=ROOT, stdout=subprocess.DEVNULL
        )
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(end.ru_utime - begin.ru_utime + end.ru_stime - begin.ru_stime)
    case = f"{COMMAND_RECIPE.stem}, {COMMAND_GPUS} GPUs"
    return [Row(case, "simulate.py", "s", min(seconds), goal=5.0, better="lower")]


def main() -> None:
    """Print the table."""
    arguments = make_parser(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    batches = 5 if arguments.quick else 50
    rows: list[Row] = []
    for size in SIZES:
        rows += dispatcher_rows(size, batches) + plan_rows(size, batches)
    rows += subgraph_rows(SIZES[0])
    rows += command_rows(1 if arguments.quick else 3)
    title = f"Simulated steps, seed {SEED}; {describe_machine(torch.device('cpu'))}"
    report(title, rows, arguments.json)


if __name__ == "__main__":
    main()
