"""Write one step of a pipeline as a plot, a trace and a file of records, in the run directory.

timeline/step-N.svg          measured actions of each rank, below the prediction; bubbles by class
timeline/step-N.trace.json   the same for Perfetto and chrome://tracing
timeline/step-N.json         the records, for `scripts/draw.py --records`

timeline/step-N.schedules.svg  a searched schedule next to the static one

The last plot has three steps on one time axis: the searched and the separated schedule, simulated
with the mean times of the step itself, and the measured step.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from torchmm.balance.online_calibration import sum_by_rank, sum_over_ranks
from torchmm.balance.picoseconds import SimulationError
from torchmm.balance.plan_costs import PlanCosts
from torchmm.balance.simulation.simulator import simulate
from torchmm.common.batch import Microbatch
from torchmm.common.files import replace_atomically
from torchmm.parallel.mesh import ParallelMesh
from torchmm.pipelining.plan.actions import COMPUTE
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import ActionRecord, ComputeOrder, Durations, PipelinePlan
from torchmm.pipelining.schedules.separated import separated
from torchmm.pipelining.view.draw import Panel, timelines_svg
from torchmm.pipelining.view.file_formats import write_chrome_trace
from torchmm.pipelining.view.records import StepContent, read_records, write_records
from torchmm.training.step import StepOutcome

logger = logging.getLogger("torchmm")


def save_timeline(
    directory: Path,
    step: int,
    outcome: StepOutcome,
    microbatches: Sequence[Microbatch],
    mesh: ParallelMesh,
) -> None:
    """Write the step of the pipeline of rank 0 in the three formats. Collective over all ranks."""
    local_step = (
        mesh.rank,
        socket.gethostname(),
        outcome.result.begin_s,
        outcome.result.records or [],
    )
    gathered = [local_step] * mesh.world_size
    dist.all_gather_object(gathered, local_step)
    if mesh.rank:
        return
    # Processes of a host share a clock. Steps on different hosts are assumed to start together.
    first = {ranks_of_plan[0] for ranks_of_plan in mesh.plan_ranks}
    first_pipeline = [ranks for ranks in gathered if ranks[0] in first]
    begins_s: dict[str, float] = {}
    for _, host, begin_s, _ in first_pipeline:
        begins_s[host] = min(begin_s, begins_s.get(host, begin_s))
    aligned: list[ActionRecord] = []
    for _, host, begin_s, records in first_pipeline:
        offset_ms = (begin_s - begins_s[host]) * 1e3
        aligned += [
            r._replace(start_ms=r.start_ms + offset_ms, end_ms=r.end_ms + offset_ms)
            for r in records
        ]
    directory.mkdir(exist_ok=True)
    graph = outcome.plan.graph
    content = StepContent(
        tuple(m.task_meta for m in microbatches), tuple(m.target_count for m in microbatches)
    )
    write_records(directory / f"step-{step}.json", aligned, graph, content)
    write_chrome_trace(directory / f"step-{step}.trace.json", aligned, graph.layout)
    panel = Panel("measured", aligned, graph.layout)
    svg = timelines_svg(f"step {step}", [panel])
    replace_atomically(directory / f"step-{step}.svg", svg.encode())


def plot_schedules(directory: Path, step: int, plan: PipelinePlan, durations: Durations) -> None:
    """Plot the searched and the static schedule next to a step that `save_timeline` has written.

    Args:
        directory: Directory of the timelines.
        step: Number of the step.
        plan: Plan of the step.
        durations: FLOPs of the actions of the plan.
    """
    records, costs = _read_measured_step(directory, step, plan, durations)
    graph = plan.graph
    searched = _compute_actions(plan)
    static = separated(graph, costs.compute_ms.__getitem__)
    panels = [
        Panel(label, simulate(lower_plan(order, graph, {}), costs).records, graph.layout)
        for label, order in (("searched (predicted)", searched), ("separated (predicted)", static))
    ]
    svg = timelines_svg(
        f"step {step}: searched and static schedule",
        [*panels, Panel("searched (measured)", records, graph.layout)],
    )
    replace_atomically(directory / f"step-{step}.schedules.svg", svg.encode())


def plot_prediction(directory: Path, step: int, plan: PipelinePlan, durations: Durations) -> None:
    """Plot a step that `save_timeline` has written below the prediction of its plan.

    The prediction uses the mean times of the actions and has no messages. Differences are idle
    times and uneven ranks.

    Args:
        directory: Directory of the timelines.
        step: Number of the step.
        plan: Plan of the step.
        durations: FLOPs of the actions of the plan.
    """
    records, costs = _read_measured_step(directory, step, plan, durations)
    layout = plan.graph.layout
    try:
        predicted = Panel("predicted", simulate(plan, costs).records, layout)
    except SimulationError as error:  # a failed plot does not stop the run
        logger.warning("step %d is plotted without a prediction: %s", step, error)
        return
    svg = timelines_svg(f"step {step}", [predicted, Panel("measured", records, layout)])
    replace_atomically(directory / f"step-{step}.svg", svg.encode())


def _read_measured_step(
    directory: Path, step: int, plan: PipelinePlan, durations: Durations
) -> tuple[list[ActionRecord], PlanCosts]:
    """Return the records of a step, and costs in milliseconds by mean times of its actions."""
    records, _ = read_records(directory / f"step-{step}.json")
    rates = {
        kind: total.measured_ms / total.flops
        for kind, total in sum_over_ranks(sum_by_rank(records, plan.graph, durations)).items()
        if total.flops > 0
    }
    modules = [stage.module for stage in plan.graph.layout.stages]
    costs = {
        action: durations(action) * rates.get((modules[action.stage], action.type), 0.0)
        for row in _compute_actions(plan)
        for action in row
    }
    return records, PlanCosts(costs)


def _compute_actions(plan: PipelinePlan) -> ComputeOrder:
    return tuple(tuple(a for a in row if a.type in COMPUTE) for row in plan.actions)
