"""TensorBoard event files that are read back, and calls of Trackio."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tracked_run import finished_run, record, recorder

from torchmm.common.errors import ConfigError
from torchmm.training.tracking.run_files import code_version


def test_tensorboard_files_contain_all_records(tmp_path: Path) -> None:
    finished_run(tmp_path, html_report=False, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    tags = events.Tags()
    assert [e.step for e in events.Scalars("train/loss")] == [1, 2]
    assert set(tags["images"]) == {"validation/sample 0", "pipeline/timeline"}
    assert [e.step for e in events.Images("pipeline/timeline")] == [2]
    (samples,) = events.Tensors("validation/samples/text_summary")
    assert b"| boats[3] | Say. | A \\| boat. | written 2 |" in samples.tensor_proto.string_val[0]
    (recipe,) = events.Tensors("recipe/text_summary")
    assert b"steps = 20" in recipe.tensor_proto.string_val[0]
    (code,) = events.Tensors("code/text_summary")
    assert code_version()["torch"].encode() in code.tensor_proto.string_val[0]


def test_resumed_steps_replace_earlier_tensorboard_steps(tmp_path: Path) -> None:
    for start, loss in ((0, 1.0), (2, 9.0)):
        tracker = recorder(tmp_path, start_step=start, html_report=False, tensorboard=True)
        for step in range(start + 1, start + 4):
            tracker.record(record(step, loss))
        tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    actual = [(e.step, e.value) for e in events.Scalars("train/loss")]
    assert actual == [(1, 1.0), (2, 1.0), (3, 9.0), (4, 9.0), (5, 9.0)]


def test_tensorboard_shows_late_scores(tmp_path: Path) -> None:
    tracker = recorder(tmp_path, html_report=False, tensorboard=True)
    tracker.record(record(2))
    tracker.add_scores({"task/exact_match": 0.25})
    tracker.add_scores({"task/exact_match": 0.5})
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    scalars = [(e.step, e.value) for e in events.Scalars("validation/task/exact_match")]
    assert scalars == [(2, 0.25), (2, 0.5)]
    assert [e.step for e in events.Scalars("train/loss")] == [2]


def test_trackio_receives_grouped_metrics_and_resumes(tmp_path: Path, monkeypatch) -> None:
    calls: list = []

    class Run:
        def log(self, values, step):
            calls.append((step, values))

        def finish(self):
            calls.append("finished")

    def init(**settings):
        calls.append(settings)
        return Run()

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))
    tracker = recorder(tmp_path, start_step=3, html_report=False, trackio=True)
    tracker.record(record(4))
    tracker.close()
    assert calls[0]["resume"] == "allow" and calls[0]["config"]["code"] == code_version()
    assert calls[1][0] == 4 and calls[1][1]["train/loss"] == 2.5 and calls[2:] == ["finished"]


def test_missing_trackio_is_reported(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigError, match=r"pip install trackio"):
        recorder(tmp_path, html_report=False, trackio=True)
