"""Bubble scheduler: place encoder computation in the bubbles of an LLM pipeline (Optimus §4.2-4.3).

Coarse schedules run encoder forward passes before the first LLM action of their rank, and encoder
backward passes after the last. Fine schedules also use the bubbles between and inside LLM actions.
The LLM timeline keeps its shape. If bubbles are too small, the complete LLM timeline starts later
(`before_ms`), or the step ends later (`after_ms`):

    coarse   e0 e1 | F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2 | b0 b1     e: encoder forward pass
    fine     e0    | F0 e1 F1 .  B0 B0 F2 B1 B1 b0 B2 B2 | b1        b: encoder backward pass
             before_ms                                     after_ms

F_i is the latest start of microbatch i in the LLM. B_i is the time when its gradient is available
(`llm_timeline`). A schedule is found in four steps:

1. Assignment. Each next task goes to the pipeline that finishes it first. For identical tasks this
   greedy assignment is optimal. It merges the end times of all pipelines, so the i-th end is as
   early as any assignment allows (global ordering of the paper: EF_i <= F_i for all i). Bisection
   finds the smallest delay that meets all F_i. A larger delay never violates one.
2. Delay of an assignment. Tasks are placed backward in time from F_i, as late as possible. The time
   by which they extend before the start of the LLM is exactly the smallest delay.
3. Placement. With this delay, forward passes run as early as possible, which leaves late bubbles to
   backward passes. Backward passes run as early as possible after B_i, in the pipeline of their
   forward pass.
4. Search. Simulated annealing changes the pipelines of tasks. Step 1 is only a start, because
   backward passes must run in the pipeline of their forward pass, and tasks can have different
   costs.

Invariants:

- A device runs tasks in a fixed order, and kernels are not split. Steps 2 and 3 are therefore
  exact: if each kernel uses the first free interval that is long enough, no kernel can end earlier.
- No LLM action moves relative to another LLM action, except in `BubbleFiller.coarse_schedule`.
- The search is seeded, so all ranks compute the same schedule from the same input.

`search_assignment` evaluates the cost as a black box. It enumerates small search spaces. In others,
annealing moves one task or exchanges two tasks. The cost is the maximum of several sums, so pure
descent stops if only an exchange of several tasks reduces it.

The paper enumerates all partitions of the microbatches among the pipelines, with hill climbing in
each. This takes minutes per step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import exp, prod
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchmm.balance.numba_utils import Int32s, Int64s
from torchmm.balance.optimus.bubble_scheduler_kernels import (
    EncoderPipelines,
    EncoderTasks,
    Flags,
    FreeIntervals,
    SchedulingPass,
    assign_tasks,
    initial_cursor,
    place_tasks,
    remaining_intervals,
)
from torchmm.balance.optimus.encoder_work import EncoderWork
from torchmm.balance.optimus.idle_intervals import INFINITY_PS
from torchmm.balance.optimus.llm_timeline import LlmTimeline, RankActions
from torchmm.balance.picoseconds import PICOSECONDS_PER_MS
from torchmm.costs.sizes import Array
from torchmm.pipelining.plan.actions import Action

INITIAL_TEMPERATURE = 0.02
"""Initial temperature of annealing as a fraction of the cost. It decreases linearly to 0."""
MOVES_PER_EVALUATION = 4
"""Maximum number of moves per evaluation. Moves to known assignments need no evaluation."""


def search_assignment(
    starts: Sequence[Int32s],
    choices: Sequence[range],
    cost: Callable[[Int32s], int],
    *,
    evaluations: int,
    stop_cost: int = 0,
) -> Int32s:
    """Return the assignment with the lowest cost that the search finds.

    Args:
        starts: Initial assignments, at least one. The result is never worse than the best of them.
        choices: Possible pipelines of each task.
        cost: Returns the cost of an assignment, which must be positive.
        evaluations: Maximum number of evaluated assignments in addition to `starts`.
        stop_cost: Cost at which the search stops.
    """
    best = min(starts, key=cost)
    lowest = cost(best)
    if lowest <= stop_cost:
        return best
    if prod(map(len, choices)) <= evaluations:
        assignments = (np.array(assignment, np.int32) for assignment in product(*choices))
        return min([best, *assignments], key=cost)
    free = [task for task, pipelines in enumerate(choices) if len(pipelines) > 1]
    if not free:
        return best
    rng = random.Random(0)
    costs = {best.tobytes(): lowest}  # known assignments need no second evaluation
    current, current_cost = best, lowest
    steps = evaluations * MOVES_PER_EVALUATION
    for step in range(steps):
        if len(costs) > evaluations or lowest <= stop_cost:
            break
        candidate = _mutate_assignment(current, free, choices, rng)
        key = candidate.tobytes()
        if key not in costs:
            costs[key] = cost(candidate)
        rise = costs[key] - current_cost
        temperature = INITIAL_TEMPERATURE * lowest * (1 - step / steps)
        if rise <= 0 or rng.random() < exp(-rise / temperature):
            current = candidate
            current_cost = costs[key]
            if current_cost < lowest:
                best, lowest = current, current_cost
    return best


def _mutate_assignment(
    current: Int32s, free: Sequence[int], choices: Sequence[range], rng: random.Random
) -> Int32s:
    """Return an assignment with one task moved, or two tasks of the same choices exchanged."""
    moved = current.copy()
    first = rng.choice(free)
    second = rng.choice(free)
    if rng.random() < 0.5 or choices[first] != choices[second]:
        moved[first] = rng.choice(choices[first])
    else:
        moved[[first, second]] = current[[second, first]]
    return moved


Granularity = Literal["coarse", "fine"]
BISECTION_TOLERANCE = 1e-4
"""Tolerance of bisection as a fraction of the maximum delay. Placement computes the exact delay."""


@dataclass(frozen=True, eq=False)
class BubbleSchedule:
    """Pipelines and start times of all encoder kernels. Times are relative to the start of the
    step.

    Attributes:
        timeline: LLM timeline without encoders.
        works: Encoder work, one entry per encoder.
        llm: LLM actions of each rank.
        pipeline_N: Pipeline of each task, one array per encoder. Indices are relative to the
            encoder.
        forward_start_ps: (N, S, K) start times of forward kernels, one array per encoder.
        backward_start_ps: (N, S, K) start times of backward kernels, one array per encoder.
        llm_ms: Duration of the step without encoders.
        before_ms: Delay of the LLM by encoders.
        after_ms: Increase of the step after the LLM by encoders.
    """

    timeline: LlmTimeline
    works: tuple[EncoderWork, ...]
    llm: tuple[RankActions, ...]
    pipeline_N: tuple[Int32s, ...]
    forward_start_ps: tuple[Int64s, ...]
    backward_start_ps: tuple[Int64s, ...]
    llm_ms: float
    before_ms: float
    after_ms: float

    @property
    def total_ms(self) -> float:
        """Duration of the step."""
        return self.llm_ms + self.before_ms + self.after_ms

    @property
    def busy_ms(self) -> float:
        """Mean encoder computation time per device."""
        devices = len(self.timeline.ranks) * max(work.devices_per_rank for work in self.works)
        return sum(work.busy_ms for work in self.works) / devices

    @property
    def efficiency(self) -> float:
        """Fraction of encoder computation that bubbles hide (Optimus §5.3.2). 1 without encoder
        work."""
        return 1 - (self.before_ms + self.after_ms) / self.busy_ms if self.busy_ms else 1.0


class Placement(NamedTuple):
    """Placement of an assignment. Times are relative to the start of the LLM timeline."""

    total_ps: int
    before_ps: int
    forward_ps: Int64s
    """Start times of forward kernels."""
    backward_ps: Int64s
    output_ps: Int64s
    """Times at which the outputs of the tasks are available to the LLM."""


def fill_bubbles(
    timeline: LlmTimeline,
    works: Sequence[EncoderWork],
    granularity: Granularity = "fine",
    *,
    evaluations: int = 256,
) -> BubbleSchedule:
    """Return the best schedule that the search finds.

    Args:
        timeline: LLM timeline.
        works: Work of all encoders. They are scheduled together (Optimus §4.4).
        granularity: Fine schedules are never longer than coarse schedules.
        evaluations: Maximum number of assignments that the search evaluates.

    Raises:
        ValueError: Encoders have different `devices_per_rank`, or tasks or devices do not match the
            timeline.
    """
    filler = BubbleFiller(timeline, works)
    starts = [filler.assign_by_forward("coarse"), filler.assign_by_backward("coarse")]
    coarse = filler.search("coarse", starts, evaluations if granularity == "coarse" else 0)
    if granularity == "coarse":
        return filler.coarse_schedule(coarse)
    starts = [filler.assign_by_forward("fine"), filler.assign_by_backward("fine"), coarse]
    fine = filler.schedule("fine", filler.search("fine", starts, evaluations))
    return min(fine, filler.coarse_schedule(coarse), key=lambda schedule: schedule.total_ms)


class BubbleFiller:
    """Evaluator of assignments of encoder tasks to encoder pipelines, for `fill_bubbles`.

    Attributes:
        keys: (encoder, microbatch, sub-microbatch) of each task, in the order of assignments.
        choices: Pipelines of the encoder of each task.
    """

    def __init__(self, timeline: LlmTimeline, works: Sequence[EncoderWork]) -> None:
        _check_inputs(timeline, works)
        self.timeline = timeline
        self.works = tuple(works)
        self.keys = [(i, *task) for i, work in enumerate(works) for task in work.tasks]
        encoder = np.array([key[0] for key in self.keys], np.int32)
        microbatch = np.array([key[1] for key in self.keys], np.int64)
        self._needed = timeline.deadline_ps[microbatch]
        self._returned = timeline.gradient_ready_ps[microbatch]
        self._pipelines = _flatten_pipelines(timeline, works)
        first = self._pipelines.first[encoder]
        last = self._pipelines.first[encoder + 1]
        self.choices = [range(a, b) for a, b in zip(first.tolist(), last.tolist(), strict=True)]
        order = np.lexsort((microbatch, self._needed))
        self._forward = _flatten_tasks(
            [(w.forward_ms_NSK, w.links[0], w.transfer_times_ms_NS) for w in works], encoder, order
        )
        order = np.lexsort((microbatch, self._returned))
        self._backward = _flatten_tasks(
            [(w.backward_ms_NSK, w.links[1], w.transfer_times_ms_NS) for w in works], encoder, order
        )
        self._gathered = timeline.unsharded_ps[self._pipelines.rank]
        self._interval_cache: dict[tuple[Granularity, bool], FreeIntervals] = {}

    def assign_by_forward(self, granularity: Granularity) -> Int32s:
        """Assign each next forward task to the first pipeline to finish it, with minimum delay."""
        forward = SchedulingPass(
            self._forward, self._pipelines, self._intervals_for(granularity), False, False
        )
        free = np.full(len(self.keys), -INFINITY_PS)
        # Upper bound: all kernels run sequentially before the LLM starts.
        low = -1
        high = int(self._forward.duration_ps.sum() + self._forward.transfer_ps.sum())
        best = np.zeros(len(self.keys), np.int32)
        self._assign(forward, free, self._needed, self._gathered - high, best)
        tolerance = int(BISECTION_TOLERANCE * high) + 1
        while high - low > tolerance:
            delay = (low + high) // 2
            candidate = best.copy()
            if self._assign(forward, free, self._needed, self._gathered - delay, candidate):
                best, high = candidate, delay
            else:
                low = delay
        return best

    def assign_by_backward(self, granularity: Granularity) -> Int32s:
        """Assign each next backward task to the pipeline that finishes it first.

        Forward tasks are ignored: all bubbles are available.
        """
        count = len(self.keys)
        free_intervals = self._intervals_for(granularity)
        backward = SchedulingPass(self._backward, self._pipelines, free_intervals, True, False)
        never = np.full(count, INFINITY_PS)
        pipeline_of = np.zeros(count, np.int32)
        self._assign(
            backward,
            self._returned,
            never,
            np.full(len(self._gathered), -INFINITY_PS),
            pipeline_of,
        )
        return pipeline_of

    @staticmethod
    def _assign(
        direction: SchedulingPass,
        release_ps: Int64s,
        deadline_ps: Int64s,
        begin_ps: Int64s,
        pipeline_of: Int32s,
    ) -> bool:
        cursor = initial_cursor(direction.free_intervals, begin_ps)
        saved = initial_cursor(direction.free_intervals, begin_ps)
        scratch = np.empty(len(direction.tasks.duration_ps), np.int64)
        return bool(
            assign_tasks(direction, release_ps, deadline_ps, cursor, saved, scratch, pipeline_of)
        )

    def search(
        self, granularity: Granularity, starts: Sequence[Int32s], evaluations: int
    ) -> Int32s:
        """Return the best assignment that the search finds from initial assignments."""
        return search_assignment(
            starts,
            self.choices,
            lambda assignment: self.evaluate(granularity, assignment).total_ps,
            evaluations=evaluations,
            stop_cost=self.timeline.llm_ps,
        )

    def evaluate(self, granularity: Granularity, pipeline_of: Int32s) -> Placement:
        """Return the placement of an assignment (steps 2 and 3 of the module docstring)."""
        count = len(self.keys)
        ranks = self._pipelines.rank
        intervals = self._intervals_for(granularity)
        start = np.zeros(len(self._forward.duration_ps), np.int64)
        end = np.zeros(count, np.int64)
        unbound = np.full(len(ranks), -INFINITY_PS)
        # Step 2: in negated time, tasks run from their deadlines toward the start of the step.
        reversed_time = SchedulingPass(
            self._forward, self._pipelines, self._intervals_for(granularity, True), True, True
        )
        cursor = initial_cursor(reversed_time.free_intervals, unbound)
        place_tasks(reversed_time, pipeline_of, -self._needed, cursor, start, end)
        before_ps = max(0, int((cursor.time_ps + self._gathered).max(initial=0)))
        # Step 3: with this delay, forward tasks run as early as possible.
        forward = SchedulingPass(self._forward, self._pipelines, intervals, False, False)
        cursor = initial_cursor(intervals, self._gathered - before_ps)
        place_tasks(forward, pipeline_of, np.full(count, -INFINITY_PS), cursor, start, end)
        # Backward tasks use the intervals that forward tasks leave free.
        backward = SchedulingPass(
            self._backward,
            self._pipelines,
            remaining_intervals(forward, pipeline_of, start),
            True,
            False,
        )
        back_start = np.zeros(len(self._backward.duration_ps), np.int64)
        back_end = np.zeros(count, np.int64)
        cursor = initial_cursor(backward.free_intervals, unbound)
        place_tasks(backward, pipeline_of, self._returned, cursor, back_start, back_end)
        done = cursor.time_ps
        ends = [int(done[ranks == rank].max(initial=0)) for rank in range(len(self.timeline.ranks))]
        total_ps = before_ps + self.timeline.step_end_ps(ends)
        return Placement(total_ps, before_ps, start, back_start, end)

    def schedule(self, granularity: Granularity, pipeline_of: Int32s) -> BubbleSchedule:
        """Return the schedule of an assignment. All LLM actions are delayed by the same time."""
        placed = self.evaluate(granularity, pipeline_of)
        timeline = self.timeline
        before_ps = placed.before_ps
        llm = [
            RankActions(rank.actions, rank.start_ps + before_ps, rank.end_ps + before_ps)
            for rank in timeline.ranks
        ]
        after_ps = placed.total_ps - before_ps - timeline.llm_ps
        # Split the pipelines by encoder, with indices relative to the encoder.
        counts = np.cumsum([len(work.tasks) for work in self.works])[:-1]
        pipelines = zip(np.split(pipeline_of, counts), self._pipelines.first, strict=False)
        return BubbleSchedule(
            timeline,
            self.works,
            tuple(llm),
            tuple(pipeline - first for pipeline, first in pipelines),
            _split_by_encoder(
                placed.forward_ps + before_ps, [w.forward_ms_NSK.shape for w in self.works]
            ),
            _split_by_encoder(
                placed.backward_ps + before_ps, [w.backward_ms_NSK.shape for w in self.works]
            ),
            *(ps / PICOSECONDS_PER_MS for ps in (timeline.llm_ps, before_ps, after_ps)),
        )

    def coarse_schedule(self, pipeline_of: Int32s) -> BubbleSchedule:
        """Return the coarse schedule of an assignment with LLM actions as early as encoders allow.

        Plans run LLM actions this way. If LLM stages have different durations, the delay can be
        smaller than the uniform delay of `schedule`.
        """
        placed = self.evaluate("coarse", pipeline_of)
        timeline = self.timeline
        # A rank starts its first LLM action after its last encoder forward kernel. The first LLM
        # stage starts a microbatch when all of its encoder outputs have arrived.
        ends = self._device_ends(placed.forward_ps, pipeline_of)
        released: dict[Action, int] = {}
        for rank, actions in enumerate(timeline.ranks):
            released[actions.actions[0]] = int(ends[self._pipelines.rank == rank].max(initial=0))
        for action in timeline.first_stage_forwards():
            is_entered = [key[1] == action.microbatch for key in self.keys]
            available = int(placed.output_ps[is_entered].max(initial=0))
            released[action] = max(released.get(action, 0), available)
        before_ps = placed.before_ps
        delayed = timeline.with_release_times(
            {a: max(0, ps + before_ps) for a, ps in released.items()}
        )
        schedule = BubbleFiller(delayed, self.works).schedule("coarse", pipeline_of)
        before_ms = (delayed.llm_ps - timeline.llm_ps) / PICOSECONDS_PER_MS
        return replace(
            schedule,
            timeline=timeline,
            llm_ms=timeline.llm_ps / PICOSECONDS_PER_MS,
            before_ms=schedule.before_ms + before_ms,
        )

    def _intervals_for(
        self, granularity: Granularity, reversed_time: bool = False
    ) -> FreeIntervals:
        key = granularity, reversed_time
        if key not in self._interval_cache:
            timeline = self.timeline
            if granularity == "coarse":
                free = [timeline.idle_outside()] * 2
            else:
                free = [timeline.idle_compute(), timeline.idle_links()]
            free = [intervals.select_devices(self._pipelines.rank.tolist()) for intervals in free]
            free = [intervals.reversed_time() if reversed_time else intervals for intervals in free]
            self._interval_cache[key] = FreeIntervals(*free[0], *free[1])
        return self._interval_cache[key]

    def _device_ends(self, start_ps: Int64s, pipeline_of: Int32s) -> Int64s:
        """Return the end time of the last forward kernel of each device."""
        ends = np.full(len(self._pipelines.rank), -INFINITY_PS)
        tasks = self._forward
        for task, pipeline in enumerate(pipeline_of.tolist()):
            for row in range(tasks.first[task], tasks.first[task + 1]):
                first = self._pipelines.device[pipeline, row - tasks.first[task]]
                devices = slice(first, first + self._pipelines.width[pipeline])
                kernels = slice(tasks.pointers[row], tasks.pointers[row + 1])
                busy = tasks.duration_ps[kernels] > 0
                last = (start_ps[kernels] + tasks.duration_ps[kernels])[busy].max(
                    initial=-INFINITY_PS
                )
                ends[devices] = np.maximum(ends[devices], last)
        return ends


def _check_inputs(timeline: LlmTimeline, works: Sequence[EncoderWork]) -> None:
    """Raise a ValueError if the devices or tasks of encoders do not match the timeline."""
    devices_per_rank = {work.devices_per_rank for work in works}
    if len(devices_per_rank) != 1:
        raise ValueError(
            f"encoders {[work.name for work in works]} have {sorted(devices_per_rank)} devices "
            "per rank of the LLM; use the same number for all, and set a width for those "
            "that are split over more ranks"
        )
    devices = len(timeline.ranks) * devices_per_rank.pop()
    count = len(timeline.deadline_ps)
    for work in works:
        used = sorted(work.devices.tolist())
        if used != list(range(devices)):
            raise ValueError(
                f"{work.name}: its pipelines are on devices {used}; assign them to all "
                f"{devices} devices"
            )
        if wrong := [task for task in work.tasks if not 0 <= task[0] < count]:
            raise ValueError(f"{work.name}: task {wrong[0]} of a step of {count} microbatches")


def _flatten_pipelines(timeline: LlmTimeline, works: Sequence[EncoderWork]) -> EncoderPipelines:
    stages = max(work.devices_MS.shape[1] for work in works)
    rows = [
        np.pad(work.devices_MS, ((0, 0), (0, stages - work.devices_MS.shape[1]))) for work in works
    ]
    first = np.cumsum([0, *(len(devices) for devices in rows)])
    ranks = np.repeat(np.arange(len(timeline.ranks)), works[0].devices_per_rank)
    device = np.ascontiguousarray(np.concatenate(rows), np.int32)
    width = np.repeat([work.width for work in works], [len(devices) for devices in rows]).astype(
        np.int32
    )
    of_device = ranks.astype(np.int32)
    return EncoderPipelines(first.astype(np.int32), device, width, of_device, timeline.entry_rank)


def _flatten_tasks(
    passes: Sequence[tuple[Array, Flags, Array]], encoder: Int32s, order: NDArray[np.intp]
) -> EncoderTasks:
    """Flatten one direction of all encoders.

    Args:
        passes: Kernel durations (N, S, K), link flags (K,) and hop times (N, S) of each encoder.
        encoder: Encoder of each task.
        order: Order of the tasks in their pipelines.
    """
    counts, kernels, durations, flags, hops = [], [], [], [], []
    for duration_ms, links, hop_ms in passes:
        tasks, stages, size = duration_ms.shape
        counts += [stages] * tasks
        kernels += [size] * (tasks * stages)
        durations.append(_to_picoseconds(duration_ms))
        flags.append(np.tile(links, tasks * stages))
        hops.append(_to_picoseconds(hop_ms))
    return EncoderTasks(
        encoder,
        np.cumsum([0, *counts]).astype(np.int32),
        np.cumsum([0, *kernels]).astype(np.int32),
        np.concatenate(durations),
        np.concatenate(flags),
        np.concatenate(hops),
        order.astype(np.int32),
    )


def _to_picoseconds(times_ms: Array) -> Int64s:
    return np.rint(times_ms.reshape(-1) * PICOSECONDS_PER_MS).astype(np.int64)


def _split_by_encoder(values: Int64s, shapes: Sequence[tuple[int, ...]]) -> tuple[Int64s, ...]:
    by_encoder = np.split(values, np.cumsum([prod(shape) for shape in shapes])[:-1])
    return tuple(array.reshape(shape) for array, shape in zip(by_encoder, shapes, strict=True))
