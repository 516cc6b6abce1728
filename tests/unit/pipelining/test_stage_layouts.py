"""Tests of splitting modules into stages: optimality, and errors for invalid splits."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from module_cases import AUDIO, GENERATOR, LLM, MODELS, VISION, frozen, with_frozen_layers

from torchmm.pipelining.schedules.layouts import (
    ModuleLayers,
    StageSplit,
    balanced_split,
    build_layout,
    megatron_balanced_layout,
    megatron_layout,
    separated_layout,
)
from torchmm.pipelining.schedules.registry import ORDERS, find_order, schedule_layout

TIED = ModuleLayers("llm", "llm", (1.0,) * 8, tied=True)


def sums(costs, sizes):
    ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return [sum(costs[a:b]) for a, b in pairwise(ends)]


def ranges(layout, module):
    return [(s.start, s.stop) for s in layout.stages if s.module == module]


def sizes(layout, module):
    return [stop - start for start, stop in ranges(layout, module)]


def test_split_of_published_model_matches_paper():
    """Compare with PipeWeaver, section 2.2: 6.75 ms and 10.5 ms layers give a spread of 16.7 %."""
    costs = [6.75] * 64 + [10.5] * 64
    stages = sums(costs, balanced_split(costs, 16))
    assert (min(stages), max(stages)) == (63.0, 73.5)
    assert round(100 * (max(stages) / min(stages) - 1), 1) == 16.7


@pytest.mark.parametrize("seed", range(30))
def test_balanced_splits_are_optimal(seed):
    """Check the minimum of the maximum, then of the squared loads of ranks, against all splits."""
    rng = random.Random(seed)
    layers = rng.randint(1, 9)
    costs = [float(rng.choice((0, 1, 2, 3, 7, rng.random()))) for _ in range(layers)]
    costs[0] += 0.5
    for parts in range(1, layers + 1):
        loads = [rng.choice((0.0, 2.0, rng.random())) for _ in range(parts)]
        best = min(
            (
                max(stage_costs),
                sum((c + load) ** 2 for c, load in zip(stage_costs, loads, strict=True)),
            )
            for inner in combinations(range(1, layers), parts - 1)
            for stage_costs in [sums(costs, [b - a for a, b in pairwise((0, *inner, layers))])]
        )
        split = balanced_split(costs, parts, loads)
        assert min(split) >= 1
        assert sum(split) == layers
        stage_costs = sums(costs, split)
        squares = sum((c + load) ** 2 for c, load in zip(stage_costs, loads, strict=True))
        assert (max(stage_costs), squares) == pytest.approx(best)


def test_layers_without_cost_are_distributed_evenly():
    assert sorted(balanced_split([0.0] * 10, 4, [5e12, 1.0, 0.0, 0.0])) == [2, 2, 3, 3]


def test_more_parts_never_increase_the_maximum():
    costs = [float(i % 7 + i % 3) for i in range(40)]
    largest = [max(sums(costs, balanced_split(costs, parts))) for parts in range(1, 41)]
    assert largest == sorted(largest, reverse=True)
    assert largest[-1] == max(costs)


@pytest.mark.parametrize(
    ("costs", "parts", "match"),
    [
        ([1.0], 2, "1 layers cannot be split into 2 parts"),
        ([1.0], 0, "cannot be split into 0 parts"),
        ([1.0, -2.0], 1, "negative cost -2.0"),
    ],
)
def test_invalid_splits_are_rejected(costs, parts, match):
    with pytest.raises(ValueError, match=match):
        balanced_split(costs, parts)


def test_separated_segments_use_all_ranks():
    layout = separated_layout([VISION, LLM], 4, {"llm": 2})
    assert sizes(layout, "vision") == [2] * 4
    assert sizes(layout, "llm") == [2] * 8
    assert [s.ranks for s in layout.stages] == [(i % 4,) for i in range(12)]
    assert [s.segment for s in layout.stages] == [0] * 8 + [1] * 4
    assert layout.edges == tuple((i, i + 1) for i in range(11))
    assert layout.sub_microbatched == {"vision"}


def test_remaining_layers_go_to_least_loaded_ranks():
    encoder = ModuleLayers("vision", "encoder", (1.0,) * 63)
    layout = separated_layout([encoder, ModuleLayers("llm", "llm", (1.0,) * 30)], 4)
    assert sizes(layout, "vision") == [15, 16, 16, 16]
    assert sorted(sizes(layout, "llm")) == [7, 7, 8, 8]
    assert sizes(layout, "llm")[0] == 8
    headed = ModuleLayers("llm", "llm", (1.0,) * 16, embedding_cost=0.5, head_cost=4.0)
    assert sizes(separated_layout([headed], 4), "llm") == [5, 5, 5, 1]


@pytest.mark.parametrize("model", MODELS)
def test_stages_form_a_tree(model):
    """Check that encoders feed the first LLM stage, and the last LLM stage feeds the generator."""
    modules = MODELS[model]
    for layout in (
        separated_layout(modules, 2),
        megatron_layout(modules, 4, 2),
        megatron_balanced_layout(modules, 2, 3),
    ):
        by_module = {m.name: [s for s in layout.stages if s.module == m.name] for m in modules}
        expected = set()
        for module in modules:
            stages = by_module[module.name]
            assert [s.start for s in stages] == [0, *(s.stop for s in stages[:-1])]
            assert stages[-1].stop == len(module.costs)
            expected |= {(a.index, b.index) for a, b in pairwise(stages)}
            if module.kind == "encoder":
                expected.add((stages[-1].index, by_module["llm"][0].index))
            if module.kind == "generator":
                expected.add((by_module["llm"][-1].index, stages[0].index))
        assert set(layout.edges) == expected
        assert len(layout.edges) == len(expected)


def test_megatron_attaches_modules_to_llm_ends():
    llm = ModuleLayers("llm", "llm", (1.0,) * 18)
    layout = megatron_layout([VISION, AUDIO, llm, GENERATOR], 2, 2)
    assert sizes(layout, "llm") == [4, 5, 5, 4]
    assert layout.virtual_stages == ((0, 1, 2), (3,), (4,), (5, 6))
    assert [s.ranks[0] for s in layout.stages] == [0, 0, 0, 1, 0, 1, 1]
    assert [s.segment for s in layout.stages] == [0, 0, 0, 0, 1, 1, 1]


def test_megatron_balanced_splits_the_single_pipeline():
    layout = megatron_balanced_layout([VISION, AUDIO, replace(LLM, head_cost=0.0)], 4)
    costs = {m.name: m.costs[0] for m in (VISION, AUDIO, LLM)}
    loads = [
        sum(
            costs[layout.stages[s].module] * (layout.stages[s].stop - layout.stages[s].start)
            for s in unit
        )
        for unit in layout.virtual_stages
    ]
    assert loads == [11.0, 11.0, 10.0, 12.0]  # of 8 x 1 + 8 x 0.5 + 16 x 2 in total
    assert [[layout.stages[s].module for s in unit] for unit in layout.virtual_stages] == [
        ["vision", "audio"],
        ["audio", "llm"],
        ["llm"],
        ["llm"],
    ]


def test_stages_are_trainable_by_layer():
    partly = replace(LLM, trainable=(False,) * 12 + (True,) * 4, embedding_trainable=False)
    layout = separated_layout([with_frozen_layers(VISION), partly], 4)
    assert [s.trainable for s in layout.stages] == [False] * 3 + [True] + [False] * 3 + [True]
    layout = separated_layout([frozen(VISION), replace(partly, embedding_trainable=True)], 4)
    assert [s.trainable for s in layout.stages] == [False] * 4 + [True, False, False, True]


def test_tied_stages_refer_to_each_other():
    layout = separated_layout([VISION, TIED], 4, {"llm": 2})
    assert [s.tied_to for s in layout.stages] == [-1] * 4 + [11] + [-1] * 6 + [4]
    assert {s.tied_to for s in megatron_layout([TIED], 1).stages} == {-1}
    assert {s.tied_to for s in separated_layout([frozen(TIED)], 2).stages} == {-1}


def test_tied_ends_must_be_on_different_ranks():
    with pytest.raises(ValueError, match=r"stages 0 and 1, which contain them, .* on rank 0"):
        separated_layout([TIED], 1, {"llm": 2})
    with pytest.raises(ValueError, match="stages 0 and 3"):
        build_layout([TIED], {"llm": [StageSplit(2, (rank,)) for rank in (0, 1, 1, 0)]})


def test_explicit_splits_are_used():
    layout = build_layout(
        [VISION, LLM],
        {
            "vision": [StageSplit(3, (2, 3)), StageSplit(5, (2, 3))],
            "llm": [StageSplit(9, (0,)), StageSplit(7, (1,))],
        },
    )
    assert ranges(layout, "vision") == [(0, 3), (3, 8)]
    assert ranges(layout, "llm") == [(0, 9), (9, 16)]
    assert [s.ranks for s in layout.stages] == [(2, 3), (2, 3), (0,), (1,)]


@pytest.mark.parametrize(
    ("cuts", "match"),
    [
        ({"llm": [(9, 0), (6, 1)]}, r"llm: stages of \[9, 6\] layers; .* must be 16"),
        (
            {"llm": [(16, 0), (0, 1)]},
            r"stages of \[16, 0\] layers; each stage requires at least one",
        ),
        ({"llm": []}, r"stages of \[\] layers"),
        ({"vision": [(8, 0)]}, r"splits are set for \['vision'\], but the modules are \['llm'\]"),
    ],
)
def test_mismatched_splits_are_rejected(cuts, match):
    with pytest.raises(ValueError, match=match):
        build_layout([LLM], {m: [StageSplit(n, (rank,)) for n, rank in c] for m, c in cuts.items()})


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda: separated_layout([VISION, LLM], 4, {"vision": 3}),
            (
                "vision: 8 layers are fewer than 4 pipeline ranks x 3 segments; use fewer ranks or "
                "stages"
            ),
        ),
        (
            lambda: megatron_layout([VISION, LLM], 4, 5),
            "llm: 16 layers are fewer than 4 pipeline ranks x 5 virtual stages per rank",
        ),
        (
            lambda: megatron_balanced_layout([VISION, LLM], 5, 5),
            "all modules: 24 layers are fewer than 5 pipeline ranks x 5",
        ),
        (lambda: separated_layout([LLM], 0), "0 pipeline ranks and 1 segments must be at least 1"),
        (lambda: separated_layout([LLM], 2, {"audio": 2}), r"segments of \['audio'\]"),
        (lambda: separated_layout([LLM, VISION], 2), r"modules are llm \(llm\), vision \(encoder"),
        (lambda: separated_layout([VISION], 2), "list encoders, one LLM and generators"),
        (lambda: separated_layout([VISION, VISION, LLM], 2), "with different names"),
        (lambda: ModuleLayers("llm", "llm", ()), "llm has no layers"),
        (
            lambda: ModuleLayers("llm", "llm", (1.0, 1.0), trainable=(True,)),
            "llm: 1 trainable flags for 2 layers",
        ),
        (
            lambda: schedule_layout("1f1b", [LLM], 2, 2),
            "1f1b with 2 virtual stages per rank supports only 1; use interleaved_1f1b",
        ),
        (
            lambda: find_order("1f2b"),
            "unknown schedule '1f2b'; use one of gpipe, 1f1b, .*csv:PATH",
        ),
    ],
)
def test_invalid_layouts_name_a_fix(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_schedules_select_their_layouts():
    for name in (*ORDERS, "csv:order.csv"):
        count = 1 if name == "1f1b" else 2
        layout = schedule_layout(name, [VISION, LLM], 2, count, {"vision": 2})
        separate = name in ("separated", "csv:order.csv")
        assert sizes(layout, "vision") == ([2] * 4 if separate else [8])
        assert len(layout.virtual_stages) == (8 if separate else 2 * count)
