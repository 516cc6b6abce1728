"""Tests of classic schedules: completeness, validity, and published time and memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from module_cases import MODELS, freeze_cases, steps
from order_checks import (
    B,
    F,
    I,
    W,
    assert_complete,
    chain,
    makespan,
    peaks,
    simulate_order,
)
from torch.distributed.pipelining import schedules as torch_schedules

from torchmm.pipelining.plan.graph import StageGraph, StageLayout, StageSpec
from torchmm.pipelining.schedules.classic import (
    forward_only,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    zero_bubble,
)
from torchmm.pipelining.schedules.layouts import (
    megatron_balanced_layout,
    megatron_layout,
    separated_layout,
)
from torchmm.pipelining.schedules.registry import ORDERS

UNIT = {F: 1.0, B: 2.0, I: 1.0, W: 1.0}
MICROBATCHES = (1, 2, 3, 4, 7, 8, 10)
ALL = [gpipe, interleaved_1f1b, zero_bubble]


def unit(action):
    return UNIT[action.type]


def rows(order):
    return [[str(action) for action in row] for row in order]


def torch_rows(order):
    """Return the text of compute actions, without idle slots and REDUCE_GRAD."""
    return [[str(a) for a in row if a is not None and a.is_compute_op] for row in order]


@pytest.mark.parametrize("planner", ALL, ids=lambda p: p.__name__)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_single_pipelines_are_complete_and_valid(planner, ranks):
    for chunks in (1, 2, 3, 4):
        for microbatches in (0, *MICROBATCHES, 17):
            graph = StageGraph(chain(ranks, chunks), microbatches)
            order = planner(graph)
            assert_complete(graph, order, split=planner is zero_bubble)
            simulate_order(graph, order, unit)


def layouts(modules, ranks):
    yield megatron_layout(modules, ranks)
    yield megatron_balanced_layout(modules, ranks)
    yield separated_layout(modules, ranks, {"llm": 2} if ranks < 8 else None)
    if ranks < 8:
        yield megatron_layout(modules, ranks, 2)
        yield megatron_balanced_layout(modules, ranks, 3)


@pytest.mark.parametrize("planner", ALL, ids=lambda p: p.__name__)
@pytest.mark.parametrize("model", MODELS)
def test_multimodal_schedules_are_complete_and_valid(planner, model):
    for case, modules in enumerate(freeze_cases(MODELS[model]).values()):
        for ranks in (1, 2, 4, 8):
            for layout in layouts(modules, ranks):
                for graph in steps(layout, MICROBATCHES[(case + ranks) % 7], seed=case):
                    order = planner(graph)
                    assert_complete(graph, order, split=planner is zero_bubble)
                    simulate_order(graph, order, unit)


@pytest.mark.parametrize("model", MODELS)
def test_forward_only_orders_are_complete(model):
    for ranks in (1, 2, 4):
        for layout in layouts(MODELS[model], ranks):
            for graph in steps(layout, 7, seed=ranks):
                order = forward_only(graph)
                assert sorted(a[1:4] for row in order for a in row) == sorted(graph.tasks())
                assert {action.type for row in order for action in row} <= {F}
                simulate_order(graph, order, unit)


def test_virtual_stage_runs_encoder_first():
    layout = megatron_layout(MODELS["vision"], 2)  # stages 0 (vision) and 1 (LLM) on rank 0
    order = one_f_one_b(StageGraph(layout, 2, {"vision": (2, 0)}))
    assert rows(order) == [
        ["0F0", "0F0.1", "1F0", "1F1", "1B0", "0B0.1", "0B0", "1B1"],
        ["2F0", "2B0", "2F1", "2B1"],
    ]


def test_backward_splits_only_if_useful():
    """Use a stage 0 without input gradients, a frozen stage 1, and a trained stage 2."""
    graph = StageGraph(chain(3, trainable=[True, False, True]), 1)
    assert rows(zero_bubble(graph)) == [["0F0", "0B0"], ["1F0", "1I0"], ["2F0", "2I0", "2W0"]]
    frozen_before = StageGraph(chain(3, trainable=[False, False, True]), 1)
    assert rows(zero_bubble(frozen_before)) == [["0F0"], ["1F0"], ["2F0", "2B0"]]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_uniform_stages_match_published_makespan(ranks):
    """Use N microbatches and V chunks per rank with F = 1 and B = 2 (I = W = 1)."""
    for chunks in (1, 2, 4):
        for count in (ranks, 2 * ranks, 2 * ranks + 1, 3 * ranks - 1, 4 * ranks):
            graph = StageGraph(chain(ranks, chunks), count)
            times = {p: makespan(simulate_order(graph, p(graph), unit)) for p in ALL}
            assert times[interleaved_1f1b] == 3 * count * chunks + 3 * (ranks - 1)
            assert times[zero_bubble] == 3 * count * chunks + (ranks - 1)  # (P-1)(f + i - w)
            if chunks == 1:
                assert times[gpipe] == 3 * (count + ranks - 1)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_microbatches_match_published_makespan(count):
    graph = StageGraph(chain(4), count)
    for planner in (gpipe, one_f_one_b):
        assert makespan(simulate_order(graph, planner(graph), unit)) == 3 * (count + 3)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("count", [1, 3, 8, 32])
def test_activations_in_flight_match_published_numbers(ranks, count):
    graph_ = StageGraph(chain(ranks), count)
    assert peaks(gpipe(graph_)) == [count] * ranks
    assert peaks(one_f_one_b(graph_)) == [min(count, ranks - r) for r in range(ranks)]
    assert peaks(zero_bubble(graph_)) == [min(count, ranks)] * ranks
    if count % ranks:
        return
    for chunks in (2, 4):
        graph = StageGraph(chain(ranks, chunks), count)
        assert peaks(interleaved_1f1b(graph)) == [
            min(count * chunks, (chunks - 1) * ranks + 2 * (ranks - r - 1) + 1)
            for r in range(ranks)
        ]
        assert max(peaks(zero_bubble(graph))) <= max(peaks(interleaved_1f1b(graph)))


@pytest.mark.parametrize(("ranks", "count"), [(1, 3), (2, 2), (4, 4), (4, 9), (8, 32)])
def test_gpipe_and_1f1b_match_torch(ranks, count):
    config = SimpleNamespace(_num_stages=ranks, _n_microbatches=count)
    graph = StageGraph(chain(ranks), count)
    order = torch_schedules.ScheduleGPipe._get_pipeline_order(config)
    assert rows(gpipe(graph)) == torch_rows(order[rank] for rank in range(ranks))
    order = torch_schedules.Schedule1F1B._get_pipeline_order(config)
    expected = torch_rows(order[rank] for rank in range(ranks))
    # The table of torch, which is only printed, numbers forward actions of the last rank from 1.
    last = ranks - 1
    expected[last] = [f"{last}F{int(t[2:]) - 1}" if t[1] == "F" else t for t in expected[last]]
    assert rows(one_f_one_b(graph)) == expected


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(
    ("planner", "torch_schedule", "chunks"),
    [
        # With one chunk, the interleaved schedule of torch still warms up for several chunks.
        (interleaved_1f1b, torch_schedules.ScheduleInterleaved1F1B, 2),
        (interleaved_1f1b, torch_schedules.ScheduleInterleaved1F1B, 4),
        (zero_bubble, torch_schedules.ScheduleInterleavedZeroBubble, 1),
        (zero_bubble, torch_schedules.ScheduleInterleavedZeroBubble, 2),
        (zero_bubble, torch_schedules.ScheduleInterleavedZeroBubble, 4),
    ],
)
def test_interleaved_schedules_match_torch(planner, torch_schedule, chunks, ranks):
    for count in (1, ranks - 1, ranks, 2 * ranks, 2 * ranks + 2, 4 * ranks):
        rounds = max(1, count // ranks)
        if count % rounds:
            continue  # not supported by torch
        config = SimpleNamespace(
            n_local_stages=chunks,
            pp_group_size=ranks,
            microbatches_per_round=count // rounds,
            _n_microbatches=count,
        )
        order = [
            torch_schedule._calculate_single_rank_operations(config, rank) for rank in range(ranks)
        ]
        # torch also splits the backward of the first stage, which has no input gradient.
        expected = [
            [text.replace("0I", "0B") if text[:2] == "0I" else text for text in row]
            for row in torch_rows(order)
        ]
        expected = [[text for text in row if text[:2] != "0W"] for row in expected]
        assert rows(planner(StageGraph(chain(ranks, chunks), count))) == expected


def test_1f1b_requires_one_virtual_stage_per_rank():
    with pytest.raises(ValueError, match="2 virtual stages per rank; use interleaved_1f1b"):
        one_f_one_b(StageGraph(chain(2, 2), 4))


def test_unsuitable_layouts_are_rejected():
    specs = [StageSpec(i, "llm", i, i + 1, (r,)) for i, r in enumerate((0, 1, 1, 0))]
    edges = ((0, 1), (1, 2), (2, 3))
    v_shape = StageGraph(StageLayout(tuple(specs), edges), 2)
    with pytest.raises(ValueError, match=r"on ranks \[0, 1, 1, 0\]; assign them to the 2 ranks"):
        interleaved_1f1b(v_shape)
    simulate_order(v_shape, gpipe(v_shape), unit)
    merged = [
        StageSpec(s.index, s.module, s.start, s.stop, s.ranks, virtual_stage=s.index // 2)
        for s in specs
    ]
    with pytest.raises(ValueError, match=r"stages \[0, 1\] of one virtual stage are on ranks"):
        zero_bubble(StageGraph(StageLayout(tuple(merged), edges), 2))
    reversed_stages = [
        StageSpec(s.index, s.module, s.start, s.stop, s.ranks, virtual_stage=3 - s.index)
        for s in specs
    ]
    with pytest.raises(ValueError, match="number virtual stages along the pipeline"):
        gpipe(StageGraph(StageLayout(tuple(reversed_stages), edges), 2))


def test_gpipe_runs_replicas():
    stages = (
        StageSpec(0, "vision", 0, 1, (0, 1)),
        StageSpec(1, "llm", 0, 1, (2,)),
    )
    layout = StageLayout(stages, ((0, 1),), frozenset({"vision"}))
    replica = {("vision", m, p): (m + p) % 2 for m in range(3) for p in range(2)}
    graph = StageGraph(layout, 3, {"vision": (2, 0, 1)}, replica)
    for planner in (gpipe, ORDERS["separated"]):
        order = planner(graph)
        assert_complete(graph, order)
        simulate_order(graph, order, unit)
        assert [len(row) for row in order] == [4, 2, 6]
