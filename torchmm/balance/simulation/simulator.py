"""Simulator of a training step: the plan of the runtime, with costs instead of tensors.

    plan, costs  ->  build_plan_graph   operators on queues
                 ->  times_ps           earliest start and end of each operator
                 ->  records            start and end of each action
                 ->  memory_changes     bytes before and after each action  ->  MemoryTimeline

The result has the records of the runtime, so that code for plots, analysis and comparison accepts
both measured and simulated steps (PipeWeaver, section 4, SEMU).

Memory is counted as in `validate_plan`: static bytes, messages, and saved activations, which change
in program order on each rank. The peak therefore depends on the order of actions, not on times.

All data- and tensor-parallel replicas of a rank run the same actions at the same time. One rank of
the plan represents all of them (spatial reuse of SEMU).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np

from torchmm.balance.numba_utils import Float64s, Int64s
from torchmm.balance.picoseconds import PICOSECONDS_PER_MS, SimulationError, duration_problem
from torchmm.balance.plan_costs import PlanCosts
from torchmm.balance.simulation.launch_effects import compute_launch_effects
from torchmm.balance.simulation.plan_graph import build_plan_graph
from torchmm.pipelining.checks.rules import MemoryModel, PlanRules
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.plan import ActionRecord, PipelinePlan
from torchmm.pipelining.view.timeline import Bubble, Timeline, analyze_timeline


@dataclass(frozen=True)
class MemoryTimeline:
    """Memory of one device over time.

    Attributes:
        times_ms: Time of each change, in ascending order.
        used_bytes: Bytes in use after each change. Changes at the same time are in program order.
    """

    times_ms: Float64s
    used_bytes: Int64s

    @property
    def peak_bytes(self) -> int:
        """Maximum of the bytes in use."""
        return int(self.used_bytes.max(initial=0))


@dataclass(frozen=True)
class SimulatedStep:
    """Predicted records and memory of a step.

    Attributes:
        plan: Simulated plan.
        costs: Costs of the simulation.
        records: Actions of all ranks in program order, in the format of `PipelineRuntime`. UNSHARD
            has the duration of the all-gather, which overlaps with computation.
        memory: Memory over time of each rank of the plan.
    """

    plan: PipelinePlan
    costs: PlanCosts
    records: list[ActionRecord]
    memory: tuple[MemoryTimeline, ...]

    @property
    def makespan_ms(self) -> float:
        """End of the last action in ms."""
        return max((record.end_ms for record in self.records), default=0.0)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Peak memory of each rank of the plan, including the optimizer update."""
        updates = self.costs.update_bytes or (0,) * len(self.memory)
        both = zip(self.memory, updates, strict=True)
        return tuple(max(timeline.peak_bytes, update) for timeline, update in both)

    @property
    def fits(self) -> bool:
        """True if all ranks are within the memory limit."""
        limit = self.costs.memory_limit_bytes
        return limit is None or max(self.peak_bytes, default=0) <= limit

    def saved_bytes(self, modules: Collection[str]) -> tuple[int, ...]:
        """Return the peak of the saved activations of some modules, by rank of the plan."""
        stages = {s.index for s in self.plan.graph.layout.stages if s.module in modules}
        kept, later = (
            {task: nbytes for task, nbytes in of_tasks.items() if task.stage in stages}
            for of_tasks in (self.costs.saved_bytes, self.costs.saved_for_weights_bytes)
        )
        costs = PlanCosts({}, saved_bytes=kept, saved_for_weights_bytes=later)
        changes = memory_changes(replace(self.plan, specs={}), costs)
        return tuple(int(np.cumsum(of_tasks).max(initial=0)) for of_tasks in changes)

    @property
    def model_flops(self) -> float:
        """Model FLOPs of all actions, without recomputation. MFU is FLOPs / (time * peak)."""
        return sum(self.costs.flops.get(record.action, 0.0) for record in self.records)

    @cached_property
    def timeline(self) -> Timeline:
        """Busy time and bubbles by class.

        Exposed tensor-parallel communication is a bubble of class tp at the end of its action. It
        is not included in the busy time, but in `module_ms`.
        """
        timeline = analyze_timeline(self.records, self.plan.graph.layout)
        busy_ms = list(timeline.busy_ms)
        bubbles = list(timeline.bubbles)
        covered_fraction = compute_launch_effects(self.plan, self.costs).covered_fraction
        for rank, action, start_ms, end_ms in self.records:
            tp_comm_ms = min(self.costs.tp_comm_ms.get(action, 0.0), end_ms - start_ms)
            tp_comm_ms *= 1 - covered_fraction.get(action, 0.0)
            if tp_comm_ms > 0:
                busy_ms[rank] -= tp_comm_ms
                bubbles.append(Bubble(rank, "tp", end_ms - tp_comm_ms, end_ms))
        return replace(timeline, busy_ms=tuple(busy_ms), bubbles=tuple(bubbles))


def simulate(plan: PipelinePlan, costs: PlanCosts, book: PlanRules | None = None) -> SimulatedStep:
    """Simulate a step.

    Args:
        plan: Valid plan (see `validate_plan`). Messages without specs use no memory.
        costs: Costs of the task graph of the plan.
        book: Rules of the plan, as for `memory_changes`.

    Raises:
        SimulationError: A cost is missing, negative or not a number, or the plan has a deadlock.
            The error message lists all problems.
    """
    problems = _cost_problems(plan, costs)
    try:
        nodes = build_plan_graph(plan, costs)
    except SimulationError as error:
        raise SimulationError([*problems, *error.problems]) from None
    if problems:
        raise SimulationError(problems)
    start_ps, end_ps = nodes.graph.times_ps()
    start_ms = (start_ps / PICOSECONDS_PER_MS).tolist()
    end_ms = [*(end_ps / PICOSECONDS_PER_MS).tolist(), 0.0]  # index NONE = -1: start of the step
    records = [
        ActionRecord(
            rank, action, end_ms[before] if starts_with_before else start_ms[node], end_ms[node]
        )
        for rank, action, node, before, starts_with_before in nodes.actions
    ]
    return SimulatedStep(plan, costs, records, _memory_timelines(plan, costs, records, book))


def _memory_timelines(
    plan: PipelinePlan, costs: PlanCosts, records: list[ActionRecord], book: PlanRules | None
) -> tuple[MemoryTimeline, ...]:
    """Return the memory of each rank over time."""
    static = costs.static_bytes or (0,) * len(plan.actions)
    all_changes = memory_changes(plan, costs, book)
    timelines, begin = [], 0
    for rank, program in enumerate(plan.actions):
        of_rank = records[begin : begin + len(program)]
        begin += len(program)
        times = np.array([0.0] + [t for record in of_rank for t in record[2:]])
        used = np.cumsum(np.concatenate((np.array([static[rank]]), all_changes[rank])))
        changed = np.concatenate((np.array([True]), all_changes[rank] != 0))
        timelines.append(MemoryTimeline(times[changed], used[changed]))
    return tuple(timelines)


def memory_changes(
    plan: PipelinePlan, costs: PlanCosts, book: PlanRules | None = None
) -> list[Int64s]:
    """Return the memory changes of each rank: two values per action, at its start and its end.

    Args:
        plan: Valid plan.
        costs: Costs of the task graph of the plan.
        book: Rules of the plan, or of another plan with the same rules. If None, they are created,
            which takes most of the time.
    """
    memory = MemoryModel(
        lambda task: costs.saved_bytes.get(task, 0),
        lambda task: costs.saved_for_weights_bytes.get(task, costs.saved_bytes.get(task, 0)),
    )
    book = PlanRules(plan) if book is None else book
    changes = []
    for rank, program in enumerate(plan.actions):
        rows = np.zeros((len(program), 2), np.int64)
        for position, action in enumerate(program):
            if action not in book.rules[rank]:
                raise SimulationError(
                    [f"{action} has no position on rank {rank}; see the problems of validate_plan"]
                )
            allocates, frees = book.bytes_of(rank, action, memory)
            passing = _transient_bytes(plan, costs, action)
            rows[position] = allocates + passing, -frees - passing
        _move_early_allocations(plan, rank, book, memory, rows)
        changes.append(rows.reshape(-1))
    return changes


def _move_early_allocations(
    plan: PipelinePlan, rank: int, book: PlanRules, memory: MemoryModel, rows: Int64s
) -> None:
    """Move the allocations of actions that an LLM action starts early to this LLM action."""
    if not plan.launches:
        return
    positions = {action: position for position, action in enumerate(plan.actions[rank])}
    for llm in positions.keys() & plan.launches.keys():
        for action in plan.launches[llm].encoder_actions:
            allocated, _ = book.bytes_of(rank, action, memory)
            rows[positions[action], 0] -= allocated
            rows[positions[llm], 0] += allocated


def _transient_bytes(plan: PipelinePlan, costs: PlanCosts, action: Action) -> int:
    """Return the bytes that an action needs only while it runs.

    For F without a backward pass, this includes the activations, which are freed at its end.
    """
    temporary = costs.temporary_bytes.get(action, 0)
    if action.type is not ActionType.F:
        return temporary
    if plan.training and plan.graph.needs_backward(action.stage, action.microbatch):
        return temporary
    return temporary + costs.saved_bytes.get(action.task, 0)


def _cost_problems(plan: PipelinePlan, costs: PlanCosts) -> list[str]:
    """Return the problems of costs without those of durations, which `build_plan_graph` reports."""
    problems = []
    if costs.static_bytes and len(costs.static_bytes) != len(plan.actions):
        problems.append(
            f"static_bytes of {len(costs.static_bytes)} ranks for a plan of {len(plan.actions)}"
        )
    for rank, nbytes in enumerate(costs.static_bytes):
        if not 0 <= nbytes < inf:
            problems.append(f"rank {rank} has {nbytes} static bytes; must be 0 or more")
    for task in plan.graph.tasks():
        kept = costs.saved_bytes.get(task, 0)
        later = costs.saved_for_weights_bytes.get(task, 0)
        if not (0 <= kept < inf and 0 <= later < inf):
            problems.append(
                f"{task} saves {kept} bytes, {later} between its I and W; must be 0 or more"
            )
    for program in plan.actions:
        for action in program:
            if action.type in COMPUTE and action in costs.tp_comm_ms:
                problems += _tp_comm_problems(costs, action)
    limit = costs.memory_limit_bytes
    if limit is not None and not limit > 0:
        problems.append(f"memory limit {limit} bytes; must be above 0, or None for no limit")
    return problems


def _tp_comm_problems(costs: PlanCosts, action: Action) -> list[str]:
    tp_comm_ms = costs.tp_comm_ms[action]
    whole_ms = costs.compute_ms.get(action, inf)
    if text := duration_problem(tp_comm_ms):
        return [f"{action}: its exposed communication has {text}"]
    if tp_comm_ms > whole_ms:
        return [
            f"{action}: {tp_comm_ms} ms of exposed communication in {whole_ms} ms; the whole "
            "duration includes it"
        ]
    return []
