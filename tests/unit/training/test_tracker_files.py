"""Files of a run that trackers show, and the offline file of Weights & Biases."""

import json
from pathlib import Path

import pytest
from tracked_run import LAYOUT, LOG, SVG, finished_run, write_sample, write_timeline
from wandb_file import history, read_wandb

from torchmm.pipelining.view.draw import Panel, timeline_image
from torchmm.training.tracking.run_files import NewModelDirectories, RunFiles, code_version


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)


def test_wandb_offline_file_contains_all_records(tmp_path: Path, offline: None, caplog) -> None:
    finished_run(tmp_path, wandb="offline", artifacts=["exports"])
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = read_wandb(file)
    first, second = history(records)
    assert (first["train/loss"], first["time/step_ms"], first["_step"]) == (2.5, 5.0, 1)
    assert "validation/samples" not in first and "loss" not in first
    table = file.parent / "files" / second["validation/samples"]["path"]
    table_json = json.loads(table.read_text())
    assert table_json["columns"] == ["step", "sample", "image", "prompt", "reference", "generated"]
    (row,) = table_json["data"]
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
    images = [e for e in artifacts["run_table"].manifest.contents if e.path.endswith(".png")]
    assert len(images) == 1 and Path(images[0].local_path).is_file()
    assert not [r for r in caplog.records if r.name == LOG.name]


def test_files_are_shown_once_with_their_steps(tmp_path: Path) -> None:
    write_sample(tmp_path, 2)
    files = RunFiles(tmp_path, after_step=2)
    write_sample(tmp_path, 4)
    write_timeline(tmp_path, 4)
    early = files.until(3)  # a delayed tracker
    assert not early.samples and not early.timelines
    new = files.until(5)
    assert [sample.generated for sample, _ in new.samples] == ["written 4"]
    assert list(new.timelines) == ["step-4.svg"] and list(new.measured_panels) == [4]
    last = files.until(9)
    assert not last.samples and not last.timelines and not last.measured_panels


def test_new_and_replaced_models_are_listed(tmp_path: Path) -> None:
    (tmp_path / "hf-best").mkdir()
    (tmp_path / "checkpoints" / "step-2").mkdir(parents=True)
    models = NewModelDirectories(tmp_path, ["checkpoints", "exports"])
    assert models.new() == []
    (tmp_path / "checkpoints" / "step-4").mkdir()
    (tmp_path / "checkpoints" / "step-6.tmp-1").mkdir()
    (tmp_path / "hf-best").rename(tmp_path / "before")
    (tmp_path / "hf-best").mkdir()
    assert [path.name for path in models.new()] == ["step-4", "hf-best"]
    assert models.new() == []
    exports = NewModelDirectories(tmp_path, ["exports"])
    (tmp_path / "checkpoints" / "step-8").mkdir()
    assert exports.new() == []


def test_timeline_boxes_match_records(tmp_path: Path) -> None:
    image = timeline_image(Panel("", write_timeline(tmp_path, 1), LAYOUT), width_px=101)
    shades = [image.getpixel((x, 5)) for x in (10, 50, 90)]
    assert shades[1] == (255, 255, 255) and len(set(shades)) == 3
