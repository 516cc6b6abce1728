"""Early stopping counts validations as Hugging Face does, and completes the run once."""

from __future__ import annotations

import math
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from test_hooks import Log, make_training
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState

from torchmm.training.hooks import early_stopping
from torchmm.training.hooks.checkpoints import CheckpointHook
from torchmm.training.hooks.early_stopping import EarlyStoppingHook
from torchmm.training.hooks.hook import FinishedStep, TrainingContext, TrainState
from torchmm.training.hooks.registry import build_hooks

STEPS = 1000


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(early_stopping, "gather_floats", lambda values: [values])


def training_of(tmp_path: Any, log: Log | None = None, **changes: Any) -> TrainingContext:
    validation = {"interval": 2, "early_stopping_patience": 3, **changes.pop("validation", {})}
    sections = {"training": {"steps": STEPS}, "validation": validation, **changes}
    training = make_training(Log() if log is None else log, tmp_path, **sections)
    training.components.logger = SimpleNamespace(info=lambda *_: None)
    return training


def stop_step(training: TrainingContext, values: list[float | None], name: str) -> int | None:
    """Return the step at which training stops, with one value for every two steps."""
    hook = EarlyStoppingHook(training)
    for index, value in enumerate(values, 1):
        training.state.step = step = 2 * index
        nothing: Any = None
        record = {"scores": None, name: value}
        hook.after_step(FinishedStep(step, record, {}, nothing, nothing, False))
        if training.state.end_reason:
            return step
    return None


def hugging_face_stop(
    values: list[float], patience: int, threshold: float, mode: str
) -> int | None:
    """Return the step at which the trainer of Hugging Face stops."""
    callback = EarlyStoppingCallback(patience, threshold)
    is_greater = mode == "max"
    arguments = SimpleNamespace(metric_for_best_model="eval_m", greater_is_better=is_greater)
    state, control = TrainerState(), TrainerControl()
    for index, value in enumerate(values, 1):
        callback.on_evaluate(arguments, state, control, {"eval_m": value})
        best = state.best_metric  # `Trainer._determine_best_metric` runs after the callbacks
        if best is None or (value > best if is_greater else value < best):
            state.best_metric = value
        if control.should_training_stop:
            return 2 * index
    return None


@pytest.mark.parametrize("mode", ["min", "max"])
def test_stop_step_equals_hugging_face(tmp_path, mode):
    stops = set()
    for seed in range(200):
        rng = Random(seed)
        values = [rng.choice((1.0, 1.1, 1.2, 1.25, 1.5)) for _ in range(20)]
        patience, threshold = rng.choice((1, 2, 4)), rng.choice((0.0, 0.07, 0.2))
        validation = {"early_stopping_patience": patience, "early_stopping_threshold": threshold}
        keep_best = {"metric": "loss", "mode": mode}
        training = training_of(
            tmp_path, validation=validation, checkpoint={"keep_best": keep_best, "interval": 4}
        )
        stop = stop_step(training, values, "loss")
        assert stop == hugging_face_stop(values, patience, threshold, mode), seed
        stops.add(stop)
    assert len(stops) > 8


def test_default_metric_is_validation_loss(tmp_path):
    training = training_of(tmp_path)
    values = [3.0, 2.0, 2.5, None, 2.0, 2.1, 1.0]
    assert stop_step(training, values, "validation_loss") == 12
    assert training.state.end_reason == (
        "stopped early: validation_loss has not improved in 3 validations; the best value is 2 "
        "at step 4"
    )


def test_undefined_values_count_as_no_improvement(tmp_path):
    training = training_of(tmp_path)
    assert (
        stop_step(training, [3.0, math.nan, 2.0, math.nan, math.nan, 2.5], "validation_loss") == 12
    )
    assert training.state.early_stopping["best"] == 2.0


def test_other_steps_do_not_count(tmp_path):
    training = training_of(tmp_path, validation={"interval": 3})
    assert stop_step(training, [1.0] * 12, "validation_loss") == 24  # validations: 6, 12, 18, 24


def resumed(training: TrainingContext, tmp_path: Any, **changes: Any) -> TrainingContext:
    """Return the context of a run that resumes from the state of another run."""
    later = training_of(tmp_path, **changes)
    saved = {**training.state.as_json(), "corrupt": {"corrupt": 0, "seen": 0}}
    restored = SimpleNamespace(step=training.state.step, state=saved)
    components = SimpleNamespace(
        run=later.components.run, restored=restored, loader=SimpleNamespace(samples_per_pass=9)
    )
    later.state = TrainState.resume(components)
    return later


def test_counter_survives_resume(tmp_path):
    training = training_of(tmp_path)
    assert stop_step(training, [2.0, 2.0, 2.0], "validation_loss") is None
    later = resumed(training, tmp_path)
    hook = EarlyStoppingHook(later)
    assert later.state.end_reason == ""
    later.state.step = 8
    record = {"scores": None, "validation_loss": 2.0}
    hook.after_step(FinishedStep(8, record, {}, None, None, False))
    assert later.state.end_reason


def test_stopped_run_stays_complete_after_resume(tmp_path):
    training = training_of(tmp_path)
    assert stop_step(training, [2.0] * 4, "validation_loss") == 8
    later = resumed(training, tmp_path)
    hook = EarlyStoppingHook(later)
    assert later.state.end_reason == training.state.end_reason
    assert hook.is_complete()
    # A longer patience or another metric continues the run.
    for changes in (
        {"validation": {"early_stopping_patience": 4}},
        {"checkpoint": {"keep_best": {"metric": "loss"}, "interval": 4}},
    ):
        later = resumed(training, tmp_path, **changes)
        EarlyStoppingHook(later)
        assert later.state.end_reason == ""


def test_old_checkpoints_have_no_counter(tmp_path):
    training = training_of(tmp_path)
    saved = training.state.as_json()
    del saved["early_stopping"]
    restored = SimpleNamespace(step=4, state={**saved, "corrupt": {"corrupt": 0, "seen": 0}})
    components = SimpleNamespace(
        run=training.components.run, restored=restored, loader=SimpleNamespace(samples_per_pass=9)
    )
    training.state = TrainState.resume(components)
    EarlyStoppingHook(training)
    assert training.state.early_stopping["stalled"] == 0


def test_early_stop_saves_and_completes(tmp_path, monkeypatch):
    monkeypatch.setattr("torchmm.training.hooks.registry.find_entries", lambda table: ())
    log = Log()
    training = training_of(tmp_path, log, checkpoint={"interval": 100})
    names = [type(hook).__name__ for hook in build_hooks(training)]
    assert names.index("RecordingHook") < names.index("EarlyStoppingHook")
    assert names.index("EarlyStoppingHook") < names.index("ExportHook")
    checkpoints = CheckpointHook(training)
    assert stop_step(training, [2.0] * 4, "validation_loss") == 8
    checkpoints.after_step(FinishedStep(8, {"step_ms": 1.0}, {}, None, None, False))
    checkpoints.finish()
    assert [call[1] for call in log if call[0] == "save"] == [8]
