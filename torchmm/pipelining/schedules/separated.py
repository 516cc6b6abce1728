"""Modality-separated segments in natural order: PipeWeaver (§5, §6.2) without its search.

Every module has its own stages, so microbatches with many images lengthen the encoder's tasks
only, and ranks whose LLM task waits run other microbatches' encoder tasks. Orders come from playing
the step through: a rank never idles while it has a task that can start; it takes forwards and
backwards in turn if both can, each in the order of microbatches, backwards of encoders after those
of other modules: no other module waits for them, so they are what fills the end of the step, where
backwards of the LLM wait for each other. Whatever durations are assumed, the resulting order is
legal and keeps the bound on microbatches in flight; wrong ones cost time.

Memory is bounded by admission: a microbatch may start once few enough are unfinished, and what has
started can always finish. Rejected: switching a rank's forwards off when it is full, as the paper
has it, because then all ranks may wait for each other. Rejected: an event list without ready
queues (a rank must look at what became ready while it was busy, or it sleeps although it could
work).
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf

from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, Task
from torchmm.pipelining.plan.plan import ComputeOrder, Durations


def layer_durations(graph: StageGraph) -> Durations:
    """One unit per layer for F, I and W each; B is I and W, without the W if the stage is frozen.

    Layers of all modules count alike; pass `separated` measured or modelled times where they are
    known.
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
    """Work-conserving order over any layout, replicas too.

    Args:
        durations: of F and B actions; None: `layer_durations`.
        microbatches_in_flight: how many microbatches may be between their first forward and their
            last backward anywhere; None: twice the number of ranks, about what interleaved 1F1B
            has at most.

    Raises:
        ValueError: the bound is below 1, or a duration negative or not finite.
    """
    bound = (
        2 * graph.layout.rank_count if microbatches_in_flight is None else microbatches_in_flight
    )
    if bound < 1:
        raise ValueError(f"microbatches_in_flight = {bound}: must be at least 1")
    return _Dispatcher(graph, durations or layer_durations(graph), bound).run()


_Heap = list[tuple[bool, int]]
"""Actions that can start: those that may wait (True) last, then lower numbers first."""


class _Dispatcher:
    """Plays a step through. Actions are numbered; lists are indexed by that number."""

    def __init__(self, graph: StageGraph, durations: Durations, bound: int) -> None:
        self.actions: list[Action] = []
        self.successors: list[list[int]] = []
        self.missing: list[int] = []
        """Predecessors that have not ended."""
        self.sources: list[list[int]] = [[] for _ in range(graph.microbatches)]
        """By microbatch: forwards without predecessors."""
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
        """By stage: whether other modules feed its module, and wait for its gradients."""
        self.ready: list[tuple[_Heap, _Heap]] = [([], []) for _ in range(count)]
        """By rank: forwards and backwards that can start."""
        self.rows: list[list[Action]] = [[] for _ in range(count)]
        self.running: list[tuple[float, int]] = []
        """Heap of (end, action)."""
        self.idle = [True] * count
        self.changed: set[int] = set()
        """Ranks that ended an action, or have one more that can start, since they were looked at:
        looking at all of them would take time that grows with the square of their number."""

    def _number(self, graph: StageGraph) -> None:
        """Numbers are priorities: by microbatch, forwards along and backwards against the data."""
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
        """Dependencies within a microbatch; there are no others."""
        for task, number in forward.items():
            producers = [graph.producer(message) for message in graph.incoming(task)]
            if not producers:
                self.sources[task.microbatch].append(number)
            for producer in producers:
                self._precede(forward[producer], number)
                if producer in backward:
                    self._precede(backward[task], backward[producer])
            if task in backward:
                self._precede(number, backward[task])

    def _precede(self, before: int, after: int) -> None:
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
            self._make_ready(number)
        self.admitted += 1

    def _make_ready(self, number: int) -> None:
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
                self._make_ready(successor)
        microbatch = self.actions[number].microbatch
        self.unfinished[microbatch] -= 1
        if not self.unfinished[microbatch] and self.admitted < len(self.sources):
            self._admit()
