"""Tests of the table of schedules: complete registration, and properties for recipes."""

from __future__ import annotations

from typing import get_args

import pytest

from torchmm.pipelining.schedules.registry import ORDERS
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.schedules import (
    SCHEDULES,
    LlmSchedule,
    Placement,
    functions_by_schedule,
    schedules_for,
)


def test_every_schedule_has_function_and_placement() -> None:
    planned = {name for name, schedule in SCHEDULES.items() if schedule.planned}
    assert {*ORDERS, *planned} == set(SCHEDULES)
    assert set(get_args(LlmSchedule)) <= {*ORDERS, "searched"}
    placed = [name for placement in get_args(Placement) for name in schedules_for(placement)]
    assert set(placed) == set(SCHEDULES)


def test_incomplete_registration_is_rejected() -> None:
    orders = dict.fromkeys(ORDERS, 0)
    assert list(functions_by_schedule(orders)) == list(ORDERS)
    for wrong in ({**orders, "eager": 0}, {**orders, "searched": 0}, {"gpipe": 0}):
        with pytest.raises(ValueError, match=r"schedules\.py"):
            functions_by_schedule(wrong)


def test_some_schedules_separate_modules() -> None:
    separating = [name for name in SCHEDULES if ParallelConfig(schedule=name).has_module_segments]
    assert separating == ["separated", "searched"]
    assert ParallelConfig(schedule="csv:order.csv").has_module_segments
    assert not ParallelConfig(schedule="unknown").has_module_segments
