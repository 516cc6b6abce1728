"""Encoder work in the bubbles of an LLM's pipeline: Optimus' bubble scheduler (§4.2-4.3).

Coarse: encoder forwards run before the LLM's first action on their rank, backwards after its last.
Fine: kernels also go into the bubbles between and inside the LLM's actions. The LLM's own timeline
stays what it is; where bubbles do not suffice, all of it starts later (`before_ms`), or the step
ends later (`after_ms`).

    1. Assignment: each next task goes to the pipeline that finishes it first. For tasks that are
       alike this is the best there is: it merges the pipelines' sequences of ends, so the i-th end
       is as early as any assignment can make it (global ordering: EF_i <= F_i for all i). The
       least delay for which all F_i are met is found by bisection; more delay never hurts.
    2. Delay of a given assignment: tasks are placed backwards in time from the F_i, as late as
       possible; how far they reach before the step's begin is the least delay, exactly.
    3. Placement: with that delay, forwards run as early as possible, which leaves late bubbles to
       backwards. Those run as early as possible after B_i, in the pipelines of their forwards.
    4. Search: tasks change pipelines, by annealing, as more than the order of forwards matters:
       backwards must run where their forwards did, and tasks may differ.

Per-device order and unsplit kernels make 2 and 3 exact: in a fixed order, placing every kernel in
the first free interval that holds it ends nothing later than any other way.

Rejected: the paper's enumeration of all partitions of the microbatches among the pipelines with
hill climbing in each, which takes minutes; and sorting backward starts without regard to which
pipeline holds the activations.

The best assignment of tasks to pipelines is searched with its cost as a black box. Small spaces are
enumerated. In others, simulated annealing moves one task or exchanges two; a cost is the longest of
several sums, so descent alone stops where two tasks would have to change places with one. Seeded:
the same input gives the same assignment.
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

from torchmm.balance.compiled import Int32s, Int64s
from torchmm.balance.optimus.encoder_work import EncoderWork
from torchmm.balance.optimus.free_time import ALWAYS_PS
from torchmm.balance.optimus.llm_timeline import LlmTimeline, RankActions
from torchmm.balance.optimus.scheduler_kernels import (
    Flags,
    Pass,
    Pipelines,
    Room,
    Tasks,
    assign_tasks,
    place,
    residual,
    start_cursor,
)
from torchmm.balance.picoseconds import PICOSECONDS_PER_MS
from torchmm.costs.sizes import Array
from torchmm.pipelining.plan.actions import Action

TEMPERATURE = 0.02
"""At the begin, as a share of the cost; it falls to 0."""
REPEATS = 4
"""Moves per evaluation that may lead to an assignment seen before."""


def search_assignment(
    starts: Sequence[Int32s],
    choices: Sequence[range],
    cost: Callable[[Int32s], int],
    *,
    evaluations: int,
    enough: int = 0,
) -> Int32s:
    """The cheapest assignment found.

    Args:
        starts: assignments to begin from; at least one. Never worse than the best of them.
        choices: by task: its possible places.
        cost: of an assignment; positive.
        evaluations: how many assignments, in addition to the first ones, may be evaluated.
        enough: a cost at which to stop.
    """
    best = min(starts, key=cost)
    least = cost(best)
    if least <= enough:
        return best
    if prod(map(len, choices)) <= evaluations:
        every = (np.array(found, np.int32) for found in product(*choices))
        return min([best, *every], key=cost)
    free = [task for task, places in enumerate(choices) if len(places) > 1]
    if not free:
        return best
    rng = random.Random(0)
    costs = {best.tobytes(): least}
    current, height = best, least
    steps = evaluations * REPEATS
    for step in range(steps):
        if len(costs) > evaluations or least <= enough:
            break
        tried = _moved(current, free, choices, rng)
        key = tried.tobytes()
        if key not in costs:
            costs[key] = cost(tried)
        rise = costs[key] - height
        temperature = TEMPERATURE * least * (1 - step / steps)
        if rise <= 0 or rng.random() < exp(-rise / temperature):
            current = tried
            height = costs[key]
            if height < least:
                best, least = current, height
    return best


def _moved(
    current: Int32s, free: Sequence[int], choices: Sequence[range], rng: random.Random
) -> Int32s:
    """One task elsewhere, or two of the same choices exchanged."""
    tried = current.copy()
    one = rng.choice(free)
    other = rng.choice(free)
    if rng.random() < 0.5 or choices[one] != choices[other]:
        tried[one] = rng.choice(choices[one])
    else:
        tried[[one, other]] = current[[other, one]]
    return tried


Granularity = Literal["coarse", "fine"]
BISECTION = 1e-4
"""Share of the longest delay to which bisection goes; the delay itself is then found exactly."""


@dataclass(frozen=True, eq=False)
class BubbleSchedule:
    """Which encoder kernel runs where and when. Times count from the begin of the step.

    Attributes:
        llm: by rank: the LLM's actions.
        pipeline_N: by encoder: the pipeline of each task.
        forward_start_ps, backward_start_ps: by encoder: (N, S, K), of its kernels.
        llm_ms: the step without encoders.
        before_ms, after_ms: by how much encoders lengthen it, before and after the LLM.
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
        """The step."""
        return self.llm_ms + self.before_ms + self.after_ms

    @property
    def busy_ms(self) -> float:
        """Encoder computation per device, mean."""
        devices = len(self.timeline.ranks) * max(work.tensor_groups for work in self.works)
        return sum(work.busy_ms for work in self.works) / devices

    @property
    def efficiency(self) -> float:
        """Share of encoder computation that bubbles hide (Optimus §5.3.2); 1 without any."""
        return 1 - (self.before_ms + self.after_ms) / self.busy_ms if self.busy_ms else 1.0


class Placed(NamedTuple):
    """What came of an assignment; times from the begin of the LLM's own timeline."""

    total_ps: int
    before_ps: int
    forward_ps: Int64s
    """By kernel."""
    backward_ps: Int64s
    handed_ps: Int64s
    """By task: when the LLM has it."""


def fill_bubbles(
    timeline: LlmTimeline,
    works: Sequence[EncoderWork],
    granularity: Granularity = "fine",
    *,
    evaluations: int = 256,
) -> BubbleSchedule:
    """The best schedule found.

    Args:
        timeline: of the LLM.
        works: of all encoders, scheduled as if they were one (Optimus §4.4).
        granularity: fine schedules are never longer than coarse ones.
        evaluations: how many assignments the search may try.

    Raises:
        ValueError: encoders count different `tensor_groups`, or tasks or devices are not those of
            the timeline.
    """
    filler = BubbleFiller(timeline, works)
    starts = [filler.forward_first("coarse"), filler.backward_first("coarse")]
    coarse = filler.search("coarse", starts, evaluations if granularity == "coarse" else 0)
    if granularity == "coarse":
        return filler.coarse_schedule(coarse)
    starts = [filler.forward_first("fine"), filler.backward_first("fine"), coarse]
    fine = filler.schedule("fine", filler.search("fine", starts, evaluations))
    return min(fine, filler.coarse_schedule(coarse), key=lambda schedule: schedule.total_ms)


class BubbleFiller:
    """Evaluates assignments of tasks to pipelines; `fill_bubbles` says of what.

    Attributes:
        keys: (encoder, microbatch, sub-microbatch) of each task, in the order of assignments.
        choices: by task: the pipelines of its encoder.
    """

    def __init__(self, timeline: LlmTimeline, works: Sequence[EncoderWork]) -> None:
        _check(timeline, works)
        self.timeline = timeline
        self.works = tuple(works)
        self.keys = [(i, *task) for i, work in enumerate(works) for task in work.tasks]
        encoder = np.array([key[0] for key in self.keys], np.int32)
        microbatch = np.array([key[1] for key in self.keys], np.int64)
        self._needed = timeline.needed_ps[microbatch]
        self._returned = timeline.returned_ps[microbatch]
        self._pipelines = _pipelines(timeline, works)
        first = self._pipelines.first[encoder]
        last = self._pipelines.first[encoder + 1]
        self.choices = [range(a, b) for a, b in zip(first.tolist(), last.tolist(), strict=True)]
        order = np.lexsort((microbatch, self._needed))
        self._forward = _tasks(
            [(w.forward_ms_NSK, w.links[0], w.hops_ms_NS) for w in works], encoder, order
        )
        order = np.lexsort((microbatch, self._returned))
        self._backward = _tasks(
            [(w.backward_ms_NSK, w.links[1], w.hops_ms_NS) for w in works], encoder, order
        )
        self._gathered = timeline.gathered_ps[self._pipelines.rank]
        self._rooms: dict[tuple[Granularity, bool], Room] = {}

    def forward_first(self, granularity: Granularity) -> Int32s:
        """Each next forward to the pipeline that finishes it first, with the least delay."""
        way = Pass(self._forward, self._pipelines, self._room(granularity), False, False)
        free = np.full(len(self.keys), -ALWAYS_PS)
        # All kernels one after the other before the LLM begins: certainly enough.
        low = -1
        high = int(self._forward.duration_ps.sum() + self._forward.hop_ps.sum())
        best = np.zeros(len(self.keys), np.int32)
        self._assign(way, free, self._needed, self._gathered - high, best)
        tolerance = int(BISECTION * high) + 1
        while high - low > tolerance:
            delay = (low + high) // 2
            tried = best.copy()
            if self._assign(way, free, self._needed, self._gathered - delay, tried):
                best, high = tried, delay
            else:
                low = delay
        return best

    def backward_first(self, granularity: Granularity) -> Int32s:
        """Each next backward to the pipeline that finishes it first, as if forwards took none of
        the bubbles."""
        count = len(self.keys)
        room = self._room(granularity)
        way = Pass(self._backward, self._pipelines, room, True, False)
        never = np.full(count, ALWAYS_PS)
        found = np.zeros(count, np.int32)
        self._assign(way, self._returned, never, np.full(len(self._gathered), -ALWAYS_PS), found)
        return found

    @staticmethod
    def _assign(
        way: Pass, release_ps: Int64s, deadline_ps: Int64s, begin_ps: Int64s, found: Int32s
    ) -> bool:
        cursor = start_cursor(way.room, begin_ps)
        saved = start_cursor(way.room, begin_ps)
        scratch = np.empty(len(way.tasks.duration_ps), np.int64)
        return bool(assign_tasks(way, release_ps, deadline_ps, cursor, saved, scratch, found))

    def search(
        self, granularity: Granularity, starts: Sequence[Int32s], evaluations: int
    ) -> Int32s:
        """The best assignment found, beginning with some."""
        return search_assignment(
            starts,
            self.choices,
            lambda tried: self.evaluate(granularity, tried).total_ps,
            evaluations=evaluations,
            enough=self.timeline.llm_ps,
        )

    def evaluate(self, granularity: Granularity, pipeline_of: Int32s) -> Placed:
        """The placement of an assignment (steps 2 and 3)."""
        count = len(self.keys)
        ranks = self._pipelines.rank
        room = self._room(granularity)
        start = np.zeros(len(self._forward.duration_ps), np.int64)
        end = np.zeros(count, np.int64)
        unbound = np.full(len(ranks), -ALWAYS_PS)
        mirrored = Pass(self._forward, self._pipelines, self._room(granularity, True), True, True)
        cursor = start_cursor(mirrored.room, unbound)
        place(mirrored, pipeline_of, -self._needed, cursor, start, end)
        before_ps = max(0, int((cursor.time_ps + self._gathered).max(initial=0)))
        way = Pass(self._forward, self._pipelines, room, False, False)
        cursor = start_cursor(room, self._gathered - before_ps)
        place(way, pipeline_of, np.full(count, -ALWAYS_PS), cursor, start, end)
        back = Pass(self._backward, self._pipelines, residual(way, pipeline_of, start), True, False)
        back_start = np.zeros(len(self._backward.duration_ps), np.int64)
        back_end = np.zeros(count, np.int64)
        cursor = start_cursor(back.room, unbound)
        place(back, pipeline_of, self._returned, cursor, back_start, back_end)
        done = cursor.time_ps
        ends = [int(done[ranks == rank].max(initial=0)) for rank in range(len(self.timeline.ranks))]
        total_ps = before_ps + self.timeline.step_end_ps(ends)
        return Placed(total_ps, before_ps, start, back_start, end)

    def schedule(self, granularity: Granularity, pipeline_of: Int32s) -> BubbleSchedule:
        """The schedule of an assignment; the LLM starts later as a whole."""
        placed = self.evaluate(granularity, pipeline_of)
        timeline = self.timeline
        before = placed.before_ps
        llm = [
            RankActions(own.actions, own.start_ps + before, own.end_ps + before)
            for own in timeline.ranks
        ]
        after_ps = placed.total_ps - before - timeline.llm_ps
        # Pipelines of each encoder's tasks, counted within the encoder.
        counts = np.cumsum([len(work.tasks) for work in self.works])[:-1]
        pipelines = zip(np.split(pipeline_of, counts), self._pipelines.first, strict=False)
        return BubbleSchedule(
            timeline,
            self.works,
            tuple(llm),
            tuple(own - first for own, first in pipelines),
            _shaped(placed.forward_ps + before, [w.forward_ms_NSK.shape for w in self.works]),
            _shaped(placed.backward_ps + before, [w.backward_ms_NSK.shape for w in self.works]),
            *(ps / PICOSECONDS_PER_MS for ps in (timeline.llm_ps, before, after_ps)),
        )

    def coarse_schedule(self, pipeline_of: Int32s) -> BubbleSchedule:
        """The coarse schedule of an assignment, every action of the LLM as early as encoders allow.

        That is what a plan does; where the LLM's stages differ it may be less than moving it whole.
        """
        placed = self.evaluate("coarse", pipeline_of)
        timeline = self.timeline
        ends = self._device_ends(placed.forward_ps, pipeline_of)
        released: dict[Action, int] = {}
        for rank, own in enumerate(timeline.ranks):
            released[own.actions[0]] = int(ends[self._pipelines.rank == rank].max(initial=0))
        for action in timeline.entries():
            mine = [key[1] == action.microbatch for key in self.keys]
            handed = int(placed.handed_ps[mine].max(initial=0))
            released[action] = max(released.get(action, 0), handed)
        before = placed.before_ps
        waiting = timeline.waiting({a: max(0, ps + before) for a, ps in released.items()})
        found = BubbleFiller(waiting, self.works).schedule("coarse", pipeline_of)
        before_ms = (waiting.llm_ps - timeline.llm_ps) / PICOSECONDS_PER_MS
        return replace(
            found,
            timeline=timeline,
            llm_ms=timeline.llm_ps / PICOSECONDS_PER_MS,
            before_ms=found.before_ms + before_ms,
        )

    def _room(self, granularity: Granularity, mirrored: bool = False) -> Room:
        key = granularity, mirrored
        if key not in self._rooms:
            timeline = self.timeline
            if granularity == "coarse":
                free = [timeline.free_outside()] * 2
            else:
                free = [timeline.free_compute(), timeline.free_links()]
            free = [each.of_devices(self._pipelines.rank.tolist()) for each in free]
            free = [each.mirrored() if mirrored else each for each in free]
            self._rooms[key] = Room(*free[0], *free[1])
        return self._rooms[key]

    def _device_ends(self, start_ps: Int64s, pipeline_of: Int32s) -> Int64s:
        """By device: end of its last forward kernel."""
        ends = np.full(len(self._pipelines.rank), -ALWAYS_PS)
        tasks = self._forward
        for task, pipeline in enumerate(pipeline_of.tolist()):
            for row in range(tasks.first[task], tasks.first[task + 1]):
                first = self._pipelines.device[pipeline, row - tasks.first[task]]
                devices = slice(first, first + self._pipelines.width[pipeline])
                own = slice(tasks.pointers[row], tasks.pointers[row + 1])
                busy = tasks.duration_ps[own] > 0
                last = (start_ps[own] + tasks.duration_ps[own])[busy].max(initial=-ALWAYS_PS)
                ends[devices] = np.maximum(ends[devices], last)
        return ends


def _check(timeline: LlmTimeline, works: Sequence[EncoderWork]) -> None:
    """Raises a ValueError for works that cannot be on the timeline's devices."""
    tensor_groups = {work.tensor_groups for work in works}
    if len(tensor_groups) != 1:
        raise ValueError(
            f"encoders {[work.name for work in works]} have {sorted(tensor_groups)} devices "
            "per rank of the LLM; use the same number for all, and set a width for those "
            "that are split over more ranks"
        )
    devices = len(timeline.ranks) * tensor_groups.pop()
    count = len(timeline.needed_ps)
    for work in works:
        used = sorted(work.devices.tolist())
        if used != list(range(devices)):
            raise ValueError(
                f"{work.name}: its pipelines are on devices {used}; assign them to all "
                f"{devices} devices"
            )
        if wrong := [task for task in work.tasks if not 0 <= task[0] < count]:
            raise ValueError(f"{work.name}: task {wrong[0]} of a step of {count} microbatches")


def _pipelines(timeline: LlmTimeline, works: Sequence[EncoderWork]) -> Pipelines:
    stages = max(work.devices_MS.shape[1] for work in works)
    rows = [
        np.pad(work.devices_MS, ((0, 0), (0, stages - work.devices_MS.shape[1]))) for work in works
    ]
    first = np.cumsum([0, *(len(own) for own in rows)])
    ranks = np.repeat(np.arange(len(timeline.ranks)), works[0].tensor_groups)
    device = np.concatenate(rows).astype(np.int32)
    width = np.repeat([work.width for work in works], [len(own) for own in rows]).astype(np.int32)
    of_device = ranks.astype(np.int32)
    return Pipelines(first.astype(np.int32), device, width, of_device, timeline.entry_rank)


def _tasks(
    passes: Sequence[tuple[Array, Flags, Array]], encoder: Int32s, order: NDArray[np.intp]
) -> Tasks:
    """One direction of all encoders: durations (N, S, K), flags (K,), hops (N, S) of each."""
    counts, kernels, durations, flags, hops = [], [], [], [], []
    for duration_ms, links, hop_ms in passes:
        tasks, stages, size = duration_ms.shape
        counts += [stages] * tasks
        kernels += [size] * (tasks * stages)
        durations.append(_picoseconds(duration_ms))
        flags.append(np.tile(links, tasks * stages))
        hops.append(_picoseconds(hop_ms))
    return Tasks(
        encoder,
        np.cumsum([0, *counts]).astype(np.int32),
        np.cumsum([0, *kernels]).astype(np.int32),
        np.concatenate(durations),
        np.concatenate(flags),
        np.concatenate(hops),
        order.astype(np.int32),
    )


def _picoseconds(times_ms: Array) -> Int64s:
    return np.rint(times_ms.reshape(-1) * PICOSECONDS_PER_MS).astype(np.int64)


def _shaped(values: Int64s, shapes: Sequence[tuple[int, ...]]) -> tuple[Int64s, ...]:
    by_encoder = np.split(values, np.cumsum([prod(shape) for shape in shapes])[:-1])
    return tuple(own.reshape(shape) for own, shape in zip(by_encoder, shapes, strict=True))
