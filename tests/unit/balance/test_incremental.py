"""Changed durations: after every change all times are those of a graph simulated from scratch."""

import random

import pytest
from naive_graph import build, naive_times, random_case

from torchmm.balance.picoseconds import SimulationError
from torchmm.balance.simulation.incremental import IncrementalTimes
from torchmm.balance.simulation.operator_graph import OperatorGraph


class Edited:
    """A random graph and its incremental simulation, changed alike."""

    def __init__(self, seed: int, size: int):
        self.operators = random_case(seed, size)
        self.times = IncrementalTimes(build(self.operators).compile())
        self.rng = random.Random(seed)

    def scratch(self):
        return naive_times(self.operators)

    def edit(self) -> None:
        count = len(self.operators)
        changed = self.rng.sample(range(count), min(count, self.rng.choice((1, 1, 4))))
        durations_ms = {node: self.rng.randint(0, 4) for node in changed}
        self.times.set_durations(durations_ms)
        for node, duration_ms in durations_ms.items():
            self.operators[node] = self.operators[node]._replace(duration_ps=duration_ms * 10**9)


def test_every_change_gives_the_times_of_a_simulation_from_scratch():
    # In large graphs, changes that move much are settled in another way than those that do not.
    for seed in range(66):
        graph = Edited(seed, 30 if seed < 60 else 400)
        for step in range(40 if seed < 60 else 20):
            graph.edit()
            start, end = (times.tolist() for times in graph.times.times_ps())
            assert (start, end) == graph.scratch(), (seed, step)
            assert graph.times.makespan_ms == max(end) / 1e9


def test_changes_between_two_looks_are_settled_together():
    for seed in range(100):
        graph = Edited(seed, 30)
        for _ in range(10):
            graph.edit()
        start, end = (times.tolist() for times in graph.times.times_ps())
        assert (start, end) == graph.scratch(), seed


def test_restoring_brings_back_times():
    for seed in range(60):
        graph = Edited(seed, 30)
        for _ in range(5):
            graph.edit()
        kept = graph.times.checkpoint()
        operators = list(graph.operators)
        for _ in range(2):
            for _ in range(6):
                graph.edit()
            graph.times.restore(kept)
            graph.operators = list(operators)
            start, end = (times.tolist() for times in graph.times.times_ps())
            assert (start, end) == graph.scratch(), seed
        graph.edit()
        assert tuple(t.tolist() for t in graph.times.times_ps()) == graph.scratch(), seed


def test_local_changes_of_a_large_graph_are_settled_node_by_node():
    timed = edits = 0
    for seed in range(20):
        operators = random_case(seed, 1200)
        rng, times = random.Random(seed), IncrementalTimes(build(operators).compile())
        for _ in range(25):
            node = rng.randrange(len(operators))
            duration_ms = rng.randint(0, 4)
            before = times.timed
            times.set_durations({node: duration_ms})
            operators[node] = operators[node]._replace(duration_ps=duration_ms * 10**9)
            scratch = IncrementalTimes(build(operators).compile())
            for own, other in zip(times.times_ps(), scratch.times_ps(), strict=True):
                assert (own == other).all(), seed
            timed += times.timed - before
            edits += len(operators)
    assert 1000 < timed < edits / 3


def chains(count: int, length: int) -> IncrementalTimes:
    graph = OperatorGraph()
    for chain in range(count):
        for _ in range(length):
            graph.add(chain, 1.0)
    return IncrementalTimes(graph.compile())


def test_only_what_a_change_reaches_is_timed_again():
    times = chains(10, 100)
    begin = times.timed
    times.set_durations({340: 2.0})
    assert times.makespan_ms == 101
    assert times.timed - begin == 60  # the rest of chain 3


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


def test_impossible_changes_are_refused_and_change_nothing():
    times = chains(2, 3)
    with pytest.raises(SimulationError, match=r"no operator 9.*\n.*duration of -1 ms"):
        times.set_durations({0: 5, 9: 1, 1: -1})
    with pytest.raises(SimulationError, match="no operator -1"):
        times.set_durations({-1: 1.0})
    assert times.makespan_ms == 3
