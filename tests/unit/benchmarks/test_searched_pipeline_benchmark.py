"""The benchmark of searched pipelines: rows, goals, cores, and a tiny run of what computes."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
OTHERS = ("1F1B", "static separated", "torch interleaved")


@pytest.fixture
def load(monkeypatch):
    """Imports a module of benchmarks/, which is no package."""
    monkeypatch.syspath_prepend(BENCHMARKS)

    def import_module(name: str) -> ModuleType:
        return importlib.import_module(name)

    return import_module


@pytest.mark.slow
def test_ranks_that_compute_write_rows_with_equal_gradients(tmp_path):
    file = tmp_path / "rows.json"
    script = BENCHMARKS / "searched_pipeline.py"
    options = ["--tiny", "--cases", "model", "planning", "--json", file]
    run = subprocess.run(
        [sys.executable, script, *options], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    rows = json.loads(file.read_text())
    found = {row["metric"]: row for row in rows}
    for other in OTHERS:
        assert found[f"speedup, {other}"]["ours"] > 0
        assert 0 < found[f"idle fraction, {other}"]["baseline"] < 1
    assert found["gradient difference"]["met"] is True
    ratios = [row for row in rows if row["metric"] == "step time, background planning / replay"]
    for row in ratios:
        assert row["goal"] == (None if "no core spare" in row["case"] else 1.02)
        assert row["ours"] > 0 and row["better"] == "lower"
    assert ratios
    assert all(row["kind"] == "measured" for row in rows)


def times(load, *walls: float) -> list:
    return [load("support.ranks").StepTime(wall, 1.0, 0.0) for wall in walls]


def test_goals_hold_against_each_of_the_others(load):
    ours = times(load, 1.0, 1.0, 2.0)
    walls = ((1.2, 1.4, 2.2), (0.9, 1.1, 1.8), (1.5, 0.5, 9.0))
    others = {name: times(load, *wall) for name, wall in zip(OTHERS, walls, strict=True)}
    comparison = load("support.ranks").Comparison({"searched": ours, **others}, [0, 0, 0], 2, 0)
    rows = {row.metric: row for row in load("searched_pipeline").compared("a", comparison, 1.15)}
    assert len(rows) == 9
    goals = [(rows[f"speedup, {name}"].goal, rows[f"speedup, {name}"].met) for name in OTHERS]
    assert goals == [(1.15, True), (1.0, False), (1.0, True)]
    assert rows["step time, 1F1B"].ours == 1.0
    assert rows["step time, 1F1B"].baseline == 1.4


@pytest.mark.parametrize(("planning", "goal", "met"), [({1}, 1.02, False), ({0}, None, None)])
def test_planning_has_a_goal_where_a_core_is_spare(load, planning, goal, met):
    beside = load("support.cases.planning_beside")
    cores = beside.Cores(frozenset({0}), frozenset(planning))
    pairs = {"planning": times(load, 1.1, 2.2, 4.0), "replay": times(load, 1.0, 2.0, 5.0)}
    comparison = load("support.ranks").Comparison(pairs, [0, 0, 0], 2, 0)
    found = {"comparison": comparison, "statistics": {"planner_ms": 1100.0}}
    ratio, seconds, share = beside.rows(cores, 2000, found)
    assert ratio.ours == pytest.approx(1.1)
    assert (ratio.goal, ratio.met) == (goal, met)
    assert (seconds.ours, seconds.baseline) == (2.2, 2.0)
    assert share.ours == pytest.approx(0.5)
    assert ("no spare core" in ratio.case) == (goal is None)
    assert ratio.case.endswith("at most 2,000 schedules")
    unbounded, *_ = beside.rows(cores, None, found)
    assert unbounded.case.endswith("unlimited schedules")


@pytest.mark.parametrize("count", [1, 2, 4])
def test_cores_are_divided_as_far_as_there_are_any(load, monkeypatch, count):
    beside = load("support.cases.planning_beside")
    monkeypatch.setattr(beside.os, "sched_getaffinity", lambda pid: set(range(count)))
    *with_spare, without = beside.divisions()
    assert not without.spare and len(without.ranks) == min(count, 2)
    assert [c.spare for c in with_spare] == [True] * (count > 1)
    for cores in with_spare:
        assert cores.planning == {count - 1} and len(cores.ranks) == min(count - 1, 2)


def test_searched_sleep_is_planned_no_slower_than_separated(load):
    pipeline, sleepers = load("searched_pipeline"), load("support.sleepers")
    work = sleepers.Work([[1, 9, 0, 4, 20, 2, 3, 7]], layer_s=4e-3, image_s=1e-3)
    size = 1, 2, 4
    played_s = load("bubble_runtime").played_s
    searched = played_s(work, pipeline.SleepSearched(*size, evaluations=300))
    static = played_s(work, pipeline.SleepSeparated(*size))
    assert searched <= 1.01 * static < played_s(work, pipeline.SleepMegatron())


def test_batches_that_differ_are_compared_one_by_one(load):
    pipeline = load("searched_pipeline")
    work = pipeline.varied_work(pipeline.VARIED["full"])
    counts = [count for step in work.images for count in step]
    assert len(work.images) >= 20 and min(counts) == 0 and max(counts) == pipeline.MOST_IMAGES
    assert len({tuple(sorted(step)) for step in work.images}) == len(work.images)
    ours = times(load, 1.0, 2.0, 1.0, 1.0)
    walls = ((9.0,) * 4, (1.1, 2.0, 1.3, 1.2), (2.0,) * 4)
    others = {name: times(load, *wall) for name, wall in zip(OTHERS, walls, strict=True)}
    comparison = load("support.ranks").Comparison({"searched": ours, **others}, [0, 1, 2, 2], 8, 0)
    least, middle, most = pipeline.batch_rows("a", comparison)
    assert "(static separated)" in middle.metric
    assert [row.ours for row in (least, middle, most)] == pytest.approx([1.0, 1.1, 1.25])
    assert middle.met is True and most.goal is None


def test_batches_of_ranks_that_compute_have_the_same_numbers_of_images(load):
    pipeline = load("searched_pipeline")
    counts = pipeline.varied_images(2, 4)
    steps = load("support.models.pipeline_model").steps_of(counts, pipeline.VARIED_TOKENS)
    assert [[m.meta.image_count for m in step] for step in steps] == counts
    assert max(map(max, counts)) > 32, "more than the usual microbatch has room for"
    assert {m.input_ids_T.numel() for step in steps for m in step} == {pipeline.VARIED_TOKENS}
    assert all(m.target_count > 0 for step in steps for m in step)
    full = pipeline.VARIED_MODEL["full"]
    assert full.steps >= 20 and len(pipeline.varied_images(full.steps, full.microbatches)) >= 20
