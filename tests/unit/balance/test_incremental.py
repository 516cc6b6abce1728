"""Edited graphs: after every edit all times are those of a graph simulated from scratch."""

import random

import pytest
from naive_graph import Operator, build, naive_times, random_case

from torchmm.balance.picoseconds import SimulationError
from torchmm.balance.simulation.incremental import IncrementalTimes
from torchmm.balance.simulation.operator_graph import OperatorGraph


class Edited:
    """A random graph and its incremental simulation, edited alike.

    The naive side has no queues: their chains are written as edges, so that they can be removed.
    """

    def __init__(self, seed: int, size: int):
        operators = random_case(seed, size).operators
        self.durations = [o.duration_ps for o in operators]
        self.after = [list(o.after) for o in operators]
        last: dict[object, int] = {}
        for node, operator in enumerate(operators):
            if operator.queue is not None:
                if operator.queue in last:
                    self.after[node].append(last[operator.queue])
                last[operator.queue] = node
        self.times = IncrementalTimes(build(random_case(seed, size)._replace(tensors=[])).compile())
        self.rng = random.Random(seed)

    def scratch(self):
        rows = zip(self.durations, self.after, strict=True)
        return naive_times([Operator(None, duration, after) for duration, after in rows])

    def reaches(self, begin: int, goal: int) -> bool:
        """Whether `goal` waits for `begin`."""
        found, todo = {goal}, [goal]
        while todo:
            for node in self.after[todo.pop()]:
                if node not in found:
                    found.add(node)
                    todo.append(node)
        return begin in found

    def edit(self) -> str:
        kind = self.rng.choice(("duration", "add", "add", "remove", "several"))
        count = len(self.durations)
        if kind in ("duration", "several"):
            nodes = self.rng.sample(range(count), 1 if kind == "duration" else min(count, 4))
            changed = {node: self.rng.randint(0, 4) for node in nodes}
            self.times.set_durations(changed)
            for node, duration_ms in changed.items():
                self.durations[node] = duration_ms * 10**9
        elif kind == "add":
            before, after = self.rng.randrange(count), self.rng.randrange(count)
            if self.reaches(after, before):
                with pytest.raises(SimulationError, match="waits for it already"):
                    self.times.add_edge(before, after)
                return "refused"
            self.times.add_edge(before, after)
            self.after[after].append(before)
        else:
            edges = [(b, a) for a, before in enumerate(self.after) for b in before]
            if not edges:
                return "nothing"
            before, after = self.rng.choice(edges)
            self.times.remove_edge(before, after)
            self.after[after].remove(before)
        return kind


def test_every_edit_gives_the_times_of_a_simulation_from_scratch():
    done = {}
    # In large graphs, edits that move much are settled in another way than those that do not.
    for seed in range(66):
        graph = Edited(seed, 30 if seed < 60 else 400)
        for step in range(40 if seed < 60 else 20):
            kind = graph.edit()
            done[kind] = done.get(kind, 0) + 1
            start, end = (times.tolist() for times in graph.times.times_ps())
            assert (start, end) == graph.scratch(), (seed, step, kind)
            assert graph.times.makespan_ps == max(end)
    assert sum(done.values()) - done.get("nothing", 0) - done["refused"] > 1000
    assert min(done.values()) > 10 and {"add", "remove", "duration", "refused"} <= done.keys()


def test_edits_between_two_looks_are_settled_together():
    for seed in range(100):
        graph = Edited(seed, 30)
        for _ in range(10):
            graph.edit()
        start, end = (times.tolist() for times in graph.times.times_ps())
        assert (start, end) == graph.scratch(), seed


def test_restoring_brings_back_times_edges_and_order():
    for seed in range(60):
        graph = Edited(seed, 30)
        for _ in range(5):
            graph.edit()
        kept = graph.times.checkpoint()
        durations, after = list(graph.durations), [list(a) for a in graph.after]
        for _ in range(2):
            for _ in range(6):
                graph.edit()
            graph.times.restore(kept)
            graph.durations, graph.after = list(durations), [list(a) for a in after]
            start, end = (times.tolist() for times in graph.times.times_ps())
            assert (start, end) == graph.scratch(), seed
        graph.edit()
        assert tuple(t.tolist() for t in graph.times.times_ps()) == graph.scratch(), seed


def test_local_edits_of_a_large_graph_are_settled_node_by_node():
    timed = edits = 0
    for seed in range(20):
        case = random_case(seed, 1200)._replace(tensors=[])
        rng, graph = random.Random(seed), build(case)
        times = IncrementalTimes(graph.compile())
        durations = {}
        for _ in range(25):
            node = rng.randrange(len(case.operators))
            durations[node] = rng.randint(0, 4)
            before = times.timed
            times.set_durations({node: durations[node]})
            rows = enumerate(case.operators)
            now = [
                o._replace(duration_ps=durations.get(n, o.duration_ps / 1e9) * 10**9)
                for n, o in rows
            ]
            scratch = build(case._replace(operators=now)).compile().simulate()
            start, end = times.times_ps()
            assert (start == scratch.start_ps).all() and (end == scratch.end_ps).all(), seed
            timed += times.timed - before
            edits += len(case.operators)
    assert 1000 < timed < edits / 3


def chains(count: int, length: int) -> IncrementalTimes:
    graph = OperatorGraph()
    for chain in range(count):
        for _ in range(length):
            graph.add(chain, 1.0)
    return IncrementalTimes(graph.compile())


def test_only_what_an_edit_reaches_is_timed_again():
    times = chains(10, 100)
    begin = times.timed
    times.set_durations({340: 2.0})
    assert times.makespan_ms == 101
    assert times.timed - begin == 60  # the rest of chain 3
    times.add_edge(50, 890)  # chain 8 would wait for chain 0, which is there in time
    assert times.makespan_ms == 101
    assert times.timed - begin == 61
    times.add_edge(99, 890)
    assert times.makespan_ms == 110
    assert times.timed - begin == 71


def test_a_change_that_slack_takes_up_stops_there():
    graph = OperatorGraph()
    a, b = graph.add("a", 5), graph.add("b", 1)
    joined = graph.add("a", 1, [a, b])
    for _ in range(50):
        graph.add("a", 1)
    times = IncrementalTimes(graph.compile())
    begin = times.timed
    times.set_durations({b: 4.0})
    assert times.makespan_ms == 56
    assert times.timed - begin == 2, joined


def test_impossible_edits_are_refused_and_change_nothing():
    times = chains(2, 3)
    with pytest.raises(SimulationError, match=r"no operator 9.*\n.*duration of -1 ms"):
        times.set_durations({0: 5, 9: 1, 1: -1})
    with pytest.raises(SimulationError, match="from operator 0 to operator 2"):
        times.remove_edge(0, 2)
    with pytest.raises(SimulationError, match="cannot wait"):
        times.add_edge(1, 1)
    with pytest.raises(SimulationError, match="no operator -1"):
        times.add_edge(-1, 1)
    assert times.makespan_ms == 3
