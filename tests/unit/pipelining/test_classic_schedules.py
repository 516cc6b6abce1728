"""Classic schedules: complete, legal, as short and as small in memory as published."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from module_cases import MODELS, freezing, steps
from order_checks import (
    B,
    F,
    I,
    W,
    assert_complete,
    chain,
    makespan,
    peaks,
    play,
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
from torchmm.pipelining.schedules.names import ORDERS

UNIT = {F: 1.0, B: 2.0, I: 1.0, W: 1.0}
MICROBATCHES = (1, 2, 3, 4, 7, 8, 10)
ALL = [gpipe, interleaved_1f1b, zero_bubble]


def unit(action):
    return UNIT[action.type]


def rows(order):
    return [[str(action) for action in row] for row in order]


def torch_rows(order):
    """Without idle slots and REDUCE_GRAD."""
    return [[str(a) for a in row if a is not None and a.is_compute_op] for row in order]


@pytest.mark.parametrize("planner", ALL, ids=lambda p: p.__name__)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_chains_of_all_sizes_are_complete_and_legal(planner, ranks):
    for chunks in (1, 2, 3, 4):
        for microbatches in (0, *MICROBATCHES, 17):
            graph = StageGraph(chain(ranks, chunks), microbatches)
            order = planner(graph)
            assert_complete(graph, order, split=planner is zero_bubble)
            play(graph, order, unit)


def layouts(modules, ranks):
    yield megatron_layout(modules, ranks)
    yield megatron_balanced_layout(modules, ranks)
    yield separated_layout(modules, ranks, {"llm": 2} if ranks < 8 else None)
    if ranks < 8:
        yield megatron_layout(modules, ranks, 2)
        yield megatron_balanced_layout(modules, ranks, 3)


@pytest.mark.parametrize("planner", ALL, ids=lambda p: p.__name__)
@pytest.mark.parametrize("model", MODELS)
def test_multimodal_steps_are_complete_and_legal(planner, model):
    for case, modules in enumerate(freezing(MODELS[model]).values()):
        for ranks in (1, 2, 4, 8):
            for layout in layouts(modules, ranks):
                for graph in steps(layout, MICROBATCHES[(case + ranks) % 7], seed=case):
                    order = planner(graph)
                    assert_complete(graph, order, split=planner is zero_bubble)
                    play(graph, order, unit)


@pytest.mark.parametrize("model", MODELS)
def test_validation_runs_forwards_alone(model):
    for ranks in (1, 2, 4):
        for layout in layouts(MODELS[model], ranks):
            for graph in steps(layout, 7, seed=ranks):
                order = forward_only(graph)
                assert sorted(a[1:4] for row in order for a in row) == sorted(graph.tasks())
                assert {action.type for row in order for action in row} <= {F}
                play(graph, order, unit)


def test_a_virtual_stage_runs_encoder_parts_first_and_backwards_mirrored():
    layout = megatron_layout(MODELS["vision"], 2)  # stages 0 (vision) and 1 (LLM) on rank 0
    order = one_f_one_b(StageGraph(layout, 2, {"vision": (2, 0)}))
    assert rows(order) == [
        ["0F0", "0F0.1", "1F0", "1F1", "1B0", "0B0.1", "0B0", "1B1"],
        ["2F0", "2B0", "2F1", "2B1"],
    ]


def test_splitting_follows_what_needs_gradients():
    """Stage 0 has no input gradients, 1 is frozen, 2 has both halves."""
    graph = StageGraph(chain(3, trainable=[True, False, True]), 1)
    assert rows(zero_bubble(graph)) == [["0F0", "0B0"], ["1F0", "1I0"], ["2F0", "2I0", "2W0"]]
    nothing_before = StageGraph(chain(3, trainable=[False, False, True]), 1)
    assert rows(zero_bubble(nothing_before)) == [["0F0"], ["1F0"], ["2F0", "2B0"]]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_uniform_stages_take_the_published_time(ranks):
    """N microbatches, V chunks of F = 1 and B = 2 (I = W = 1) per rank."""
    for chunks in (1, 2, 4):
        for count in (ranks, 2 * ranks, 2 * ranks + 1, 3 * ranks - 1, 4 * ranks):
            graph = StageGraph(chain(ranks, chunks), count)
            times = {p: makespan(play(graph, p(graph), unit)) for p in ALL}
            assert times[interleaved_1f1b] == 3 * count * chunks + 3 * (ranks - 1)
            assert times[zero_bubble] == 3 * count * chunks + (ranks - 1)  # (P-1)(f + i - w)
            if chunks == 1:
                assert times[gpipe] == 3 * (count + ranks - 1)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_microbatches_take_the_published_time(count):
    graph = StageGraph(chain(4), count)
    for planner in (gpipe, one_f_one_b):
        assert makespan(play(graph, planner(graph), unit)) == 3 * (count + 3)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("count", [1, 3, 8, 32])
def test_activations_in_flight_are_the_published_ones(ranks, count):
    one = StageGraph(chain(ranks), count)
    assert peaks(gpipe(one)) == [count] * ranks
    assert peaks(one_f_one_b(one)) == [min(count, ranks - r) for r in range(ranks)]
    assert peaks(zero_bubble(one)) == [min(count, ranks)] * ranks
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
def test_gpipe_and_1f1b_are_torchs(ranks, count):
    own = SimpleNamespace(_num_stages=ranks, _n_microbatches=count)
    graph = StageGraph(chain(ranks), count)
    order = torch_schedules.ScheduleGPipe._get_pipeline_order(own)
    assert rows(gpipe(graph)) == torch_rows(order[rank] for rank in range(ranks))
    order = torch_schedules.Schedule1F1B._get_pipeline_order(own)
    expected = torch_rows(order[rank] for rank in range(ranks))
    # torch's table, which it only draws, numbers the last rank's forwards from 1 on.
    last = ranks - 1
    expected[last] = [f"{last}F{int(t[2:]) - 1}" if t[1] == "F" else t for t in expected[last]]
    assert rows(one_f_one_b(graph)) == expected


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(
    ("planner", "theirs", "chunks"),
    [
        # With one chunk torch's interleaved schedule still warms up for several.
        (interleaved_1f1b, torch_schedules.ScheduleInterleaved1F1B, 2),
        (interleaved_1f1b, torch_schedules.ScheduleInterleaved1F1B, 4),
        (zero_bubble, torch_schedules.ScheduleInterleavedZeroBubble, 1),
        (zero_bubble, torch_schedules.ScheduleInterleavedZeroBubble, 2),
        (zero_bubble, torch_schedules.ScheduleInterleavedZeroBubble, 4),
    ],
)
def test_interleaved_schedules_are_torchs(planner, theirs, chunks, ranks):
    for count in (1, ranks - 1, ranks, 2 * ranks, 2 * ranks + 2, 4 * ranks):
        rounds = max(1, count // ranks)
        if count % rounds:
            continue  # torch refuses
        own = SimpleNamespace(
            n_local_stages=chunks,
            pp_group_size=ranks,
            microbatches_per_round=count // rounds,
            _n_microbatches=count,
        )
        order = [theirs._calculate_single_rank_operations(own, rank) for rank in range(ranks)]
        # torch splits the first stage's backward too, which has no gradient to hand back.
        expected = [
            [text.replace("0I", "0B") if text[:2] == "0I" else text for text in row]
            for row in torch_rows(order)
        ]
        expected = [[text for text in row if text[:2] != "0W"] for row in expected]
        assert rows(planner(StageGraph(chain(ranks, chunks), count))) == expected


def test_1f1b_needs_one_virtual_stage_per_rank():
    with pytest.raises(ValueError, match="2 virtual stages per rank; use interleaved_1f1b"):
        one_f_one_b(StageGraph(chain(2, 2), 4))


def test_unsuitable_layouts_are_told_from_suitable_ones():
    specs = [StageSpec(i, "llm", i, i + 1, (r,)) for i, r in enumerate((0, 1, 1, 0))]
    edges = ((0, 1), (1, 2), (2, 3))
    v_shape = StageGraph(StageLayout(tuple(specs), edges), 2)
    with pytest.raises(ValueError, match=r"on ranks \[0, 1, 1, 0\]; assign them to the 2 ranks"):
        interleaved_1f1b(v_shape)
    play(v_shape, gpipe(v_shape), unit)
    together = [
        StageSpec(s.index, s.module, s.start, s.stop, s.ranks, virtual_stage=s.index // 2)
        for s in specs
    ]
    with pytest.raises(ValueError, match=r"stages \[0, 1\] of one virtual stage are on ranks"):
        zero_bubble(StageGraph(StageLayout(tuple(together), edges), 2))
    backwards = [
        StageSpec(s.index, s.module, s.start, s.stop, s.ranks, virtual_stage=3 - s.index)
        for s in specs
    ]
    with pytest.raises(ValueError, match="number virtual stages along the pipeline"):
        gpipe(StageGraph(StageLayout(tuple(backwards), edges), 2))


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
        play(graph, order, unit)
        assert [len(row) for row in order] == [4, 2, 6]
