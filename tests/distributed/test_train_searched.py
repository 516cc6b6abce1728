"""A searched schedule with train.py: plans that are made in the background, and the metrics."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from tiny_recipe import arguments, records

pytestmark = pytest.mark.slow
CHANGES = {
    "training__steps": 6,
    "training__global_batch_size": 6,
    "parallel__search__evaluations": 200,
    "metrics__timeline_step": 5,
}
PLANNING_METRICS = (
    "predicted_step_ms",
    "planner",
    "planner_ms",
    "planner_evaluations",
    "speedup_over_default_order",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, real_data, train_server) -> dict[str, Path]:
    """Run one rank, a pipeline with background planning, and one with synchronous planning."""
    root = tmp_path_factory.mktemp("searched")
    searched = {"parallel__pipeline": 2, "parallel__schedule": "searched"}
    variants = {
        "alone": {},
        "background": searched,
        "synchronous": searched | {"parallel__search__background": "false"},
    }
    for name, changes in variants.items():
        ranks = 2 if changes else 1
        command = arguments(root / name, real_data, **CHANGES, **changes)
        codes, output = train_server.run(command, root / f"log-{name}", ranks)
        assert codes == [0] * ranks, output
    return {name: root / name for name in variants}


def test_searched_losses_equal_one_rank(runs):
    alone = records(runs["alone"])
    for name in ("background", "synchronous"):
        for one, two in zip(alone, records(runs[name]), strict=True):
            for key in ("loss", "grad_norm"):
                assert two[key] == pytest.approx(one[key], rel=1e-4), (name, key)


def test_planning_metrics_are_recorded(runs):
    assert all(r[key] is None for r in records(runs["alone"]) for key in PLANNING_METRICS)
    for record in records(runs["synchronous"]):
        assert record["planner_evaluations"] == 200
        assert record["planner_ms"] > 0
        assert (
            record["speedup_over_default_order"] is None
            or record["speedup_over_default_order"] >= 0
        )
    background = records(runs["background"])
    assert background[0]["planner_evaluations"] == 200  # the first step has no background plan
    assert background[0]["predicted_step_ms"] is None
    for record in background:
        assert record["planner_evaluations"] >= 1
        assert record["planner"] and record["pipeline_ms"] > 0
        assert (
            record["speedup_over_default_order"] is None
            or record["speedup_over_default_order"] >= 0
        )
    predicted = [r["predicted_step_ms"] for r in background if r["predicted_step_ms"] is not None]
    log = (runs["background"].parent / "log-background" / "rank-0.log").read_text(errors="replace")
    late = " ".join(log.split()).count("the plan is late")
    assert (
        len(predicted) >= len(background) - 2 - late
    )  # the second step is planned without measured times
    assert all(ms > 0 for ms in predicted)


def test_timeline_compares_schedules(runs):
    for name in ("background", "synchronous"):
        file = runs[name] / "timeline" / "step-5.schedules.svg"
        ET.parse(file)
        text = file.read_text()
        assert all(label in text for label in ("searched", "separated", "measured")), name
    assert not (runs["alone"] / "timeline").exists()
    saved = json.loads((runs["background"] / "timeline" / "step-5.json").read_text())
    assert saved
