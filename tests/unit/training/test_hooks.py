"""Hooks of the training loop: the table, intervals, and the end of training."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from torchmm.data.corrupt import CorruptLimit
from torchmm.recipe.recipe import Recipe
from torchmm.training.hooks.checkpoints import CheckpointHook
from torchmm.training.hooks.hook import FinishedStep, Hook, TrainingContext, TrainState
from torchmm.training.hooks.registry import build_hooks

STEPS = 10


class Log(list):
    """Calls of fake objects, in order."""

    def fake(self, **values: Any) -> Any:
        """Return an object whose unknown methods append their name and first argument."""
        log = self

        class Fake(SimpleNamespace):
            def __getattr__(self, name: str) -> Any:
                return lambda *args, **_: log.append((name, *args[:1]))

        return Fake(**values)


def make_training(log: Log, tmp_path: Any, step: int = 0, **recipe: Any) -> TrainingContext:
    @contextmanager
    def phase(step: int, name: str) -> Any:
        yield

    sections = {"training": {"steps": STEPS}, "checkpoint": {"interval": 4}, **recipe}
    parts: Any = SimpleNamespace(
        run=SimpleNamespace(recipe=Recipe.model_validate(sections)),
        run_dir=tmp_path,
        checkpoints=log.fake(status_warning=""),
        recorder=None,
        mesh=SimpleNamespace(rank=0, device=SimpleNamespace(type="cpu")),
        model=None,
        optimizer=None,
        average=None,
    )
    state = TrainState(step, {}, CorruptLimit(0, 0.0))
    return TrainingContext(parts, state, log.fake(phase=phase), stop=SimpleNamespace(received=None))  # type: ignore[arg-type]


def do_step(training: TrainingContext, hook: Hook, *, is_stopping: bool = False) -> None:
    training.state.step += 1
    nothing: Any = None
    step = training.state.step
    hook.after_step(FinishedStep(step, {"step_ms": 1.0}, {}, nothing, nothing, is_stopping))


def test_table_builds_only_used_hooks(tmp_path, monkeypatch):
    monkeypatch.setattr("torchmm.training.hooks.registry.find_entries", lambda table: ())
    hooks = build_hooks(make_training(Log(), tmp_path))
    names = [type(hook).__name__ for hook in hooks]
    always = ["RecordingHook", "GarbageCollectionHook", "ExportHook", "CheckpointHook"]
    assert names == always
    assert all(isinstance(hook, Hook) for hook in hooks)
    training = make_training(Log(), tmp_path, validation={"interval": 3})
    names = [type(hook).__name__ for hook in build_hooks(training)]
    assert names == ["ValidationHook", *always]


@pytest.mark.parametrize(("interval", "expected"), [(0, []), (4, [4, 8, 10]), (5, [5, 10])])
def test_interval_includes_last_step(interval, expected, tmp_path):
    hook = Hook(make_training(Log(), tmp_path))
    assert [step for step in range(1, STEPS + 1) if hook.is_due(step, interval)] == expected


@pytest.mark.parametrize(
    ("steps", "stops", "saved"),
    [
        (10, False, [4, 8, 10]),
        (6, True, [4, 6]),
        (6, False, [4, 6]),  # a rank has no data for step 7
        (8, False, [4, 8]),
        (0, False, []),
    ],
)
def test_checkpoints_save_last_step_once(steps, stops, saved, tmp_path):
    log = Log()
    training = make_training(log, tmp_path)
    hook = CheckpointHook(training)
    for step in range(1, steps + 1):
        do_step(training, hook, is_stopping=stops and step == steps)
    hook.finish()
    assert [call[1] for call in log if call[0] == "save"] == saved
    assert [call[0] for call in log][-2:] == [
        "finish",
        "close",
    ]  # ranks stop waiting before checkpoints close


def test_finished_run_saves_no_checkpoint_again(tmp_path):
    log = Log()
    CheckpointHook(make_training(log, tmp_path, step=STEPS)).finish()
    assert [call[0] for call in log] == ["finish", "close"]
