"""Separated segments: complete, legal, never idle without reason, bounded in memory."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise, permutations

import pytest
from module_cases import LLM, MODELS, VISION, freezing, steps
from order_checks import (
    B,
    F,
    I,
    assert_complete,
    chain,
    makespan,
    microbatches_in_flight,
    needs,
    peaks,
    play,
)

from torchmm.pipelining.plan.actions import Action
from torchmm.pipelining.plan.graph import StageGraph, Task
from torchmm.pipelining.schedules.layouts import (
    megatron_balanced_layout,
    megatron_layout,
    separated_layout,
)
from torchmm.pipelining.schedules.names import ORDERS
from torchmm.pipelining.schedules.separated import layer_durations, separated


def unit(action):
    return {F: 1.0, B: 2.0}[action.type]


SKEWED = {"vision": (0, 4, 1, 0, 3, 7, 0, 1, 2, 0, 5, 1, 0, 2, 1, 1)}


@pytest.mark.parametrize("model", MODELS)
def test_steps_are_complete_and_legal(model):
    for case, modules in enumerate(freezing(MODELS[model]).values()):
        for ranks, segments in ((1, None), (2, {"llm": 3}), (4, {"llm": 2}), (8, None)):
            layout = separated_layout(modules, ranks, segments)
            for graph in steps(layout, (1, 3, 4, 7, 8)[(case + ranks) % 5], seed=case):
                for bound in (None, 1, 2):
                    order = separated(graph, microbatches_in_flight=bound)
                    assert_complete(graph, order)
                    play(graph, order, layer_durations(graph))


@pytest.mark.parametrize("model", MODELS)
def test_any_layout_will_do(model):
    for cut in (megatron_layout, megatron_balanced_layout):
        for graph in steps(cut(MODELS[model], 4, 2), 5, seed=1):
            order = separated(graph)
            assert_complete(graph, order)
            play(graph, order, layer_durations(graph))


def played(seed):
    """A step with durations that make ties rare; all microbatches are admitted at once.

    Returns:
        graph, records by time, and a function from a record to when its inputs are there.
    """
    layout = separated_layout([VISION, LLM], 4, {"llm": 1 + seed % 3})
    (graph, _) = steps(layout, 9, seed)
    rng = random.Random(seed)
    assumed = defaultdict(rng.random)
    order = separated(graph, lambda action: assumed[action], microbatches_in_flight=9)
    records = sorted(
        play(graph, order, lambda action: assumed[action]), key=lambda record: record.start_ms
    )
    ended = {
        ("F" if action.type is F else "gradient", Task(*action[1:4])): end
        for _, action, _, end in records
    }
    return (
        graph,
        records,
        lambda r: max([ended[key] for key in needs(graph, r.action, ended)], default=0.0),
    )


@pytest.mark.parametrize("seed", range(20))
def test_no_rank_idles_while_a_task_of_an_admitted_microbatch_can_start(seed):
    _, records, can_start_ms = played(seed)
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
def test_backwards_of_encoders_let_those_of_the_llm_go_first(seed):
    graph, records, can_start_ms = played(seed)
    let_first = 0
    for encoder, other in permutations([r for r in records if r.action.type is B], 2):
        modules = [graph.layout.stages[record.action.stage].module for record in (encoder, other)]
        if modules != ["vision", "llm"] or encoder.rank != other.rank:
            continue
        if encoder.start_ms < other.start_ms:
            assert can_start_ms(other) > encoder.start_ms
        elif encoder.action.microbatch < other.action.microbatch:
            let_first += can_start_ms(encoder) < other.start_ms
    assert let_first  # LLM backwards of later microbatches too


@pytest.mark.parametrize("bound", [1, 2, 3, 5, 8, 16])
def test_the_bound_on_microbatches_in_flight_holds_whatever_the_durations(bound):
    layout = separated_layout([VISION, LLM], 4)
    graph = StageGraph(layout, 16, SKEWED)
    order = separated(graph, microbatches_in_flight=bound)
    as_assumed = play(graph, order, layer_durations(graph))
    in_flight = microbatches_in_flight(as_assumed)
    assert in_flight == bound or (bound == 16 and 8 < in_flight < 16)
    for row in order:
        alive, most = set(), 0
        left = defaultdict(int)
        for action in row:
            left[action.microbatch] += 1
        for action in row:
            alive.add(action.microbatch)
            left[action.microbatch] -= 1
            most = max(most, len(alive))
            if not left[action.microbatch]:
                alive.remove(action.microbatch)
        assert most <= bound


def test_one_stage_per_rank_is_1f1b():
    """A chain with equal stages and P microbatches in flight: same time, same memory."""
    for ranks in (2, 4, 8):
        graph = StageGraph(chain(ranks), 3 * ranks)
        order = separated(graph, unit, microbatches_in_flight=ranks)
        assert makespan(play(graph, order, unit)) == 3 * (4 * ranks - 1)
        assert max(peaks(order)) == ranks


def test_forwards_and_backwards_alternate_where_both_can_start():
    graph = StageGraph(chain(1), 4)
    kinds = [action.type for action in separated(graph)[0]]
    assert kinds == [F, B] * 4


def test_equal_microbatches_keep_their_order_and_backwards_are_mirrored():
    layout = separated_layout([VISION, LLM], 2, {"llm": 2})
    order = separated(StageGraph(layout, 6, {"vision": (2,) * 6}))
    for stage in range(len(layout.stages)):
        row = [action for action in order[stage % 2] if action.stage == stage]
        forwards = [action[2:4] for action in row if action.type is F]
        backwards = [action[2:4] for action in row if action.type is B]
        assert forwards == sorted(forwards)
        assert backwards == sorted(backwards, key=lambda task: (task[0], -task[1]))


def test_skewed_images_take_less_time_than_with_the_encoder_in_the_chain():
    """Same layers and durations; 4 ranks, 0 to 7 image groups per microbatch."""
    times = {}
    for name, layout in {
        "megatron": megatron_layout([VISION, LLM], 4, 2),
        "megatron_balanced": megatron_balanced_layout([VISION, LLM], 4, 2),
        "separated": separated_layout([VISION, LLM], 4, {"llm": 2}),
    }.items():
        graph = StageGraph(layout, 16, SKEWED)
        order = ORDERS[name](graph)
        times[name] = makespan(play(graph, order, layer_durations(graph)))
    assert times["separated"] < 0.85 * times["megatron_balanced"] < 0.85 * times["megatron"]


def test_default_durations_count_the_gradients_needed():
    layout = separated_layout(freezing([VISION, LLM])["towers"], 2)
    graph = StageGraph(layout, 2, {"vision": (1, 0)})
    duration = layer_durations(graph)
    first, last, llm = layout.stages[0], layout.stages[1], layout.stages[2]
    assert not first.trainable
    assert last.trainable
    order = separated(graph)
    taken = {str(action): duration(action) for row in order for action in row}
    assert taken["0F0"] == first.stop - first.start
    assert "0B0" not in taken
    assert taken["1B0"] == 2 * (last.stop - last.start)
    layers = llm.stop - llm.start
    assert (taken["2F0"], taken["2B0"], taken["2B1"]) == (layers, 2 * layers, 2 * layers)
    frozen_llm = separated_layout(freezing([VISION, LLM])["llm"], 2)
    duration = layer_durations(StageGraph(frozen_llm, 1, {"vision": (1,)}))
    assert [duration(Action(kind, 2, 0)) for kind in (F, B, I)] == [layers] * 3


def test_the_bound_must_let_something_in():
    with pytest.raises(ValueError, match="microbatches_in_flight = 0: must be at least 1"):
        separated(StageGraph(chain(2), 2), microbatches_in_flight=0)


@pytest.mark.parametrize("duration", [-1.0, float("nan"), float("inf")])
def test_durations_must_be_times(duration):
    with pytest.raises(ValueError, match=r"duration .* of 0F0: must be finite and not negative"):
        separated(StageGraph(chain(2), 2), lambda action: duration)
