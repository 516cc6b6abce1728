"""Tests of layouts with encoders in separate pipelines, and of the LLM order in these layouts."""

import re

import pytest

from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.actions import ActionType
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.orders import order_problems
from torchmm.pipelining.schedules.classic import forward_only, gpipe
from torchmm.pipelining.schedules.colocated import backbone_order, colocated_layout, encoder_names
from torchmm.pipelining.schedules.layouts import ModuleLayers
from torchmm.pipelining.schedules.registry import ORDERS
from torchmm.pipelining.schedules.separated import separated


def modules(trained: dict[str, bool] | None = None, tied: bool = False) -> list[ModuleLayers]:
    flags = {"vision": True, "audio": True, "llm": True, **(trained or {})}

    def module(name: str, kind: str, layers: int, **others) -> ModuleLayers:
        is_trained = flags[name]
        return ModuleLayers(
            name, kind, (1.0,) * layers, trainable=(is_trained,) * layers,
            embedding_trainable=is_trained, head_trainable=is_trained, **others,
        )  # fmt: skip

    return [
        module("vision", "encoder", 6, sub_microbatched=True),
        module("audio", "encoder", 4),
        module("llm", "llm", 8, tied=tied),
    ]


def test_encoder_pipelines_span_the_llm_ranks():
    layout = colocated_layout(
        modules(), 4, 2, pipelines={"vision": 2}, slices={"vision": 3, "audio": 2}
    )
    stages = {
        name: [(s.ranks, s.stop - s.start) for s in layout.stages if s.module == name]
        for name in ("vision", "audio", "llm")
    }
    assert stages["vision"] == [((0, 2), 1)] * 3 + [((1, 3), 1)] * 3
    assert stages["audio"] == [((0, 1, 2, 3), 2)] * 2
    assert stages["llm"] == [((rank,), 1) for rank in (0, 1, 2, 3)] * 2
    first = len(stages["vision"]) + len(stages["audio"])
    assert layout.sources[first] == (5, 7)
    assert encoder_names(layout) == ["vision", "audio"]


def test_colocated_layouts_support_other_schedules():
    layout = colocated_layout(modules(), 4, pipelines={"vision": 2}, slices={"vision": 3})
    replica = {("vision", 1, 0): 1, ("vision", 2, 1): 1, ("audio", 0, 0): 3, ("audio", 2, 0): 2}
    graph = StageGraph(layout, 3, {"vision": (0, 1, 2)}, replica)
    for order, training in (
        (forward_only(graph), False), (gpipe(graph), True), (separated(graph), True)
    ):  # fmt: skip
        plan = lower_plan(order, graph, {}, sharding="step", training=training)
        validate_plan(plan).raise_for_problems()
    assert order_problems(graph, gpipe(graph)) == []


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zero_bubble", "gpipe"])
def test_backbone_order_is_complete_except_encoders(schedule):
    virtual = 1 if schedule in ("1f1b", "gpipe") else 2
    for frozen in ((), ("vision",), ("llm",), ("vision", "audio"), ("vision", "llm")):
        layout = colocated_layout(modules(dict.fromkeys(frozen, False)), 4, virtual)
        graph = StageGraph(layout, 4, {"vision": (0, 1, 1, 2)})
        order = backbone_order(graph, ORDERS[schedule], [2, 0, 3, 1])
        problems = order_problems(graph, order)
        expected = [
            p
            for p in problems
            if re.search(r": [01]F\d.* is missing|: found no backward, expected [01]B", p)
        ]
        assert problems == expected, frozen
        entries = [a.microbatch for a in order[0] if a.type is ActionType.F and a.stage == 2]
        assert entries == [2, 0, 3, 1]
        alone = StageGraph(colocated_layout(modules()[2:], 4, virtual), 4)
        pattern = [[a.type for a in row] for row in ORDERS[schedule](alone)]
        if not frozen and schedule != "zero_bubble":
            assert [[a.type for a in row] for row in order] == pattern


def test_invalid_colocated_layouts_are_rejected():
    with pytest.raises(ValueError, match="pipelines of 3 ranks on the 4 ranks of the LLM; use a"):
        colocated_layout(modules(), 4, pipelines={"vision": 3})
    with pytest.raises(ValueError, match="6 layers for 4 ranks x 2 slices; use fewer"):
        colocated_layout(modules(), 4, pipelines={"vision": 4}, slices={"vision": 2})
    with pytest.raises(ValueError, match=r"degrees of \['llm'\], which are not encoders"):
        colocated_layout(modules(), 4, slices={"llm": 2})
    layout = colocated_layout(modules(), 2)
    with pytest.raises(ValueError, match=r"sequence \[0, 0\]: list each of the 2 microbatches"):
        backbone_order(StageGraph(layout, 2, {"vision": (1, 1)}), gpipe, [0, 0])
    alone = StageGraph(colocated_layout(modules()[2:], 2), 2)
    assert encoder_names(alone.layout) == []
