"""Names of figures in Weights & Biases."""

from torchmm.training.metrics import StepRecord
from torchmm.training.report import describe_step
from torchmm.training.trackers import PANELS, WandbTracker


class FakeRun:
    def __init__(self) -> None:
        self.logged: list[tuple[dict, int]] = []

    def log(self, values: dict, step: int) -> None:
        self.logged.append((values, step))


def test_figures_of_planning_stand_together_under_names_that_say_what_they_are():
    tracker = WandbTracker.__new__(WandbTracker)  # without a service
    tracker._run = FakeRun()
    tracker.emit({"step": 3, "loss": 2.0, "predicted_ms": 50.0, "gain_over_natural": None})
    values = {
        "step": 3,
        "loss": 2.0,
        "schedule/predicted time of forwards and backwards (ms)": 50.0,
    }
    assert tracker._run.logged == [(values, 3)]


def test_scores_stand_together_by_source():
    tracker = WandbTracker.__new__(WandbTracker)
    tracker._run = FakeRun()
    tracker.emit({"step": 2, "loss": 1.0, "scores": {"vqa/exact_match": 0.5}})
    tracker.emit({"step": 3, "loss": 1.0, "scores": None})
    values = {"step": 2, "loss": 1.0, "scores/vqa/exact_match": 0.5}
    assert tracker._run.logged == [(values, 2), ({"step": 3, "loss": 1.0}, 3)]
    line = describe_step({"step_ms": 1.0, "scores": {"vqa/exact_match": 0.5}}, 0.0)
    assert "vqa/exact_match 0.500" in line


def test_renamed_figures_exist():
    assert set(PANELS) <= set(StepRecord.__dataclass_fields__)
    assert len(set(PANELS.values())) == len(PANELS)
