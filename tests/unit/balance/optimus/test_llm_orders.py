"""Tests of LLM schedules, including searched schedules, whose bubbles encoders fill."""

from collections import Counter
from dataclasses import replace
from math import inf

from test_optimus import random_step

from torchmm.balance.optimus.action_order import optimus_steps
from torchmm.balance.optimus.llm_schedules import llm_schedules, microbatch_sequences
from torchmm.balance.optimus.llm_timeline import build_llm_timeline
from torchmm.balance.optimus.schedule_selection import select_schedules
from torchmm.balance.simulation.simulator import simulate
from torchmm.pipelining.plan.graph import StageGraph, Task
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.schedules.classic import interleaved_1f1b
from torchmm.pipelining.schedules.colocated import backbone_order

EVALUATIONS = 40


def alone_ms(graph: StageGraph, costs, order) -> float:
    return (
        build_llm_timeline(graph, order, costs, lambda a: (0.0, costs.compute_ms[a])).llm_ps * 1e-9
    )


def test_searched_orders_are_complete_and_faster():
    faster = 0
    for seed in range(12):
        graph, costs, _ = random_step(seed, wires=seed % 2 > 0)
        named = list(llm_schedules(graph, costs, "interleaved_1f1b", EVALUATIONS))
        all_orders = list(llm_schedules(graph, costs, "searched", EVALUATIONS))
        assert all_orders[: len(named)] == named, "named orders come first"
        for order in all_orders:
            assert [Counter(row) for row in order] == [Counter(row) for row in named[0]], seed
        published = named[: len(list(microbatch_sequences(graph, costs)))]
        shortest_ms = min(alone_ms(graph, costs, order) for order in published)
        faster += min(alone_ms(graph, costs, order) for order in all_orders) < 0.999 * shortest_ms
    assert faster > 2


def test_frozen_llm_skips_backward_actions():
    """Check that microbatches without trainable modules before the LLM have no backward actions."""
    graph, costs, _ = random_step(5)
    stages = tuple(
        replace(stage, trainable=stage.module == "vision", tied_to=-1)
        for stage in graph.layout.stages
    )
    frozen = replace(graph, layout=replace(graph.layout, stages=stages))
    assert not all(frozen.needs_backward(len(stages) - 1, i) for i in range(frozen.microbatches))
    compute_ms = {
        action: ms
        for action, ms in costs.compute_ms.items()
        if action.type.value == "F" or frozen.needs_backward(action.stage, action.microbatch)
    }
    frozen_costs = replace(costs, compute_ms=compute_ms)
    named, *_ = llm_schedules(frozen, frozen_costs, "interleaved_1f1b", EVALUATIONS)
    *_, searched = llm_schedules(frozen, frozen_costs, "searched", EVALUATIONS)
    assert [Counter(row) for row in searched] == [Counter(row) for row in named]


def test_searched_schedules_depend_on_activation_bytes():
    """Check that unknown activation bytes are proportional to forward times."""
    different = 0
    for seed in (2, 3, 6):
        graph, costs, _ = random_step(seed)
        assert not costs.saved_bytes
        proportional = {
            Task(action.stage, action.microbatch, action.sub_microbatch): round(1e6 * ms)
            for action, ms in costs.compute_ms.items()
            if action.type.value == "F"
        }
        uneven = {task: 10**9 if task.microbatch % 2 else 1 for task in proportional}
        unknown, known, other = (
            list(llm_schedules(graph, replace(costs, saved_bytes=kept), "searched", 200))
            for kept in ({}, proportional, uneven)
        )
        assert unknown == known
        different += unknown != other
    assert different > 0


def test_searched_llm_never_lengthens_step():
    shorter = 0
    for seed in range(16):
        graph, costs, _ = random_step(seed, wires=True)
        ends = {}
        for schedule in ("interleaved_1f1b", "searched"):
            *_, best = select_schedules(
                graph, costs,
                llm_schedule=schedule, granularity="fine", sharding="step", evaluations=20,
            )  # fmt: skip
            ends[schedule] = best.simulated.makespan_ms
        assert ends["searched"] <= ends["interleaved_1f1b"], seed
        shorter += ends["searched"] < 0.999 * ends["interleaved_1f1b"]
    assert shorter > 1, "the search shortens too few steps"


def test_adjusted_warmups_shorten_some_steps():
    """Check that steps are never longer than with published warm-ups, coarse or fine."""
    shorter = 0
    for seed in range(24):
        graph, costs, _ = random_step(seed, wires=seed % 2 > 0)
        *_, best = select_schedules(
            graph, costs,
            llm_schedule="interleaved_1f1b", granularity="fine", sharding="step", evaluations=20,
        )  # fmt: skip
        published = [
            backbone_order(graph, interleaved_1f1b, sequence)
            for sequence in microbatch_sequences(graph, costs)
        ]
        published_ms = inf
        for kind in ("coarse", "fine"):
            for step_plan in optimus_steps(graph, costs, published, kind, "step", evaluations=20):
                plan = lower_plan(step_plan.order, step_plan.graph, {}, "step")
                published_ms = min(published_ms, simulate(plan, costs).makespan_ms)
        assert best.simulated.makespan_ms <= published_ms, seed
        shorter += best.simulated.makespan_ms < 0.999 * published_ms
    assert shorter > 1, shorter
