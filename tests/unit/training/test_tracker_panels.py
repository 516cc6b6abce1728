"""Names and groups of metrics in trackers."""

from typing import get_args

import pytest

from torchmm.training.console import describe_step
from torchmm.training.metrics import METRICS, Group, group_by_panel


def test_metrics_have_group_unit_and_sentence():
    assert {metric.group for metric in METRICS.values()} == set(get_args(Group))
    for name, metric in METRICS.items():
        assert metric.description.endswith("."), name
        ends = {"ms": "_ms", "bytes": "_bytes", "1/s": "_per_s"}
        assert all(name.endswith(end) == (metric.unit == unit) for unit, end in ends.items()), name


def test_unknown_metric_raises():
    with pytest.raises(KeyError, match="unheard_of"):
        group_by_panel({"step": 1, "unheard_of": 2.0})


def test_metrics_are_grouped_by_panel():
    record = {"step": 3, "loss": 2.0, "predicted_step_ms": 50.0, "planner": "natural", "mfu": None}
    assert group_by_panel(record) == {"train/loss": 2.0, "planner/predicted_step_ms": 50.0}


def test_scores_are_in_validation_panel_by_source():
    record = {"step": 2, "validation_loss": 1.0, "scores": {"vqa/exact_match": 0.5}}
    values = {"validation/validation_loss": 1.0, "validation/vqa/exact_match": 0.5}
    assert group_by_panel(record) == values
    assert group_by_panel({"step": 3, "scores": None}) == {}
    line = describe_step({"step_ms": 1.0, "scores": {"vqa/exact_match": 0.5}}, 0.0)
    assert "vqa/exact_match 0.500" in line
