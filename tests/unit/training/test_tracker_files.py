"""What trackers write, read back: figures in groups, samples, pictures, artifacts, what ran."""

import io
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb_file import history, read_wandb

from torchmm.common.errors import ConfigError
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, StageSpec
from torchmm.pipelining.plan.plan import ActionRecord
from torchmm.pipelining.view.draw import Panel, timeline_picture
from torchmm.pipelining.view.records import write_records
from torchmm.recipe.training_section import MetricsConfig
from torchmm.training.metrics import MetricsRecorder, RankStep, make_record
from torchmm.training.report import keep_thumbnail
from torchmm.training.tracking.run_files import RunFiles, WholeModels, code_version

LOG = logging.getLogger("torchmm.test")
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="90" height="30"></svg>'
RECIPE = {"name": "run", "training": {"steps": 20, "ema_decay": None}}
LAYOUT = StageLayout((StageSpec(0, "llm", 0, 1, (0,)),), ())


def recorder(run_dir: Path, start_step: int = 0, **config) -> MetricsRecorder:
    return MetricsRecorder(
        MetricsConfig(page=False, **config), run_dir, name="run", steps=20, start_step=start_step,
        recipe=RECIPE, console=Console(file=io.StringIO()), log=LOG,
    )  # fmt: skip


def record(step: int, loss: float = 2.5):
    return make_record(
        step, [RankStep(step_ms=5.0)], epoch=0, loss=loss, grad_norm=1.0, lr=0.1, peak_flops=None
    )


def write_sample(run_dir: Path, step: int) -> None:
    picture = keep_thumbnail(run_dir / "samples", "boats", 3, Image.new("RGB", (40, 30)))
    sample = {"step": step, "source": "boats", "index": 3, "prompt": "Say.", "truth": "A | boat.",
              "generated": f"written {step}", "picture": picture}  # fmt: skip
    file = run_dir / "samples.json"
    earlier = json.loads(file.read_text()) if file.exists() else []
    file.write_text(json.dumps([*earlier, sample]))


def write_timeline(run_dir: Path, step: int) -> list[ActionRecord]:
    records = [
        ActionRecord(0, Action(ActionType.F, 0, 0), 0.0, 25.0),
        ActionRecord(0, Action(ActionType.B, 0, 0), 75.0, 100.0),
    ]
    (run_dir / "timeline").mkdir(exist_ok=True)
    (run_dir / "timeline" / f"step-{step}.svg").write_text(SVG)
    write_records(run_dir / "timeline" / f"step-{step}.json", records, StageGraph(LAYOUT, 1))
    return records


def finished_run(run_dir: Path, **config) -> None:
    made = recorder(run_dir, **config)
    made.record(record(1))
    write_sample(run_dir, 2)
    write_timeline(run_dir, 2)
    export = run_dir / "hf"
    export.mkdir()
    (export / "config.json").write_text("{}")
    made.record(record(2))
    made.close()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)


def test_the_offline_file_of_wandb_has_it_all(tmp_path: Path, offline: None, caplog) -> None:
    finished_run(tmp_path, wandb="offline", artifacts=["exports"])
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = read_wandb(file)
    first, second = history(records)
    assert (first["train/loss"], first["time/step_ms"], first["_step"]) == (2.5, 5.0, 1)
    assert "validation/samples" not in first and "loss" not in first
    table = file.parent / "files" / second["validation/samples"]["path"]
    told = json.loads(table.read_text())
    assert told["columns"] == ["step", "sample", "picture", "prompt", "should be", "written"]
    (row,) = told["data"]
    assert row[:2] == [2, "boats[3]"] and row[3:] == ["Say.", "A | boat.", "written 2"]
    timeline = file.parent / "files" / second["pipeline/timeline"]["path"]
    assert SVG in timeline.read_text()
    (run,) = [r.run for r in records if r.HasField("run")][:1]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["training"]["steps"] == 20 and config["code"] == code_version()
    artifacts = {r.artifact.type: r.artifact for r in records if r.HasField("artifact")}
    artifacts |= {
        r.request.log_artifact.artifact.type: r.request.log_artifact.artifact
        for r in records
        if r.request.HasField("log_artifact")
    }
    assert artifacts["model"].name == "run-hf"
    assert set(artifacts["model"].aliases) == {"latest", "hf"}
    assert [e.path for e in artifacts["model"].manifest.contents] == ["config.json"]
    pictures = [e for e in artifacts["run_table"].manifest.contents if e.path.endswith(".png")]
    assert len(pictures) == 1 and Path(pictures[0].local_path).is_file()
    assert not [r for r in caplog.records if r.name == LOG.name]


def test_event_files_of_tensorboard_have_it_all(tmp_path: Path) -> None:
    finished_run(tmp_path, tensorboard=True)
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


def test_steps_that_a_resumed_run_repeats_replace_themselves(tmp_path: Path) -> None:
    for start, loss in ((0, 1.0), (2, 9.0)):
        made = recorder(tmp_path, start_step=start, tensorboard=True)
        for step in range(start + 1, start + 4):
            made.record(record(step, loss))
        made.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = [(e.step, e.value) for e in events.Scalars("train/loss")]
    assert found == [(1, 1.0), (2, 1.0), (3, 9.0), (4, 9.0), (5, 9.0)]


def test_files_are_shown_once_and_with_their_steps(tmp_path: Path) -> None:
    write_sample(tmp_path, 2)
    files = RunFiles(tmp_path, after_step=2)
    write_sample(tmp_path, 4)
    write_timeline(tmp_path, 4)
    early = files.until(3)  # a tracker that is behind
    assert not early.samples and not early.timelines
    new = files.until(5)
    assert [s.generated for s in new.samples] == ["written 4"]
    assert list(new.timelines) == ["step-4.svg"] and list(new.measured) == [4]
    nothing = files.until(9)
    assert not nothing.samples and not nothing.timelines and not nothing.measured


def test_models_count_as_they_appear_and_when_they_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "hf-best").mkdir()
    (tmp_path / "checkpoints" / "step-2").mkdir(parents=True)
    models = WholeModels(tmp_path, ["checkpoints", "exports"])
    assert models.new() == []
    (tmp_path / "checkpoints" / "step-4").mkdir()
    (tmp_path / "checkpoints" / "step-6.tmp-1").mkdir()
    (tmp_path / "hf-best").rename(tmp_path / "before")
    (tmp_path / "hf-best").mkdir()
    assert [path.name for path in models.new()] == ["step-4", "hf-best"]
    assert models.new() == []
    exports = WholeModels(tmp_path, ["exports"])
    (tmp_path / "checkpoints" / "step-8").mkdir()
    assert exports.new() == []


def test_boxes_of_a_timeline_are_where_its_records_are(tmp_path: Path) -> None:
    picture = timeline_picture(Panel("", write_timeline(tmp_path, 1), LAYOUT), width_px=101)
    shades = [picture.getpixel((x, 5)) for x in (10, 50, 90)]
    assert shades[1] == (255, 255, 255) and len(set(shades)) == 3


def test_trackio_gets_figures_in_groups_and_goes_on(tmp_path: Path, monkeypatch) -> None:
    calls: list = []

    class Run:
        def log(self, values, step):
            calls.append((step, values))

        def finish(self):
            calls.append("finished")

    def init(**told):
        calls.append(told)
        return Run()

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))
    made = recorder(tmp_path, start_step=3, trackio=True)
    made.record(record(4))
    made.close()
    assert calls[0]["resume"] == "allow" and calls[0]["config"]["code"] == code_version()
    assert calls[1][0] == 4 and calls[1][1]["train/loss"] == 2.5 and calls[2:] == ["finished"]


def test_trackio_that_is_not_installed_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigError, match=r"pip install trackio"):
        recorder(tmp_path, trackio=True)
