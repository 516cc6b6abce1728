"""Simulates a training step: the plan that the runtime executes, with costs instead of tensors.

The result has the records of the runtime, so that code that draws, analyzes or compares measured
steps also accepts simulated ones (PipeWeaver §4, SEMU).

Memory is counted as `validate_plan` does: static bytes, messages, and what tasks keep, changed in
the order of each rank's program. The order decides the peak, not the times.

A plan stands for all data- and tensor-parallel copies of its ranks at once: they do the same at
the same time, so each is simulated for all of them (SEMU's spatial reuse).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np

from torchmm.balance.compiled import Float64s, Int64s
from torchmm.balance.picoseconds import PICOSECONDS_PER_MS, SimulationError, duration_problem
from torchmm.balance.simulation.launched import launch_times
from torchmm.balance.simulation.plan_graph import build_plan_graph
from torchmm.balance.step_costs import PlanCosts
from torchmm.pipelining.checks.rules import MemoryModel, RuleBook
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.plan import ActionRecord, PipelinePlan
from torchmm.pipelining.view.timeline import Bubble, Timeline, analyze_timeline


@dataclass(frozen=True)
class MemoryTimeline:
    """Memory of one device over time.

    Attributes:
        times_ms: of each change, ascending.
        used_bytes: from that change to the next. At equal times the order is that of execution.
    """

    times_ms: Float64s
    used_bytes: Int64s

    @property
    def peak_bytes(self) -> int:
        """The most that is used at once."""
        return int(self.used_bytes.max(initial=0))


@dataclass(frozen=True)
class SimulatedStep:
    """What a step does, as predicted.

    Attributes:
        plan: that was simulated.
        costs: that it was simulated with.
        records: of all ranks, each in the order of its program, as `PipelineRuntime` gives them.
            UNSHARD lasts as long as the gather, which overlaps with computation.
        memory: by rank of the plan: used bytes over time.
    """

    plan: PipelinePlan
    costs: PlanCosts
    records: list[ActionRecord]
    memory: tuple[MemoryTimeline, ...]

    @property
    def makespan_ms(self) -> float:
        """End of the last action."""
        return max((record.end_ms for record in self.records), default=0.0)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """By rank of the plan: the most memory used, by tasks or by the update after them."""
        updates = self.costs.update_bytes or (0,) * len(self.memory)
        both = zip(self.memory, updates, strict=True)
        return tuple(max(timeline.peak_bytes, update) for timeline, update in both)

    @property
    def fits(self) -> bool:
        """Whether no rank needs more memory than there is."""
        limit = self.costs.memory_limit_bytes
        return limit is None or max(self.peak_bytes, default=0) <= limit

    def kept_bytes(self, modules: Collection[str]) -> tuple[int, ...]:
        """By rank of the plan: the most that tasks of some modules keep at once, of all that is in
        use then."""
        stages = {s.index for s in self.plan.graph.layout.stages if s.module in modules}
        kept, later = (
            {task: nbytes for task, nbytes in own.items() if task.stage in stages}
            for own in (self.costs.kept_bytes, self.costs.kept_for_weights_bytes)
        )
        costs = PlanCosts({}, kept_bytes=kept, kept_for_weights_bytes=later)
        changes = memory_changes(replace(self.plan, specs={}), costs)
        return tuple(int(np.cumsum(own).max(initial=0)) for own in changes)

    @property
    def model_flops(self) -> float:
        """FLOPs of all actions, recomputation left out: divided by time and peak, the MFU."""
        return sum(self.costs.flops.get(record.action, 0.0) for record in self.records)

    @cached_property
    def timeline(self) -> Timeline:
        """Busy time and bubbles by class. Exposed tensor-parallel communication is a bubble (tp),
        drawn at the end of its action, and not busy; `module_ms` has it."""
        timeline = analyze_timeline(self.records, self.plan.graph.layout)
        busy_ms = list(timeline.busy_ms)
        bubbles = list(timeline.bubbles)
        covered = launch_times(self.plan, self.costs).covered
        for rank, action, start_ms, end_ms in self.records:
            tensor_ms = min(self.costs.tensor_ms.get(action, 0.0), end_ms - start_ms)
            tensor_ms *= 1 - covered.get(action, 0.0)
            if tensor_ms > 0:
                busy_ms[rank] -= tensor_ms
                bubbles.append(Bubble(rank, "tp", end_ms - tensor_ms, end_ms))
        return replace(timeline, busy_ms=tuple(busy_ms), bubbles=tuple(bubbles))


def simulate(plan: PipelinePlan, costs: PlanCosts, book: RuleBook | None = None) -> SimulatedStep:
    """Predicts a step.

    Args:
        plan: valid (see `validate_plan`); without specs, messages take no memory.
        costs: of its graph.
        book: as of `memory_changes`.

    Raises:
        SimulationError: a cost is missing, negative or no number, or ranks wait for each other.
            All problems are listed.
    """
    problems = _problems(plan, costs)
    try:
        nodes = build_plan_graph(plan, costs)
    except SimulationError as error:
        raise SimulationError([*problems, *error.problems]) from None
    if problems:
        raise SimulationError(problems)
    start_ps, end_ps = nodes.graph.times_ps()
    start_ms = (start_ps / PICOSECONDS_PER_MS).tolist()
    end_ms = [*(end_ps / PICOSECONDS_PER_MS).tolist(), 0.0]  # NONE, the last: the step's begin
    records = [
        ActionRecord(rank, action, end_ms[before] if instant else start_ms[node], end_ms[node])
        for rank, action, node, before, instant in nodes.actions
    ]
    return SimulatedStep(plan, costs, records, _memory(plan, costs, records, book))


def _memory(
    plan: PipelinePlan, costs: PlanCosts, records: list[ActionRecord], book: RuleBook | None
) -> tuple[MemoryTimeline, ...]:
    """Return the memory of every rank over time."""
    static = costs.static_bytes or (0,) * len(plan.actions)
    all_changes = memory_changes(plan, costs, book)
    timelines, begin = [], 0
    for rank, program in enumerate(plan.actions):
        own = records[begin : begin + len(program)]
        begin += len(program)
        times = np.array([0.0] + [t for record in own for t in record[2:]])
        used = np.cumsum(np.concatenate((np.array([static[rank]]), all_changes[rank])))
        changed = np.concatenate((np.array([True]), all_changes[rank] != 0))
        timelines.append(MemoryTimeline(times[changed], used[changed]))
    return tuple(timelines)


def memory_changes(
    plan: PipelinePlan, costs: PlanCosts, book: RuleBook | None = None
) -> list[Int64s]:
    """Two changes per action of each rank's program: by the rules of validation.

    Args:
        book: of the plan, or of another that it has the rules of; None: it is made, which takes
            most of the time.
    """
    memory = MemoryModel(
        lambda task: costs.kept_bytes.get(task, 0),
        lambda task: costs.kept_for_weights_bytes.get(task, costs.kept_bytes.get(task, 0)),
    )
    book = RuleBook(plan) if book is None else book
    changes = []
    for rank, program in enumerate(plan.actions):
        rows = np.zeros((len(program), 2), np.int64)
        for position, action in enumerate(program):
            if action not in book.rules[rank]:
                raise SimulationError(
                    [f"{action} has no position on rank {rank}; see the problems of validate_plan"]
                )
            allocates, frees = book.bytes_of(rank, action, memory)
            passing = _passing_bytes(plan, costs, action)
            rows[position] = allocates + passing, -frees - passing
        _allocate_ahead(plan, rank, book, memory, rows)
        changes.append(rows.reshape(-1))
    return changes


def _allocate_ahead(
    plan: PipelinePlan, rank: int, book: RuleBook, memory: MemoryModel, rows: Int64s
) -> None:
    """Count the allocations of actions that start early where they start."""
    if not plan.launches:
        return
    places = {action: place for place, action in enumerate(plan.actions[rank])}
    for llm in places.keys() & plan.launches.keys():
        for action in plan.launches[llm].begins:
            allocated, _ = book.bytes_of(rank, action, memory)
            rows[places[action], 0] -= allocated
            rows[places[llm], 0] += allocated


def _passing_bytes(plan: PipelinePlan, costs: PlanCosts, action: Action) -> int:
    """What an action needs while it runs; a forward without a backward: what it would keep."""
    temporary = costs.temporary_bytes.get(action, 0)
    if action.type is not ActionType.F:
        return temporary
    if plan.training and plan.graph.needs_backward(action.stage, action.microbatch):
        return temporary
    return temporary + costs.kept_bytes.get(action.task, 0)


def _problems(plan: PipelinePlan, costs: PlanCosts) -> list[str]:
    """What is wrong with costs besides durations, which building the graph finds."""
    problems = []
    if costs.static_bytes and len(costs.static_bytes) != len(plan.actions):
        problems.append(
            f"static_bytes of {len(costs.static_bytes)} ranks for a plan of {len(plan.actions)}"
        )
    for rank, nbytes in enumerate(costs.static_bytes):
        if not 0 <= nbytes < inf:
            problems.append(f"rank {rank} has {nbytes} static bytes; must be 0 or more")
    for task in plan.graph.tasks():
        kept = costs.kept_bytes.get(task, 0)
        later = costs.kept_for_weights_bytes.get(task, 0)
        if not (0 <= kept < inf and 0 <= later < inf):
            problems.append(
                f"{task} saves {kept} bytes, {later} between its I and W; must be 0 or more"
            )
    for program in plan.actions:
        for action in program:
            if action.type in COMPUTE and action in costs.tensor_ms:
                problems += _tensor_problems(costs, action)
    limit = costs.memory_limit_bytes
    if limit is not None and not limit > 0:
        problems.append(f"memory limit {limit} bytes; must be above 0, or None for no limit")
    return problems


def _tensor_problems(costs: PlanCosts, action: Action) -> list[str]:
    tensor_ms = costs.tensor_ms[action]
    whole_ms = costs.compute_ms.get(action, inf)
    if text := duration_problem(tensor_ms):
        return [f"{action}: its exposed communication has {text}"]
    if tensor_ms > whole_ms:
        return [
            f"{action}: {tensor_ms} ms of exposed communication in {whole_ms} ms; the whole "
            "duration includes it"
        ]
    return []
