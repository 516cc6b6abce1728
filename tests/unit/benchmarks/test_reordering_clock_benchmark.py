"""The benchmark of reordering in real time: orders of real documents, and valid plans."""

import importlib
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def clock(monkeypatch):
    """Import the module from benchmarks/, which is not a package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    return importlib.import_module("reordering_clock")


def test_every_mode_has_all_microbatches_without_more_load(clock):
    for images in clock.load_images(3, 16):
        assert len(images) == 16 and len(set(images)) > 3, "real documents must differ"
        tower_s, llm_s = [0.01 * count for count in images], [0.05] * 16
        loads = {}
        for mode in clock.MODES:
            positions = clock.arrange(mode, tower_s, llm_s, ordered=True)
            assert sorted(positions.ravel().tolist()) == list(range(16))
            loads[mode] = np.array(images)[positions].sum(axis=1).max()
        assert loads["both"] == loads["intra"] <= loads["natural"] == loads["inter"]


def test_plans_of_sleeping_pipelines_have_all_tasks(clock):
    images = [3, 0, 5, 1]
    plan = clock.sleeping_plan(images)
    forwards = [a for row in plan.actions for a in row if a.type.value == "F"]
    assert len(forwards) == 3 + 4
