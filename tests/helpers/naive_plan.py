"""A slow, simple simulation of plans without a graph, in which every rank advances while it can.

The module also makes random plans with random costs. Times are integer picoseconds.
"""

from __future__ import annotations

import random
from collections import defaultdict

from random_orders import random_graph, random_order, random_specs

from torchmm.balance.plan_costs import PlanCosts
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.plan.transfers import transfers

T = ActionType


def ps(ms: float) -> int:
    return round(ms * 10**9)


class Play:
    """A simulation; afterwards `times` has (start, end) of every action by rank."""

    def __init__(self, plan: PipelinePlan, costs: PlanCosts):
        self.plan, self.costs = plan, costs
        ranks = len(plan.actions)
        self.now = [0] * ranks
        self.gather_free = [0] * ranks
        self.gathered: dict[tuple[int, int], int] = {}
        self.at_reduction: dict[tuple[int, int], int] = {}  # by rank and stage
        self.sent, self.received = defaultdict(list), defaultdict(list)  # by channel: times
        self.wire_ms = defaultdict(list)  # by channel: durations
        self.number: dict[tuple[int, Action], tuple[tuple[int, int], int]] = {}
        self.reached: dict[tuple, int] = {}
        self.times: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        sent_bytes = {}
        for transfer in transfers(plan.graph, plan.training):
            send, wait_send, receive, wait = transfer.actions()
            duration_ms = costs.transfer_ms.get((transfer.message, transfer.backward), 0)
            sent_bytes[transfer.source, send] = duration_ms, wait_send
            sent_bytes[transfer.destination, receive] = duration_ms, wait
        self.sent_bytes = sent_bytes
        changed = True
        while changed:
            changed = False
            for rank, program in enumerate(plan.actions):
                while len(self.times[rank]) < len(program):
                    span = self.act(rank, program[len(self.times[rank])])
                    if span is None:
                        break
                    self.times[rank].append(span)
                    changed = True
        assert [len(t) for t in self.times] == [len(p) for p in plan.actions], "stuck"
        for rank, program in enumerate(plan.actions if costs.overlaps_communication else ()):
            for position, action in enumerate(program):
                if action.type is T.REDUCE_GRAD:
                    start, _ = self.times[rank][position]
                    self.times[rank][position] = start, self.reduced(rank, action.stage)

    def reduced(self, rank: int, stage: int) -> int | None:
        """Return the end of a reduction, sequentially on each rank; None: a rank is missing."""
        end = 0
        for action in self.plan.actions[rank]:
            if action.type is not T.REDUCE_GRAD:
                continue
            ranks = self.plan.graph.layout.stages[action.stage].ranks
            arrivals = [self.at_reduction.get((r, action.stage)) for r in ranks]
            if None in arrivals:
                return None
            end = max(end, *arrivals) + ps(self.costs.reduce_ms.get(action.stage, 0))
            if action.stage == stage:
                return end
        raise AssertionError("reduction not found")

    def reduce_tied(self, rank: int, action: Action) -> int | None:
        ready = self.now[rank]
        if self.costs.overlaps_communication and (rank, action.stage) in self.at_reduction:
            reduced = self.reduced(rank, action.stage)
            if reduced is None:
                return None
            ready = max(ready, reduced)
        local = self.reached.setdefault((rank, action.stage), ready)
        remote = self.reached.get((action.peer, action.other))
        return (
            None
            if remote is None
            else max(local, remote) + ps(self.costs.tied_ms.get(action.stage, 0))
        )

    def act(self, rank: int, action: Action) -> tuple[int, int] | None:
        kind, start = action.type, self.now[rank]
        if kind is T.UNSHARD:
            begin = max(start, self.gather_free[rank])
            end = begin + ps(self.costs.gather_ms.get(action.stage, 0))
            self.gather_free[rank] = self.gathered[rank, action.stage] = end
            return begin, end
        if kind is T.REDUCE_GRAD:
            ready = max(start, self.gathered.get((rank, action.stage), 0))
            self.at_reduction[rank, action.stage] = ready
            if self.costs.overlaps_communication:
                return start, start  # the end is set after the simulation
            ranks = self.plan.graph.layout.stages[action.stage].ranks
            arrivals = [self.at_reduction.get((r, action.stage)) for r in ranks]
            if None in arrivals:
                return None
            end = max(arrivals) + ps(self.costs.reduce_ms.get(action.stage, 0))
        elif kind in COMPUTE or kind is T.RESHARD:
            start = max(start, self.gathered.get((rank, action.stage), 0))
            end = start + ps(self.costs.compute_ms.get(action, 0))
        elif kind is T.REDUCE_TIED:
            end = self.reduce_tied(rank, action)
            if end is None:
                return None
        elif (rank, action) in self.sent_bytes:
            self.post(rank, action)
            end = start
        else:
            end = self.arrival(*self.number[rank, action])
            if end is None:
                return None
            end = max(start, end)
        self.now[rank] = end
        return start, end

    def post(self, rank: int, action: Action):
        sends = action.type in (T.SEND_F, T.SEND_B)
        channel = (rank, action.peer) if sends else (action.peer, rank)
        posted = (self.sent if sends else self.received)[channel]
        duration_ms, wait = self.sent_bytes[rank, action]
        self.number[rank, wait] = channel, len(posted)
        posted.append(self.now[rank])
        if sends:
            self.wire_ms[channel].append(duration_ms)

    def arrival(self, channel: tuple[int, int], index: int) -> int | None:
        sent, received = self.sent[channel], self.received[channel]
        if min(len(sent), len(received)) <= index:
            return None
        before = self.arrival(channel, index - 1) if index else 0
        return max(before, sent[index], received[index]) + ps(self.wire_ms[channel][index])


def random_plan(seed: int) -> PipelinePlan:
    """Return a plan of a random graph in a random legal order, with or without sharding."""
    rng = random.Random(seed)
    graph = random_graph(seed)
    return lower_plan(
        random_order(graph, seed),
        graph,
        random_specs(graph, seed),
        sharding=rng.choice(("none", "step")),
        receives_ahead=rng.randrange(4),
    )


def random_costs(plan: PipelinePlan, seed: int) -> PlanCosts:
    """Return few different durations, so that many actions end at the same time."""
    rng = random.Random(seed)
    graph, stages = plan.graph, range(len(plan.graph.layout.stages))
    compute = [a for program in plan.actions for a in program if a.type in COMPUTE]
    kept = {task: rng.randint(0, 50) for task in graph.tasks()}
    return PlanCosts(
        compute_ms={a: rng.choice((0, 0.5, 1, 2, 3.7)) for a in compute},
        tp_comm_ms={a: 0.0 for a in compute if rng.random() < 0.5},
        gather_ms={stage: rng.choice((0, 1, 2.5)) for stage in stages},
        reduce_ms={stage: rng.choice((0, 1, 2.5)) for stage in stages if rng.random() < 0.9},
        tied_ms={stage: rng.choice((0, 1)) for stage in stages},
        transfer_ms={
            (transfer.message, transfer.backward): rng.choice((0, 0.25, 1.5))
            for transfer in transfers(graph, plan.training)
            if rng.random() < 0.9
        },
        saved_bytes=kept,
        saved_for_weights_bytes={task: rng.randint(0, 2 * n) for task, n in kept.items()},
        static_bytes=tuple(rng.randrange(100) for _ in plan.actions),
        overlaps_communication=rng.random() < 0.5,
    )
