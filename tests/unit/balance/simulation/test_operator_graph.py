"""Operator graphs: times by hand, against a naive simulator, and refusals."""

import math

import pytest
from naive_graph import build, naive_times, random_case

from torchmm.balance.picoseconds import SimulationError
from torchmm.balance.simulation.operator_graph import OperatorGraph


def times_ms(graph: OperatorGraph) -> list[tuple[float, float]]:
    start_ps, end_ps = graph.compile().times_ps()
    return [(s / 1e9, e / 1e9) for s, e in zip(start_ps.tolist(), end_ps.tolist(), strict=True)]


def test_a_chain_takes_the_sum():
    graph = OperatorGraph()
    first = graph.add("gpu", 1.5)
    graph.add("link", 2.25, after=[first])
    assert times_ms(graph) == [(0, 1.5), (1.5, 3.75)]


def test_a_fork_on_two_devices_joins_at_the_longer_branch():
    graph = OperatorGraph()
    root = graph.add("a", 1)
    left, right = graph.add("a", 2, [root]), graph.add("b", 5, [root])
    graph.add("a", 1, [left, right])
    assert times_ms(graph) == [(0, 1), (1, 3), (1, 6), (6, 7)]


def test_a_queue_runs_in_the_order_of_adding_even_if_a_later_operator_is_ready_first():
    graph = OperatorGraph()
    slow = graph.add("copy", 4)
    graph.add("gpu", 1, [slow])
    graph.add("gpu", 1)
    assert times_ms(graph) == [(0, 4), (4, 5), (5, 6)]


def test_operators_without_a_queue_run_side_by_side():
    graph = OperatorGraph()
    for _ in range(3):
        graph.add(None, 2)
    assert times_ms(graph) == [(0, 2)] * 3


def test_times_equal_a_naive_simulation():
    for seed in range(600):
        operators = random_case(seed)
        start, end = build(operators).compile().times_ps()
        assert (start.tolist(), end.tolist()) == naive_times(operators), seed


def test_an_empty_graph_takes_no_time():
    assert times_ms(OperatorGraph()) == []


def test_all_problems_are_named_at_once():
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
    for part in (
        "operator 0 (norm) has a duration of -1.0 ms",
        "operator 1 (linear) has a duration of nan ms",
        "operator 2 has a duration of inf ms",
        "operators form a cycle: operator 1 (linear), then operator 0 (norm), then operator "
        "1 (linear)",
        "from operator 2 to operator 9",
    ):
        assert part in text, text


def test_a_circle_through_a_queue_is_found_and_what_hangs_on_it_is_not_blamed():
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


def test_durations_in_another_unit_do_not_overflow_silently():
    graph = OperatorGraph()
    for _ in range(3):
        graph.add("gpu", 3e9)
    with pytest.raises(SimulationError, match="in milliseconds"):
        graph.compile()
