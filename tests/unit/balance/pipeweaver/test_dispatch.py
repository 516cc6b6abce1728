"""Tests of the dispatcher: a naive dispatcher, scheduling rules, and validity of its orders."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from dispatch_cases import even_costs, pipeline
from naive_dispatch import B, F, NaiveDispatch, random_dispatch

from torchmm.balance.picoseconds import SimulationError
from torchmm.balance.pipeweaver.schedule_search.dispatcher import Dispatcher
from torchmm.balance.plan_costs import PlanCosts
from torchmm.balance.simulation.simulator import simulate
from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.actions import Action
from torchmm.pipelining.plan.graph import Message, StageGraph, Task
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.orders import order_problems


def shuffled(dispatcher: Dispatcher, seed: int) -> np.ndarray:
    """Return a permutation of segments: of segments, of complete groups, or the default order."""
    rng = random.Random(seed)
    order = list(range(len(dispatcher.segments)))
    groups = list(range(len(dispatcher.groups)))
    rng.shuffle(order)
    rng.shuffle(groups)
    kinds = np.array(order), dispatcher.order_of_groups(groups), dispatcher.default_order
    return rng.choice(kinds)


def priorities(dispatcher: Dispatcher, order: np.ndarray) -> dict[Task, int]:
    """Return the position of the segment of each task, which is found by name."""
    positions = {dispatcher.segments[index][:3]: [] for index in order}
    for rank, index in enumerate(order):
        segment = dispatcher.segments[index]
        positions[segment[:3]].append((segment.segment, rank))
    stages = dispatcher.graph.layout.stages
    result = {}
    for task in dispatcher.graph.tasks():
        passes = segment_numbers(dispatcher.graph, stages[task.stage].module)
        result[task] = dict(positions[stages[task.stage].module, *task[1:]])[passes[task.stage]]
    return result


def segment_numbers(graph: StageGraph, module: str) -> dict[int, int]:
    """Return the pass of each stage of a module.

    A new pass starts at a stage on a rank that the current pass contains.
    """
    passes, number, ranks = {}, 0, set()
    for stage in graph.layout.stages:
        if stage.module == module:
            if ranks.intersection(stage.ranks):
                number, ranks = number + 1, set()
            ranks.update(stage.ranks)
            passes[stage.index] = number
    return passes


def test_dispatcher_matches_naive_dispatcher():
    infeasible = 0
    for seed in range(550):
        graph, costs = random_dispatch(seed)
        dispatcher = Dispatcher(graph, costs)
        order = shuffled(dispatcher, seed)
        done = dispatcher.dispatch(order)
        naive = NaiveDispatch(graph, costs, priorities(dispatcher, order)).run()
        assert [[a for a, _, _ in spans] for spans in naive.spans] == list(map(list, done.order))
        assert done.peak_bytes == tuple(naive.peaks), seed
        assert (not done.blocked) == naive.finished, seed
        expected_ms = naive.makespan_ps / 1e9 if naive.finished else math.inf
        assert done.makespan_ms == dispatcher.evaluate(order) == expected_ms, seed
        infeasible += not naive.finished
    assert 50 < infeasible < 275


def test_dispatched_orders_are_valid_and_timed():
    checked = 0
    for seed in range(400):
        graph, costs = random_dispatch(seed)
        if min(costs.compute_ms.values()) == 0:
            continue  # actions without duration take a picosecond in the dispatcher
        dispatcher = Dispatcher(graph, costs)
        done = dispatcher.dispatch(shuffled(dispatcher, seed))
        if done.blocked:
            continue
        assert order_problems(graph, done.order) == []
        plan = lower_plan(done.order, graph, {}, receives_ahead=10**6)
        assert validate_plan(plan).problems == ()
        step = simulate(plan, costs)
        assert step.makespan_ms == done.makespan_ms, seed
        assert step.peak_bytes == done.peak_bytes, seed
        checked += 1
    assert checked > 150


class Audit:
    """Check of an order against the scheduling rules, with start times from the simulation."""

    def __init__(self, dispatcher: Dispatcher, order: np.ndarray):
        self.graph, self.costs = dispatcher.graph, dispatcher.costs
        self.priority = priorities(dispatcher, order)
        self.done = dispatcher.dispatch(order)
        plan = lower_plan(self.done.order, self.graph, {}, receives_ahead=10**6)
        records = simulate(plan, self.costs).records
        self.span = {r.action: (r.start_ms, r.end_ms) for r in records if r.action.type in (F, B)}
        self.ready_ms = {action: self.ready(action) for action in self.span}

    def ready(self, action: Action) -> float:
        task, graph = Task(*action[1:4]), self.graph
        if action.type is F:
            needs = [Action(F, *graph.producer(m)) for m in graph.incoming(task)]
        else:
            needs = [Action(B, *graph.consumer(m)) for m in graph.outgoing(task)]
            needs.append(Action(F, *task))
        return max((self.span[need][1] for need in needs), default=0.0)

    def head(self, kind, rank: int, at_ms: float) -> Action | None:
        """Return the first action of the queue of a type that is ready at `at_ms`."""
        waiting = [
            a
            for a in self.done.order[rank]
            if a.type is kind and self.ready_ms[a] <= at_ms <= self.span[a][0]
        ]
        return min(waiting, key=lambda a: self.priority[Task(*a[1:4])], default=None)

    def check(self) -> int:
        """Check every choice of every rank. Return the number of choices between both types."""
        both = 0
        for rank, program in enumerate(self.done.order):
            used, last, free_ms = self.costs.static_bytes[rank], B, 0.0
            for action in program:
                start_ms, task = self.span[action][0], Task(*action[1:4])
                assert start_ms >= max(free_ms, self.ready_ms[action])
                for begin_ms in sorted({free_ms, *self.ready_between(rank, free_ms, start_ms)}):
                    allowed = self.allowed(rank, begin_ms, used)
                    if begin_ms < start_ms:
                        assert not allowed, f"rank {rank} idles before {action}"
                    else:
                        turn = B if last is F else F
                        first = turn if turn in allowed else next(iter(allowed), None)
                        assert action == allowed.get(first), f"rank {rank} takes {action}"
                        both += len(allowed) == 2
                kept = self.costs.saved_bytes.get(task, 0)
                if action.type is F:
                    used += kept
                    assert self.costs.memory_limit_bytes is None or (
                        used <= self.costs.memory_limit_bytes
                    )
                if action.type is B or not self.graph.needs_backward(*task[:2]):
                    used -= kept
                last, free_ms = action.type, self.span[action][1]
        return both

    def ready_between(self, rank: int, begin_ms: float, end_ms: float) -> list[float]:
        times = (self.ready_ms[a] for a in self.done.order[rank])
        return [t for t in times if begin_ms <= t <= end_ms] + [end_ms]

    def allowed(self, rank: int, at_ms: float, used: int) -> dict:
        heads = {kind: self.head(kind, rank, at_ms) for kind in (F, B)}
        heads = {kind: head for kind, head in heads.items() if head is not None}
        limit = self.costs.memory_limit_bytes
        if F in heads and limit is not None:
            used += self.costs.saved_bytes.get(Task(*heads[F][1:4]), 0)
            return heads if used <= limit else {B: heads[B]} if B in heads else {}
        return heads


def test_ranks_follow_rules_without_idling():
    checked = both = 0
    for seed in range(300):
        graph, costs = random_dispatch(seed)
        costs = replace(costs, transfer_ms={})
        if min(costs.compute_ms.values()) == 0:
            continue
        dispatcher = Dispatcher(graph, costs)
        order = shuffled(dispatcher, seed)
        if dispatcher.evaluate(order) == math.inf:
            continue
        both += Audit(dispatcher, order).check()
        checked += 1
    assert checked > 100 and both > 500


def test_priorities_determine_microbatch_order():
    graph = pipeline(2, [0, 0, 0])
    dispatcher = Dispatcher(graph, even_costs(graph))
    done = dispatcher.dispatch(np.array([2, 0, 1]))
    assert [str(a) for a in done.order[0]] == ["2F2", "2F0", "2F1", "2B2", "2B0", "2B1"]
    assert [str(a) for a in done.order[1]] == ["3F2", "3B2", "3F0", "3B0", "3F1", "3B1"]
    assert done.makespan_ms == 3 * 6 + 6


def test_link_sends_one_message_at_once():
    graph = pipeline(2, [0, 0])
    wire = {(Message(2, 3, m), back): 3.0 for m in (0, 1) for back in (False, True)}
    done = Dispatcher(graph, even_costs(graph, llm_ms=1.0, transfer_ms=wire)).dispatch()
    # Forward actions end at 1 and 2 and arrive at 4 and 7. Backward actions end at 7 and 10 and
    # arrive at 10 and 13.
    assert done.makespan_ms == 15


def test_many_segments_are_dispatched():
    # More than 64 * 64 priorities need more than one word of the summary.
    graph = pipeline(1, [1] * 2100)
    dispatcher = Dispatcher(graph, even_costs(graph))
    assert len(dispatcher.segments) == 4200
    done = dispatcher.dispatch(dispatcher.default_order[::-1])
    assert done.makespan_ms == 2100 * 9
    forwards = [a.microbatch for a in done.order[0] if a.type is F and a.stage == 1]
    assert forwards == list(range(2099, -1, -1))


def test_insufficient_memory_is_reported_with_reasons():
    graph = pipeline(2, [0, 0])
    kept = {task: 7 for task in graph.tasks()}
    costs = even_costs(graph, saved_bytes=kept, static_bytes=(5, 2), memory_limit_bytes=10)
    done = Dispatcher(graph, costs).dispatch()
    assert done.blocked and done.makespan_ms == math.inf
    assert done.blocked == (
        "rank 0: 2F0 requires 7 bytes, but only 5 of 5 are free, and no backward pass can run",
    )
    assert not Dispatcher(graph, replace(costs, memory_limit_bytes=12)).dispatch().blocked


def test_encoder_memory_can_block_the_llm():
    # All encoders run first. Rank 0 then lacks memory for the LLM, so no backward pass can start.
    graph = pipeline(2, [1, 1, 1])
    kept = {task: 1 for task in graph.tasks()}
    costs = even_costs(graph, saved_bytes=kept, memory_limit_bytes=3)
    dispatcher = Dispatcher(graph, costs)
    encoders = [i for i, s in enumerate(dispatcher.segments) if s.module == "vision"]
    llm_segments = [i for i, s in enumerate(dispatcher.segments) if s.module == "llm"]
    done = dispatcher.dispatch(np.array(encoders + llm_segments))
    assert [text.split(" requires")[0] for text in done.blocked] == ["rank 0: 2F0"]
    assert [str(a) for a in done.order[0]] == ["0F0", "0F1", "0F2"]
    assert not dispatcher.dispatch().blocked


def test_segments_and_groups_have_default_order():
    graph = pipeline(2, [2, 0], segments=2)
    dispatcher = Dispatcher(graph, even_costs(graph))
    assert [tuple(s) for s in dispatcher.segments] == [
        ("vision", 0, 0, 0),
        ("vision", 0, 1, 0),
        ("llm", 0, 0, 0),
        ("llm", 0, 0, 1),
        ("llm", 1, 0, 0),
        ("llm", 1, 0, 1),
    ]
    assert dispatcher.groups == ((0, 1), (2, 3), (4, 5))
    assert dispatcher.order_of_groups([2, 0, 1]).tolist() == [4, 5, 0, 1, 2, 3]


def test_evaluations_are_independent():
    graph, costs = random_dispatch(5)
    dispatcher = Dispatcher(graph, costs)
    orders = [shuffled(dispatcher, seed) for seed in range(20)]
    first = [dispatcher.evaluate(order) for order in orders]
    assert [dispatcher.evaluate(order) for order in orders[::-1]][::-1] == first


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [0, 1, 3], [0, 1, 2, 3], [0, 1, -1]])
def test_orders_must_be_permutations(order):
    graph = pipeline(1, [0, 0, 0])
    with pytest.raises(ValueError, match="each of 0 to 2 once"):
        Dispatcher(graph, even_costs(graph)).evaluate(np.array(order))


def test_invalid_costs_are_reported_together():
    graph = pipeline(2, [0, 1])
    costs = even_costs(graph)
    compute = {**costs.compute_ms, Action(F, 2, 1): math.nan}
    del compute[Action(B, 3, 1)]
    bad = PlanCosts(
        compute,
        transfer_ms={(Message(2, 3, 0), True): -1.0},
        saved_bytes={Task(2, 1): -7},
        static_bytes=(1,),
    )
    with pytest.raises(SimulationError) as caught:
        Dispatcher(graph, bad)
    assert len(caught.value.problems) == 5
    for text in ("2F1 has a duration of nan", "3B1 has no duration", "gradient of Message",
                 "saves -7 bytes", "static_bytes of 1 ranks for a plan of 2"):  # fmt: skip
        assert text in str(caught.value)
