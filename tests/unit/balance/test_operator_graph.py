"""Operator graphs: times and memory by hand, against a naive simulator, and refusals."""

import math

import pytest
from naive_graph import build, naive_peaks, naive_times, random_case

from torchmm.balance.picoseconds import SimulationError
from torchmm.balance.simulation.operator_graph import OperatorGraph


def times_ms(graph: OperatorGraph) -> list[tuple[float, float]]:
    done = graph.compile().simulate()
    return [
        (s / 1e9, e / 1e9)
        for s, e in zip(done.start_ps.tolist(), done.end_ps.tolist(), strict=True)
    ]


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
    assert graph.compile().simulate().makespan_ms == 7


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


def test_an_output_and_the_input_it_is_made_from_are_alive_together():
    graph = OperatorGraph()
    first, second, third = (graph.add("gpu", 1) for _ in range(3))
    graph.add_tensor("gpu", 10, first, [second])
    graph.add_tensor("gpu", 7, second, [third])
    graph.add_tensor("gpu", 100, third)
    timeline = graph.compile().simulate().memory["gpu"]
    assert timeline.peak_bytes == 107
    assert timeline.times_ms.tolist() == [0, 0, 1, 2, 2, 3, 3]
    assert timeline.used_bytes.tolist() == [0, 10, 17, 7, 107, 7, 0]


def test_times_equal_a_naive_simulation():
    for seed in range(600):
        case = random_case(seed)
        done = build(case).compile().simulate()
        start, end = naive_times(case.operators)
        assert (done.start_ps.tolist(), done.end_ps.tolist()) == (start, end), seed


def test_peak_memory_equals_a_naive_sweep():
    for seed in range(600):
        case = random_case(seed, least_ps=1)
        done = build(case).compile().simulate()
        peaks = naive_peaks(case, done.start_ps.tolist(), done.end_ps.tolist())
        assert {d: m.peak_bytes for d, m in done.memory.items()} == peaks, seed
        assert all(m.used_bytes[-1] == 0 for m in done.memory.values())


def test_an_empty_graph_takes_no_time():
    done = OperatorGraph().compile().simulate()
    assert done.makespan_ms == 0 and not done.memory


def test_all_problems_are_named_at_once():
    graph = OperatorGraph()
    a = graph.add("gpu", -1.0, name="norm")
    b = graph.add("gpu", math.nan, name="linear")
    c = graph.add("copy", math.inf)
    graph.add_edge(b, a)
    graph.add_edge(c, 9)
    graph.add_tensor("gpu", -5, a, [b])
    graph.add_tensor("gpu", 5, 7)
    with pytest.raises(SimulationError) as caught:
        graph.compile()
    text = str(caught.value)
    assert len(caught.value.problems) == 7
    for part in (
        "operator 0 (norm) has a duration of -1.0 ms",
        "operator 1 (linear) has a duration of nan ms",
        "operator 2 has a duration of inf ms",
        "in a circle: operator 1 (linear), then operator 0 (norm), then operator 1 (linear)",
        "from operator 2 to operator 9",
        "has -5 bytes",
        "names operator 7",
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
    with pytest.raises(SimulationError, match="circle") as caught:
        graph.compile()
    assert "tail" not in str(caught.value)


def test_durations_in_another_unit_do_not_overflow_silently():
    graph = OperatorGraph()
    for _ in range(3):
        graph.add("gpu", 3e9)
    with pytest.raises(SimulationError, match="in milliseconds"):
        graph.compile()
