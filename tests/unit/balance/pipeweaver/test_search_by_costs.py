"""Tests of searches with device costs: memory in bytes, and steps that never fit."""

from dataclasses import replace

import pytest
from dispatch_cases import even_costs, pipeline

from torchmm.balance.pipeweaver.schedule_search.step_search import with_separated_memory_limit
from torchmm.balance.schedules import search_schedule
from torchmm.balance.simulation.simulator import simulate
from torchmm.costs.devices import USABLE_MEMORY_FRACTION
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.schedules.separated import separated
from torchmm.recipe.parallel_section import ParallelConfig

CONFIG = ParallelConfig.model_validate(
    {"pipeline": 3, "schedule": "searched", "search": {"evaluations": 200}}
)


def test_orders_fit_into_memory_fraction():
    graph = pipeline(3, [0, 4, 1, 0, 2, 4, 0, 1], 2)
    costs = even_costs(graph, encoder_ms=1.7, saved_bytes=dict.fromkeys(graph.tasks(), 1))
    used = []
    for limit in (12, 20, 1000):
        result = search_schedule(CONFIG, graph, replace(costs, memory_limit_bytes=limit))
        assert max(result.peak_bytes) <= round(USABLE_MEMORY_FRACTION * limit)
        used.append(max(result.peak_bytes))
        step = simulate(lower_plan(result.order, graph, {}, receives_ahead=10**6), costs)
        static = separated(graph, costs.compute_ms.__getitem__)
        assert step.makespan_ms == result.predicted_ms <= result.default_order_ms
        if limit == 1000:
            timed = simulate(lower_plan(static, graph, {}, receives_ahead=10**6), costs)
            assert step.makespan_ms <= timed.makespan_ms
    assert used[0] < used[-1]


@pytest.mark.parametrize("limit", [1, 2])
def test_unsatisfiable_step_uses_separated_memory(limit):
    graph = pipeline(3, [0, 4, 1], 2)
    costs = even_costs(graph, saved_bytes=dict.fromkeys(graph.tasks(), 5))
    result = search_schedule(CONFIG, graph, replace(costs, memory_limit_bytes=limit))
    separated_costs = with_separated_memory_limit(graph, costs)
    assert max(result.peak_bytes) <= separated_costs.memory_limit_bytes
