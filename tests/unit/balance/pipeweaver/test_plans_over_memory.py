"""Tests of plans whose searched order exceeds memory: other orders are tried first."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from pipeline_cases import Case, varied_microbatch
from support.memory_needs import memory_needs

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.optimus.schedule_selection import StepOrder
from torchmm.balance.pipeweaver.activation_checkpointing.recompute_costs import (
    compute_plan_costs_with_recompute,
)
from torchmm.balance.pipeweaver.activation_checkpointing.tuning import LayerTuning
from torchmm.balance.simulation.simulator import simulate
from torchmm.balance.step_plans import plan_step_with_costs
from torchmm.common.errors import PlanError
from torchmm.costs.flops import module_layers
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.run.messages import message_specs
from torchmm.pipelining.schedules.classic import gpipe
from torchmm.pipelining.schedules.layouts import separated_layout
from torchmm.pipelining.schedules.separated import separated
from torchmm.planning.step import step_graph
from torchmm.recipe.parallel_section import ParallelConfig

CASE = Case("lean", tied=False)
CONFIG = ParallelConfig.model_validate({"pipeline": 2, "schedule": "searched"})
MODEL = CostModel(load_profile("cpu"), "float32")


def test_order_exceeding_memory_is_replaced():
    modules = {m.name: m for m in CASE.build().modality_modules()}
    descriptions = [m.describe() for m in modules.values()]
    metas = [varied_microbatch(i, {"vision": 4}, CASE.kinds).meta for i in range(6)]
    layout = separated_layout(module_layers(descriptions, metas), 2)
    specs = partial(message_specs, modules=modules, microbatches=metas, dtype=torch.float32)
    tuning = LayerTuning(MODEL, frozenset(modules), 0)
    graph = step_graph(layout, CONFIG, metas)

    def needs(order) -> int:
        plan = lower_plan(order, graph, specs(graph))
        return max(n.least_bytes for n in memory_needs(plan, descriptions, metas, tuning))

    minimum, greedy = needs(separated(graph, None, 1)), needs(gpipe(graph))
    assert minimum < 0.98 * greedy

    def planned(limit: int, config: ParallelConfig = CONFIG):
        return plan_step_with_costs(
            layout, config, descriptions, metas,
            specs=specs, sharding="none",
            search=lambda graph, durations: StepOrder(graph, gpipe(graph)),
            tuning=replace(tuning, memory_limit_bytes=limit),
        )  # fmt: skip

    for limit in (minimum, (minimum + greedy) // 2, greedy):
        plan = planned(limit)
        costs = compute_plan_costs_with_recompute(plan, descriptions, metas, MODEL)
        assert max(simulate(plan, costs).peak_bytes) <= limit
    with pytest.raises(PlanError, match="even with full recomputation"):
        planned(round(0.9 * minimum))
    with pytest.raises(PlanError, match="even with full recomputation"):
        planned(minimum, CONFIG.model_copy(update={"schedule": "separated"}))
