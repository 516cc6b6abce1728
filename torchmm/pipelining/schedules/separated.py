"""The "separated" schedule: modality-separated segments without a search.

Each module has separate stages (PipeWeaver, sections 5 and 6.2). Microbatches with many images
therefore lengthen only encoder tasks, and ranks that wait for an LLM task run encoder tasks of
other microbatches.

The order is the result of a greedy simulation of the step. A rank is never idle while a task is
ready. It alternates between forward and backward passes if both are ready, in microbatch order.
Backward passes of encoders have the lowest priority: no other module depends on them, so they fill
the end of the step, where backward passes of the LLM depend on each other. The order is valid for
any durations. Inaccurate durations only increase the step time.

Memory is limited by admission: a microbatch starts when the number of unfinished microbatches is
below the limit, and every started microbatch can finish. The paper stops the forward passes of a
rank whose memory is full instead, which can end in a deadlock.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf

from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, Task
from torchmm.pipelining.plan.plan import ComputeOrder, Durations


def layer_durations(graph: StageGraph) -> Durations:
    """Return durations of one unit per layer for F, I and W. B is the sum of I and W.

    All layers of all modules have the same duration. Pass measured or modeled durations to
    `separated` if they are available.
    """
    stages = graph.layout.stages

    def duration(action: Action) -> float:
        stage = stages[action.stage]
        passes = 1 + stage.trainable if action.type is ActionType.B else 1
        return float(passes * (stage.stop - stage.start))

    return duration


def separated(
    graph: StageGraph,
    durations: Durations | None = None,
    microbatches_in_flight: int | None = None,
) -> ComputeOrder:
    """Return a work-conserving order. All layouts are supported.

    Args:
        graph: Tasks of the step.
        durations: Durations of F and B actions. Defaults to `layer_durations`.
        microbatches_in_flight: Maximum number of microbatches between their first forward and their
            last backward pass. Defaults to twice the number of ranks, similar to the maximum of
            interleaved 1F1B.

    Raises:
        ValueError: The limit is below 1, or a duration is negative or not finite.
    """
    bound = (
        2 * graph.layout.rank_count if microbatches_in_flight is None else microbatches_in_flight
    )
    if bound < 1:
        raise ValueError(f"microbatches_in_flight = {bound}: must be at least 1")
    return _Dispatcher(graph, durations or layer_durations(graph), bound).run()


_Heap = list[tuple[bool, int]]
"""Ready actions as (has low priority, number)."""


class _Dispatcher:
    """Greedy simulation of a step. Actions are numbered, and lists are indexed by this number."""

    def __init__(self, graph: StageGraph, durations: Durations, bound: int) -> None:
        self.actions: list[Action] = []
        self.successors: list[list[int]] = []
        self.missing: list[int] = []
        """Number of predecessors that have not finished."""
        self.sources: list[list[int]] = [[] for _ in range(graph.microbatches)]
        """Forward passes without predecessors, by microbatch."""
        self._number(graph)
        self.ranks = [graph.rank(action.task) for action in self.actions]
        self.durations = [durations(action) for action in self.actions]
        for action, duration in zip(self.actions, self.durations, strict=True):
            if not 0 <= duration < inf:
                raise ValueError(
                    f"duration {duration} of {action}: must be finite and not negative"
                )
        self.unfinished = [0] * graph.microbatches
        for action in self.actions:
            self.unfinished[action.microbatch] += 1
        self.admitted = 0
        self.bound = bound
        count = graph.layout.rank_count
        stages = graph.layout.stages
        modules = [(stages[a].module, stages[b].module) for a, b in graph.layout.edges]
        fed = {destination for source, destination in modules if source != destination}
        self.is_fed = [stage.module in fed for stage in stages]
        """Whether another module depends on the gradients of a stage."""
        self.ready: list[tuple[_Heap, _Heap]] = [([], []) for _ in range(count)]
        """Ready forward and backward passes of each rank."""
        self.rows: list[list[Action]] = [[] for _ in range(count)]
        self.running: list[tuple[float, int]] = []
        """Heap of (end time, action)."""
        self.idle = [True] * count
        self.changed: set[int] = set()
        """Ranks with a finished or a new ready action. Visiting all ranks at every event would take
        quadratic time."""

    def _number(self, graph: StageGraph) -> None:
        """Number the actions by priority: by microbatch, then in data flow order."""
        tasks: list[list[Task]] = [[] for _ in range(graph.microbatches)]
        for task in graph.tasks():
            tasks[task.microbatch].append(task)
        for microbatch in range(graph.microbatches):
            forward: dict[Task, int] = {}
            backward: dict[Task, int] = {}
            for task in tasks[microbatch]:
                forward[task] = self._add(ActionType.F, task)
            for task in reversed(tasks[microbatch]):
                if graph.needs_backward(task.stage, microbatch):
                    backward[task] = self._add(ActionType.B, task)
            self._connect(graph, forward, backward)

    def _add(self, kind: ActionType, task: Task) -> int:
        self.actions.append(Action(kind, *task))
        self.successors.append([])
        self.missing.append(0)
        return len(self.actions) - 1

    def _connect(
        self, graph: StageGraph, forward: dict[Task, int], backward: dict[Task, int]
    ) -> None:
        """Add the dependencies of a microbatch. Microbatches are independent of each other."""
        for task, number in forward.items():
            producers = [graph.producer(message) for message in graph.incoming(task)]
            if not producers:
                self.sources[task.microbatch].append(number)
            for producer in producers:
                self._add_dependency(forward[producer], number)
                if producer in backward:
                    self._add_dependency(backward[task], backward[producer])
            if task in backward:
                self._add_dependency(number, backward[task])

    def _add_dependency(self, before: int, after: int) -> None:
        self.successors[before].append(after)
        self.missing[after] += 1

    def run(self) -> ComputeOrder:
        for _ in range(min(self.bound, len(self.sources))):
            self._admit()
        self._start_all(0.0)
        while self.running:
            now = self.running[0][0]
            while self.running and self.running[0][0] == now:
                self._end(heappop(self.running)[1])
            self._start_all(now)
        return tuple(map(tuple, self.rows))

    def _admit(self) -> None:
        for number in self.sources[self.admitted]:
            self._add_ready(number)
        self.admitted += 1

    def _add_ready(self, number: int) -> None:
        action = self.actions[number]
        is_backward = action.type is ActionType.B
        may_wait = is_backward and not self.is_fed[action.stage]
        rank = self.ranks[number]
        heappush(self.ready[rank][is_backward], (may_wait, number))
        self.changed.add(rank)

    def _start_all(self, now: float) -> None:
        for rank in sorted(self.changed):
            if self.idle[rank]:
                self._start(rank, now)
        self.changed.clear()

    def _start(self, rank: int, now: float) -> None:
        forwards, backwards = self.ready[rank]
        row = self.rows[rank]
        if forwards and backwards:
            queue = backwards if row and row[-1].type is ActionType.F else forwards
        else:
            queue = forwards or backwards
        self.idle[rank] = not queue
        if queue:
            _, number = heappop(queue)
            row.append(self.actions[number])
            heappush(self.running, (now + self.durations[number], number))

    def _end(self, number: int) -> None:
        self.idle[self.ranks[number]] = True
        self.changed.add(self.ranks[number])
        for successor in self.successors[number]:
            self.missing[successor] -= 1
            if not self.missing[successor]:
                self._add_ready(successor)
        microbatch = self.actions[number].microbatch
        self.unfinished[microbatch] -= 1
        if not self.unfinished[microbatch] and self.admitted < len(self.sources):
            self._admit()
