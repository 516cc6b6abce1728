"""A searched schedule through train.py: steps planned beside training, and what the user sees."""

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
FIGURES = (
    "predicted_step_ms",
    "planner",
    "planner_ms",
    "planner_evaluations",
    "speedup_over_default_order",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, real_data, train_server) -> dict[str, Path]:
    """One rank; a pipeline planned in a process of its own; one that is planned before steps."""
    root = tmp_path_factory.mktemp("searched")
    searched = {"parallel__pipeline": 2, "parallel__schedule": "searched"}
    variants = {
        "alone": {},
        "beside": searched,
        "before": searched | {"parallel__search__background": "false"},
    }
    for name, changes in variants.items():
        ranks = 2 if changes else 1
        command = arguments(root / name, real_data, **CHANGES, **changes)
        codes, output = train_server.run(command, root / f"log-{name}", ranks)
        assert codes == [0] * ranks, output
    return {name: root / name for name in variants}


def test_losses_are_those_of_one_rank(runs):
    alone = records(runs["alone"])
    for name in ("beside", "before"):
        for one, two in zip(alone, records(runs[name]), strict=True):
            for key in ("loss", "grad_norm"):
                assert two[key] == pytest.approx(one[key], rel=1e-4), (name, key)


def test_figures_of_planning_are_recorded(runs):
    assert all(r[key] is None for r in records(runs["alone"]) for key in FIGURES)
    for record in records(runs["before"]):
        assert record["planner_evaluations"] == 200
        assert record["planner_ms"] > 0
        assert (
            record["speedup_over_default_order"] is None
            or record["speedup_over_default_order"] >= 0
        )
    beside = records(runs["beside"])
    assert beside[0]["planner_evaluations"] == 200  # nobody could plan it before
    assert beside[0]["predicted_step_ms"] is None
    for record in beside:
        assert record["planner_evaluations"] >= 1
        assert record["planner"] and record["pipeline_ms"] > 0
        assert (
            record["speedup_over_default_order"] is None
            or record["speedup_over_default_order"] >= 0
        )
    predicted = [r["predicted_step_ms"] for r in beside if r["predicted_step_ms"] is not None]
    log = (runs["beside"].parent / "log-beside" / "rank-0.log").read_text(errors="replace")
    late = " ".join(log.split()).count("the plan is late")
    assert len(predicted) >= len(beside) - 2 - late  # the second was planned without times
    assert all(ms > 0 for ms in predicted)


def test_the_picture_compares_schedules(runs):
    for name in ("beside", "before"):
        file = runs[name] / "timeline" / "step-5.schedules.svg"
        ET.parse(file)
        text = file.read_text()
        assert all(label in text for label in ("searched", "separated", "measured")), name
    assert not (runs["alone"] / "timeline").exists()
    saved = json.loads((runs["beside"] / "timeline" / "step-5.json").read_text())
    assert saved
