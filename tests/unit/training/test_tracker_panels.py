"""Names and groups of figures in trackers."""

from dataclasses import fields
from typing import get_args

import pytest

from torchmm.training.report import describe_step
from torchmm.training.tracking.figures import FIGURES, Group, StepRecord, grouped


def test_every_key_has_a_group_a_unit_and_a_sentence():
    assert list(FIGURES) == [field.name for field in fields(StepRecord)]
    assert {figure.group for figure in FIGURES.values()} == set(get_args(Group))
    for key, figure in FIGURES.items():
        assert figure.meaning.endswith("."), key
        ends = {"ms": "_ms", "bytes": "_bytes", "1/s": "_per_s"}
        assert all(key.endswith(end) == (figure.unit == unit) for unit, end in ends.items()), key


def test_a_key_without_an_entry_is_not_shown_in_silence():
    with pytest.raises(KeyError, match="unheard_of"):
        grouped({"step": 1, "unheard_of": 2.0})


def test_figures_stand_in_the_panels_of_their_groups():
    record = {"step": 3, "loss": 2.0, "predicted_ms": 50.0, "planner": "natural", "mfu": None}
    assert grouped(record) == {"train/loss": 2.0, "planner/predicted_ms": 50.0}


def test_scores_stand_with_held_out_losses_by_source():
    record = {"step": 2, "validation_loss": 1.0, "scores": {"vqa/exact_match": 0.5}}
    values = {"validation/validation_loss": 1.0, "validation/vqa/exact_match": 0.5}
    assert grouped(record) == values
    assert grouped({"step": 3, "scores": None}) == {}
    line = describe_step({"step_ms": 1.0, "scores": {"vqa/exact_match": 0.5}}, 0.0)
    assert "vqa/exact_match 0.500" in line
