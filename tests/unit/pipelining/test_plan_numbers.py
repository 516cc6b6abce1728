"""Tests of plans that are encoded as integers and decoded on a different rank."""

from dataclasses import replace

import numpy as np
import pytest
from pipeline_cases import Case, step_of
from random_orders import random_order

from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.plan.serialization import decode_plan, encode_plan
from torchmm.pipelining.schedules.colocated import assign_round_robin, colocated_layout
from torchmm.pipelining.schedules.layouts import ModuleLayers


def plan_of(case: Case, seed: int) -> PipelinePlan:
    _, parts = step_of(case, seed)
    graph = StageGraph(case.layout(), len(parts["vision"]), parts)
    plan = lower_plan(random_order(graph, seed, 0.3), graph, {}, sharding="step")
    modes = ("none", "selective", "full", "offload")
    recompute = {
        task: tuple(modes[(task.microbatch + i) % 4] for i in range(layer.stop - layer.start))
        for task in list(graph.tasks())[::2]
        for layer in [graph.layout.stages[task.stage]]
    }
    return replace(plan, recompute=recompute)


@pytest.mark.parametrize("pipeline", [1, 2, 4])
def test_plans_survive_encoding(pipeline):
    case = Case(f"numbers {pipeline}", pipeline=pipeline, tied=False)
    for seed in range(4):
        plan = plan_of(case, seed)
        assert decode_plan(encode_plan(plan), plan.graph, lambda graph: {}) == plan


def test_replicas_survive_encoding():
    """Use a graph without assigned replicas for decoding."""
    vision = ModuleLayers("vision", "encoder", (1.0,) * 2, sub_microbatched=True)
    llm = ModuleLayers("llm", "llm", (1.0,) * 4)
    layout = colocated_layout([vision, llm], 2, slices={"vision": 2})
    graph = StageGraph(layout, 4, {"vision": (1, 2, 0, 1)})
    assigned = assign_round_robin(graph)
    plan = lower_plan(random_order(assigned, 0, 0.3), assigned, {}, sharding="step")
    assert len(set(plan.graph.replica.values())) > 1
    assert decode_plan(encode_plan(plan), graph, lambda graph: {}) == plan


def test_plans_of_different_layouts_are_rejected():
    one, two = (plan_of(Case(f"of {n}", pipeline=n, tied=False), 0) for n in (1, 2))
    with pytest.raises(ValueError, match="a plan of 2 ranks for stages on 1"):
        decode_plan(encode_plan(two), one.graph, lambda graph: {})
    with pytest.raises(ValueError, match=r"a plan of \d+ actions in 20 numbers"):
        decode_plan(encode_plan(two)[:20], two.graph, lambda graph: {})
    with pytest.raises(ValueError, match="a plan of 0 ranks"):
        decode_plan(np.array([], np.int32), two.graph, lambda graph: {})
