"""Run directories with metrics, samples and timelines, for tests of trackers."""

import io
import json
import logging
from pathlib import Path

from PIL import Image
from rich.console import Console

from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, StageSpec
from torchmm.pipelining.plan.plan import ActionRecord
from torchmm.pipelining.view.records import write_records
from torchmm.recipe.training_section import MetricsConfig
from torchmm.training.metrics import METRICS, make_record
from torchmm.training.tracking.recorder import MetricsRecorder
from torchmm.training.tracking.run_directory import SAMPLES_FILE, SAMPLES_FOLDER, TIMELINE_FOLDER

LOG = logging.getLogger("torchmm.test")
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="90" height="30"></svg>'
RECIPE = {"name": "run", "training": {"steps": 20, "ema_decay": None}}
LAYOUT = StageLayout((StageSpec(0, "llm", 0, 1, (0,)),), ())


def recorder(run_dir: Path, start_step: int = 0, **config) -> MetricsRecorder:
    return MetricsRecorder(
        MetricsConfig(**config), run_dir, name="run", steps=20, start_step=start_step,
        recipe=RECIPE, console=Console(file=io.StringIO()), log=LOG,
    )  # fmt: skip


def rank_values(**values: float) -> dict[str, float]:
    """Return the metrics that one rank measures."""
    names = [name for name, metric in METRICS.items() if metric.reduce is not None]
    return {**dict.fromkeys([*names, "flops"], 0), **values}


def record(step: int, loss: float = 2.5):
    ranks = [rank_values(step_ms=5.0)]
    return make_record(ranks, None, step=step, epoch=0, loss=loss, grad_norm=1.0, lr=0.1)


def write_sample(run_dir: Path, step: int) -> None:
    picture = "boats-3.png"
    (run_dir / SAMPLES_FOLDER).mkdir(exist_ok=True)
    Image.new("RGB", (40, 30)).save(run_dir / SAMPLES_FOLDER / picture)
    sample = {"step": step, "source": "boats", "index": 3, "prompt": "Say.", "truth": "A | boat.",
              "generated": f"written {step}", "picture": picture}  # fmt: skip
    file = run_dir / SAMPLES_FILE
    earlier = json.loads(file.read_text()) if file.exists() else []
    file.write_text(json.dumps([*earlier, sample]))


def write_timeline(run_dir: Path, step: int) -> list[ActionRecord]:
    records = [
        ActionRecord(0, Action(ActionType.F, 0, 0), 0.0, 25.0),
        ActionRecord(0, Action(ActionType.B, 0, 0), 75.0, 100.0),
    ]
    (run_dir / TIMELINE_FOLDER).mkdir(exist_ok=True)
    (run_dir / TIMELINE_FOLDER / f"step-{step}.svg").write_text(SVG)
    write_records(run_dir / TIMELINE_FOLDER / f"step-{step}.json", records, StageGraph(LAYOUT, 1))
    return records


def finished_run(run_dir: Path, **config) -> None:
    metrics = recorder(run_dir, **config)
    metrics.record(record(1))
    write_sample(run_dir, 2)
    write_timeline(run_dir, 2)
    export = run_dir / "hf"
    export.mkdir()
    (export / "config.json").write_text("{}")
    metrics.record(record(2))
    metrics.close()
