"""Tests of operator graphs: hand-computed times, a naive simulator, and error messages."""

import math

import pytest
from naive_graph import build, naive_times, random_case

from torchmm.balance.picoseconds import SimulationError
from torchmm.balance.simulation.operator_graph import OperatorGraph


def times_ms(graph: OperatorGraph) -> list[tuple[float, float]]:
    start_ps, end_ps = graph.compile().times_ps()
    return [(s / 1e9, e / 1e9) for s, e in zip(start_ps.tolist(), end_ps.tolist(), strict=True)]


def test_chain_takes_sum_of_durations():
    graph = OperatorGraph()
    first = graph.add("gpu", 1.5)
    graph.add("link", 2.25, after=[first])
    assert times_ms(graph) == [(0, 1.5), (1.5, 3.75)]


def test_join_waits_for_longer_branch():
    graph = OperatorGraph()
    root = graph.add("a", 1)
    left, right = graph.add("a", 2, [root]), graph.add("b", 5, [root])
    graph.add("a", 1, [left, right])
    assert times_ms(graph) == [(0, 1), (1, 3), (1, 6), (6, 7)]


def test_queue_runs_in_order_of_adding():
    graph = OperatorGraph()
    slow = graph.add("copy", 4)
    graph.add("gpu", 1, [slow])
    graph.add("gpu", 1)
    assert times_ms(graph) == [(0, 4), (4, 5), (5, 6)]


def test_operators_without_queue_run_concurrently():
    graph = OperatorGraph()
    for _ in range(3):
        graph.add(None, 2)
    assert times_ms(graph) == [(0, 2)] * 3


def test_times_match_naive_simulation():
    for seed in range(600):
        operators = random_case(seed)
        start, end = build(operators).compile().times_ps()
        assert (start.tolist(), end.tolist()) == naive_times(operators), seed


def test_empty_graph_takes_no_time():
    assert times_ms(OperatorGraph()) == []


def test_all_graph_problems_are_reported():
    graph = OperatorGraph()
    a = graph.add("gpu", -1.0, name="norm")
    b = graph.add("gpu", math.nan, name="linear")
    c = graph.add("copy", math.inf)
    graph.add_edge(b, a)
    graph.add_edge(c, 9)
    with pytest.raises(SimulationError) as caught:
        graph.compile()
    text = str(caught.value)
    assert len(caught.value.problems) == 5
    for message in (
        "operator 0 (norm) has a duration of -1.0 ms",
        "operator 1 (linear) has a duration of nan ms",
        "operator 2 has a duration of inf ms",
        "operators form a cycle: operator 1 (linear), then operator 0 (norm), then operator "
        "1 (linear)",
        "from operator 2 to operator 9",
    ):
        assert message in text, text


def test_cycle_through_queue_names_its_operators():
    graph = OperatorGraph()
    first = graph.add("a", 1, name="first")
    second = graph.add("b", 1, name="second")
    graph.add("a", 1, [second], name="third")
    graph.add("b", 1, name="tail")
    graph.add_edge(2, first)
    graph.add_edge(first, second)
    with pytest.raises(SimulationError, match="form a cycle") as caught:
        graph.compile()
    assert "tail" not in str(caught.value)


def test_overflowing_durations_are_rejected():
    graph = OperatorGraph()
    for _ in range(3):
        graph.add("gpu", 3e9)
    with pytest.raises(SimulationError, match="in milliseconds"):
        graph.compile()
