"""Tests of named schedules of recipes: their plans can be executed."""

from __future__ import annotations

import pytest
from module_cases import MODELS, freeze_cases, steps

from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.schedules.classic import forward_only
from torchmm.pipelining.schedules.registry import ORDERS, schedule_layout


@pytest.mark.parametrize("name", ORDERS)
def test_plans_of_all_schedules_are_valid(name):
    """Check transfers, reductions and freed memory for all freeze settings."""
    for case, modules in enumerate(freeze_cases(MODELS["generator"]).values()):
        for ranks, chunks in ((1, 1), (2, 1), (4, 1), (4, 2)):
            if name == "1f1b" and chunks == 2:
                continue  # supports one virtual stage per rank
            layout = schedule_layout(name, modules, ranks, chunks)
            for graph in steps(layout, 5, seed=case):
                for training, planner in ((True, ORDERS[name]), (False, forward_only)):
                    plan = lower_plan(planner(graph), graph, {}, sharding="step", training=training)
                    validate_plan(plan).raise_for_problems()
