"""The benchmark of searched pipelines: rows, goals, CPU cores, and a tiny run."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
BASELINES = ("1F1B", "static separated", "torch interleaved")


@pytest.fixture
def load(monkeypatch):
    """Return a function that imports a module of benchmarks/, which is not a package."""
    monkeypatch.syspath_prepend(BENCHMARKS)

    def import_module(name: str) -> ModuleType:
        return importlib.import_module(name)

    return import_module


@pytest.mark.slow
def test_searched_pipeline_writes_rows_with_equal_gradients(tmp_path):
    file = tmp_path / "rows.json"
    script = BENCHMARKS / "searched_pipeline.py"
    options = ["--tiny", "--cases", "model", "planning", "--json", file]
    run = subprocess.run(
        [sys.executable, script, *options], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    rows = json.loads(file.read_text())
    actual = {row["metric"]: row for row in rows}
    for baseline in BASELINES:
        assert actual[f"speedup, {baseline}"]["ours"] > 0
        assert 0 < actual[f"idle fraction, {baseline}"]["baseline"] < 1
    assert actual["gradient difference"]["met"] is True
    ratios = [row for row in rows if row["metric"] == "step time, background planning / replay"]
    for row in ratios:
        assert row["goal"] == (1.02 if "one spare core" in row["case"] else None)
        assert row["ours"] > 0 and row["better"] == "lower"
    assert ratios
    assert all(row["kind"] == "measured" for row in rows)


def times(load, *walls: float) -> list:
    return [load("support.ranks").StepTime(wall, 1.0, 0.0) for wall in walls]


def test_goals_apply_to_each_baseline(load):
    ours = times(load, 1.0, 1.0, 2.0)
    walls = ((1.2, 1.4, 2.2), (0.9, 1.1, 1.8), (1.5, 0.5, 9.0))
    baselines = {name: times(load, *wall) for name, wall in zip(BASELINES, walls, strict=True)}
    comparison = load("support.ranks").Comparison({"searched": ours, **baselines}, [0, 0, 0], 2, 0)
    rows = {row.metric: row for row in load("searched_pipeline").compared("a", comparison, 1.15)}
    assert len(rows) == 9
    goals = [(rows[f"speedup, {name}"].goal, rows[f"speedup, {name}"].met) for name in BASELINES]
    assert goals == [(1.15, True), (1.0, False), (1.0, True)]
    assert rows["step time, 1F1B"].ours == 1.0
    assert rows["step time, 1F1B"].baseline == 1.4


@pytest.mark.parametrize(("planning", "goal", "met"), [({1}, 1.02, False), ({0}, None, None)])
def test_planning_goal_requires_spare_core(load, planning, goal, met):
    cases = load("support.cases.planning_beside")
    cores = cases.Cores(frozenset({0}), frozenset(planning))
    pairs = {"planning": times(load, 1.1, 2.2, 4.0), "replay": times(load, 1.0, 2.0, 5.0)}
    comparison = load("support.ranks").Comparison(pairs, [0, 0, 0], 2, 0)
    actual = {"comparison": comparison, "statistics": {"planner_ms": 1100.0}}
    ratio, seconds, fraction = cases.rows(cores, 2000, actual)
    assert ratio.ours == pytest.approx(1.1)
    assert (ratio.goal, ratio.met) == (goal, met)
    assert (seconds.ours, seconds.baseline) == (2.2, 2.0)
    assert fraction.ours == pytest.approx(0.5)
    assert ("no spare core" in ratio.case) == (goal is None)
    assert ratio.case.endswith("at most 2,000 schedules")
    unbounded, *_ = cases.rows(cores, None, actual)
    assert unbounded.case.endswith("unlimited schedules")


@pytest.mark.parametrize("count", [1, 2, 4])
def test_cores_are_divided_if_available(load, monkeypatch, count):
    cases = load("support.cases.planning_beside")
    monkeypatch.setattr(cases.os, "sched_getaffinity", lambda pid: set(range(count)))
    *with_spare, without = cases.divisions()
    assert not without.spare and len(without.ranks) == min(count, 2)
    assert [c.spare for c in with_spare] == [True] * (count > 1)
    for cores in with_spare:
        assert cores.planning == {count - 1} and len(cores.ranks) == min(count - 1, 2)


def test_searched_sleep_is_not_slower_than_separated(load):
    pipeline, sleepers = load("searched_pipeline"), load("support.sleepers")
    work = sleepers.SleepWork([[1, 9, 0, 4, 20, 2, 3, 7]], layer_s=4e-3, image_s=1e-3)
    size = 1, 2, 4
    played_s = load("bubble_runtime").played_s
    searched = played_s(work, pipeline.SleepSearched(*size, evaluations=300))
    static = played_s(work, pipeline.SleepSeparated(*size))
    assert searched <= 1.01 * static < played_s(work, pipeline.SleepMegatron())


def test_varied_batches_are_compared_individually(load):
    pipeline = load("searched_pipeline")
    work = pipeline.varied_work(pipeline.VARIED["full"])
    counts = [count for step in work.images for count in step]
    assert len(work.images) >= 20 and min(counts) == 0 and max(counts) == pipeline.MOST_IMAGES
    assert len({tuple(sorted(step)) for step in work.images}) == len(work.images)
    ours = times(load, 1.0, 2.0, 1.0, 1.0)
    walls = ((9.0,) * 4, (1.1, 2.0, 1.3, 1.2), (2.0,) * 4)
    baselines = {name: times(load, *wall) for name, wall in zip(BASELINES, walls, strict=True)}
    comparison = load("support.ranks").Comparison(
        {"searched": ours, **baselines}, [0, 1, 2, 2], 8, 0
    )
    minimum, middle, maximum = pipeline.batch_rows("a", comparison)
    assert "(static separated)" in middle.metric
    assert [row.ours for row in (minimum, middle, maximum)] == pytest.approx([1.0, 1.1, 1.25])
    assert middle.met is True and maximum.goal is None


def test_varied_batches_have_requested_image_counts(load):
    pipeline = load("searched_pipeline")
    counts = pipeline.varied_images(2, 4)
    steps = load("support.models.pipeline_model").steps_of(counts, pipeline.VARIED_TOKENS)
    assert [[m.meta.image_count for m in step] for step in steps] == counts
    assert max(map(max, counts)) > 32, "more than the default microbatch can contain"
    assert {m.input_ids_T.numel() for step in steps for m in step} == {pipeline.VARIED_TOKENS}
    assert all(m.target_count > 0 for step in steps for m in step)
    full = pipeline.VARIED_MODEL["full"]
    assert full.steps >= 20 and len(pipeline.varied_images(full.steps, full.microbatches)) >= 20
