"""A slow, simple dispatcher on the stage graph, and random cases that compare both dispatchers."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import NamedTuple

from random_orders import random_graph

from torchmm.balance.plan_costs import PlanCosts
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, Task
from torchmm.pipelining.plan.transfers import transfers

F, B = ActionType.F, ActionType.B


class Played(NamedTuple):
    """Result of a simulated step."""

    finished: bool
    makespan_ps: int
    spans: list[list[tuple[Action, int, int]]]
    """Action, start and end, by rank."""
    peaks: list[int]


class NaiveDispatch:
    """Advances from each event time to the next."""

    def __init__(self, graph: StageGraph, costs: PlanCosts, priority: dict[Task, int]):
        self.graph, self.costs, self.priority = graph, costs, priority
        ranks = graph.layout.rank_count
        self.tasks = list(graph.tasks())
        self.now = 0
        self.running: list[tuple[Action, int] | None] = [None] * ranks
        self.spans: list[list[tuple[Action, int, int]]] = [[] for _ in range(ranks)]
        self.started: set[Action] = set()
        self.ended: set[Action] = set()
        self.arrived: set = set()  # (message, is gradient)
        self.channels = defaultdict(list)  # by pair of ranks: [message, is gradient, arrival]
        static = costs.static_bytes or (0,) * ranks
        self.used, self.peaks = list(static), list(static)

    def wire_ps(self, message, backward) -> int:
        return round(self.costs.transfer_ms.get((message, backward), 0) * 10**9)

    def run(self) -> Played:
        while True:
            self.end_finished_actions()
            for rank in range(len(self.running)):
                if self.running[rank] is None:
                    self.start(rank)
            times = [entry[1] for entry in self.running if entry]
            times += [line[0][2] for line in self.channels.values() if line]
            if not times:
                break
            self.now = min(times)
        actions = len(self.tasks) + sum(self.has_backward(task) for task in self.tasks)
        return Played(len(self.ended) == actions, self.now, self.spans, self.peaks)

    def has_backward(self, task: Task) -> bool:
        return self.graph.needs_backward(task.stage, task.microbatch)

    def end_finished_actions(self):
        for rank, entry in enumerate(self.running):
            if entry and entry[1] == self.now:
                self.running[rank] = None
                self.end(rank, entry[0])
        for line in self.channels.values():
            while line and line[0][2] == self.now:
                self.arrived.add(tuple(line.pop(0)[:2]))

    def end(self, rank: int, action: Action):
        task, graph = Task(*action[1:4]), self.graph
        self.ended.add(action)
        if action.type is B or not self.has_backward(task):
            self.used[rank] -= self.costs.saved_bytes.get(task, 0)
        if action.type is F:
            out = [(m, False, graph.consumer(m)) for m in graph.outgoing(task)]
        else:
            back = [m for m in graph.incoming(task) if graph.sends_gradient(m)]
            out = [(m, True, graph.producer(m)) for m in back]
        for message, backward, user in out:
            if graph.rank(user) == rank:
                self.arrived.add((message, backward))
                continue
            pair = rank, graph.rank(user)
            line, wire = self.channels[pair], self.wire_ps(message, backward)
            begin = max(line[-1][2] if line else 0, self.now)
            line.append([message, backward, begin + wire])

    def is_ready(self, kind: ActionType, task: Task) -> bool:
        if Action(kind, *task) in self.started:
            return False
        graph = self.graph
        if kind is F:
            return all((m, False) in self.arrived for m in graph.incoming(task))
        if not self.has_backward(task) or Action(F, *task) not in self.ended:
            return False
        return all((m, True) in self.arrived for m in graph.outgoing(task))

    def fits(self, rank: int, task: Task) -> bool:
        limit = self.costs.memory_limit_bytes
        return limit is None or self.used[rank] + self.costs.saved_bytes.get(task, 0) <= limit

    def start(self, rank: int):
        heads = {}
        for kind in (F, B):
            ready = [t for t in self.tasks if self.graph.rank(t) == rank and self.is_ready(kind, t)]
            if ready:
                heads[kind] = min(ready, key=self.priority.__getitem__)
        if F in heads and not self.fits(rank, heads[F]):
            del heads[F]
        if not heads:
            return
        last = self.spans[rank][-1][0].type if self.spans[rank] else B
        kind = (B if last is F else F) if len(heads) == 2 else next(iter(heads))
        action = Action(kind, *heads[kind])
        if kind is F:
            self.used[rank] += self.costs.saved_bytes.get(heads[F], 0)
            self.peaks[rank] = max(self.peaks[rank], self.used[rank])
        end = self.now + max(1, round(self.costs.compute_ms[action] * 10**9))
        self.started.add(action)
        self.running[rank] = action, end
        self.spans[rank].append((action, self.now, end))


def random_dispatch(seed: int) -> tuple[StageGraph, PlanCosts]:
    """Return a random graph with few different durations, and random transfers and limits."""
    rng = random.Random(seed)
    graph = random_graph(seed)
    durations = rng.choice(((1, 2), (1, 2, 3, 4), (0.25, 1, 1.5, 7), (0, 1)))
    compute = {
        Action(kind, *task): rng.choice(durations) for task in graph.tasks() for kind in (F, B)
    }
    wire = {}
    if rng.random() < 0.5:
        times = rng.choice(((0, 0.5, 1), (0.25,), (2, 5)))
        wire = {(t.message, t.backward): rng.choice(times) for t in transfers(graph)}
    kept = {task: rng.randint(0, 4) for task in graph.tasks()}
    static = tuple(rng.randrange(5) for _ in range(graph.layout.rank_count))
    limit = rng.choice((None, rng.randint(4, 30)))
    costs = PlanCosts(
        compute, transfer_ms=wire, saved_bytes=kept, static_bytes=static, memory_limit_bytes=limit
    )
    return graph, costs
