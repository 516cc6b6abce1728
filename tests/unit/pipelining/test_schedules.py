"""The named schedules: those a recipe knows, and whether their plans can be executed."""

from __future__ import annotations

import pytest
from module_cases import MODELS, freezing, steps

from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.schedules.classic import forward_only
from torchmm.pipelining.schedules.names import ORDERS, schedule_layout


@pytest.mark.parametrize("name", ORDERS)
def test_plans_of_all_schedules_can_be_executed(name):
    """Sent, received, reduced and freed, for each way to freeze; training and validation."""
    for case, modules in enumerate(freezing(MODELS["generator"]).values()):
        for ranks, chunks in ((1, 1), (2, 1), (4, 1), (4, 2)):
            if name == "1f1b" and chunks == 2:
                continue  # has one virtual stage per rank
            layout = schedule_layout(name, modules, ranks, chunks)
            for graph in steps(layout, 5, seed=case):
                for training, planner in ((True, ORDERS[name]), (False, forward_only)):
                    plan = lower_plan(planner(graph), graph, {}, sharding="step", training=training)
                    validate_plan(plan).raise_for_problems()
