"""Tests of separated schedules: completeness, validity, idle time and memory bounds."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise, permutations

import pytest
from module_cases import LLM, MODELS, VISION, freeze_cases, steps
from order_checks import (
    B,
    F,
    I,
    assert_complete,
    chain,
    dependencies,
    makespan,
    microbatches_in_flight,
    peaks,
    simulate_order,
)

from torchmm.pipelining.plan.actions import Action
from torchmm.pipelining.plan.graph import StageGraph, Task
from torchmm.pipelining.schedules.layouts import (
    megatron_balanced_layout,
    megatron_layout,
    separated_layout,
)
from torchmm.pipelining.schedules.registry import ORDERS
from torchmm.pipelining.schedules.separated import layer_durations, separated


def unit(action):
    return {F: 1.0, B: 2.0}[action.type]


SKEWED = {"vision": (0, 4, 1, 0, 3, 7, 0, 1, 2, 0, 5, 1, 0, 2, 1, 1)}


@pytest.mark.parametrize("model", MODELS)
def test_separated_steps_are_complete_and_valid(model):
    for case, modules in enumerate(freeze_cases(MODELS[model]).values()):
        for ranks, segments in ((1, None), (2, {"llm": 3}), (4, {"llm": 2}), (8, None)):
            layout = separated_layout(modules, ranks, segments)
            for graph in steps(layout, (1, 3, 4, 7, 8)[(case + ranks) % 5], seed=case):
                for bound in (None, 1, 2):
                    order = separated(graph, microbatches_in_flight=bound)
                    assert_complete(graph, order)
                    simulate_order(graph, order, layer_durations(graph))


@pytest.mark.parametrize("model", MODELS)
def test_separated_orders_support_all_layouts(model):
    for make_layout in (megatron_layout, megatron_balanced_layout):
        for graph in steps(make_layout(MODELS[model], 4, 2), 5, seed=1):
            order = separated(graph)
            assert_complete(graph, order)
            simulate_order(graph, order, layer_durations(graph))


def random_step(seed):
    """Simulate a step with random durations, which avoid ties, and all microbatches in flight.

    Returns:
        The graph, records sorted by start, and a function that returns when the inputs of a record
        are available.
    """
    layout = separated_layout([VISION, LLM], 4, {"llm": 1 + seed % 3})
    (graph, _) = steps(layout, 9, seed)
    rng = random.Random(seed)
    assumed = defaultdict(rng.random)
    order = separated(graph, lambda action: assumed[action], microbatches_in_flight=9)
    records = sorted(
        simulate_order(graph, order, lambda action: assumed[action]),
        key=lambda record: record.start_ms,
    )
    ended = {
        ("F" if action.type is F else "gradient", Task(*action[1:4])): end
        for _, action, _, end in records
    }
    return (
        graph,
        records,
        lambda r: max([ended[key] for key in dependencies(graph, r.action, ended)], default=0.0),
    )


@pytest.mark.parametrize("seed", range(20))
def test_ranks_never_idle_with_startable_tasks(seed):
    _, records, can_start_ms = random_step(seed)
    by_rank = defaultdict(list)
    for record in records:
        by_rank[record.rank].append(record)
    idle = [
        (rank, before.end_ms, after.start_ms)
        for rank, row in by_rank.items()
        for before, after in pairwise(row)
        if after.start_ms > before.end_ms
    ]
    assert idle
    for rank, begin, end in idle:
        for record in by_rank[rank]:
            if record.start_ms >= end:
                can_start = can_start_ms(record)
                assert can_start >= end or can_start == pytest.approx(end), (record, begin, end)


@pytest.mark.parametrize("seed", range(5))
def test_llm_backward_precedes_encoder_backward(seed):
    graph, records, can_start_ms = random_step(seed)
    preceding = 0
    for encoder, other in permutations([r for r in records if r.action.type is B], 2):
        modules = [graph.layout.stages[record.action.stage].module for record in (encoder, other)]
        if modules != ["vision", "llm"] or encoder.rank != other.rank:
            continue
        if encoder.start_ms < other.start_ms:
            assert can_start_ms(other) > encoder.start_ms
        elif encoder.action.microbatch < other.action.microbatch:
            preceding += can_start_ms(encoder) < other.start_ms
    assert preceding  # including LLM backward passes of later microbatches


@pytest.mark.parametrize("bound", [1, 2, 3, 5, 8, 16])
def test_bound_on_microbatches_in_flight_holds(bound):
    layout = separated_layout([VISION, LLM], 4)
    graph = StageGraph(layout, 16, SKEWED)
    order = separated(graph, microbatches_in_flight=bound)
    records = simulate_order(graph, order, layer_durations(graph))
    in_flight = microbatches_in_flight(records)
    assert in_flight == bound or (bound == 16 and 8 < in_flight < 16)
    for row in order:
        alive, max_alive = set(), 0
        remaining = defaultdict(int)
        for action in row:
            remaining[action.microbatch] += 1
        for action in row:
            alive.add(action.microbatch)
            remaining[action.microbatch] -= 1
            max_alive = max(max_alive, len(alive))
            if not remaining[action.microbatch]:
                alive.remove(action.microbatch)
        assert max_alive <= bound


def test_one_stage_per_rank_matches_1f1b():
    """Use a pipeline of equal stages and P microbatches in flight: same time and memory."""
    for ranks in (2, 4, 8):
        graph = StageGraph(chain(ranks), 3 * ranks)
        order = separated(graph, unit, microbatches_in_flight=ranks)
        assert makespan(simulate_order(graph, order, unit)) == 3 * (4 * ranks - 1)
        assert max(peaks(order)) == ranks


def test_forward_and_backward_alternate():
    graph = StageGraph(chain(1), 4)
    kinds = [action.type for action in separated(graph)[0]]
    assert kinds == [F, B] * 4


def test_equal_microbatches_keep_their_order():
    layout = separated_layout([VISION, LLM], 2, {"llm": 2})
    order = separated(StageGraph(layout, 6, {"vision": (2,) * 6}))
    for stage in range(len(layout.stages)):
        row = [action for action in order[stage % 2] if action.stage == stage]
        forwards = [action[2:4] for action in row if action.type is F]
        backwards = [action[2:4] for action in row if action.type is B]
        assert forwards == sorted(forwards)
        assert backwards == sorted(backwards, key=lambda task: (task[0], -task[1]))


def test_skewed_images_are_faster_with_separated_schedule():
    """Compare equal layers and durations on 4 ranks, with 0 to 7 image groups per microbatch."""
    times = {}
    for name, layout in {
        "megatron": megatron_layout([VISION, LLM], 4, 2),
        "megatron_balanced": megatron_balanced_layout([VISION, LLM], 4, 2),
        "separated": separated_layout([VISION, LLM], 4, {"llm": 2}),
    }.items():
        graph = StageGraph(layout, 16, SKEWED)
        order = ORDERS[name](graph)
        times[name] = makespan(simulate_order(graph, order, layer_durations(graph)))
    assert times["separated"] < 0.85 * times["megatron_balanced"] < 0.85 * times["megatron"]


def test_default_durations_depend_on_required_gradients():
    layout = separated_layout(freeze_cases([VISION, LLM])["encoder layers"], 2)
    graph = StageGraph(layout, 2, {"vision": (1, 0)})
    duration = layer_durations(graph)
    first, last, llm = layout.stages[0], layout.stages[1], layout.stages[2]
    assert not first.trainable
    assert last.trainable
    order = separated(graph)
    durations = {str(action): duration(action) for row in order for action in row}
    assert durations["0F0"] == first.stop - first.start
    assert "0B0" not in durations
    assert durations["1B0"] == 2 * (last.stop - last.start)
    layers = llm.stop - llm.start
    assert (durations["2F0"], durations["2B0"], durations["2B1"]) == (
        layers,
        2 * layers,
        2 * layers,
    )
    frozen_llm = separated_layout(freeze_cases([VISION, LLM])["llm"], 2)
    duration = layer_durations(StageGraph(frozen_llm, 1, {"vision": (1,)}))
    assert [duration(Action(kind, 2, 0)) for kind in (F, B, I)] == [layers] * 3


def test_bound_must_be_positive():
    with pytest.raises(ValueError, match="microbatches_in_flight = 0: must be at least 1"):
        separated(StageGraph(chain(2), 2), microbatches_in_flight=0)


@pytest.mark.parametrize("duration", [-1.0, float("nan"), float("inf")])
def test_durations_must_be_finite_and_positive(duration):
    with pytest.raises(ValueError, match=r"duration .* of 0F0: must be finite and not negative"):
        separated(StageGraph(chain(2), 2), lambda action: duration)
