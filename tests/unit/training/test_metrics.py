"""Step records, sinks and trackers: correct metrics, and trackers that cannot stop training."""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import struct
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from tracked_run import rank_values

from torchmm.recipe.training_section import MetricsConfig
from torchmm.training.console import describe_step, print_summary
from torchmm.training.metrics import METRICS, make_record, peak_flops, peak_memory_bytes
from torchmm.training.tracking.recorder import MetricsRecorder
from torchmm.training.tracking.trackers import BackgroundSink

CPU = torch.device("cpu")
LOG = logging.getLogger("torchmm.test")
RANK = rank_values(
    tokens_per_s=1000, samples_per_s=10, media_per_s=5, flops=10**9, step_ms=500.0,
    data_wait_ms=10.0, decoded_media=3, data_read_bytes=10**6,
)  # fmt: skip
OTHERS = {"epoch": 0, "loss": 2.5, "grad_norm": 1.0, "lr": 1e-3}
NAMES = (  # names that user scripts read
    "step loss grad_norm lr tokens_per_s samples_per_s media_per_s mfu step_ms data_wait_ms "
    "encoder_ms llm_ms pipeline_ms bubble_fraction max_expert_load_ratio peak_memory_bytes "
    "slowest_rank straggler_fraction epoch skipped_samples validation_loss loss_text loss_image "
    "validation_loss_text validation_loss_image generator_ms generated_images_per_s "
    "word_error_rate scores predicted_step_ms planner planner_ms planner_evaluations "
    "speedup_over_default_order compiled_graphs compile_ms decoded_media data_read_bytes "
    "checkpoint_wait_ms checkpoint_save_ms checkpoint_bytes checkpoint_upload_ms "
    "checkpoint_upload_bytes checkpoint_upload_failures filtered_samples truncated_samples "
    "image_imbalance image_imbalance_before "
    "sequence_imbalance sequence_imbalance_before"
)


def record(step: int = 1, **changes):
    return make_record([RANK], 1e10, step=step, **OTHERS) | changes


def recorder(run_dir: Path, console: Console | None = None, start_step: int = 0, **config):
    return MetricsRecorder(
        MetricsConfig(**config),
        run_dir,
        name="run",
        steps=20,
        start_step=start_step,
        recipe={"name": "run"},
        console=console or Console(file=io.StringIO()),
        log=LOG,
    )


def lines_of(run_dir: Path):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


# --- metrics -------------------------------------------------------------------------------------


def test_records_have_documented_names(tmp_path):
    tracker = recorder(tmp_path)
    tracker.record(record())
    tracker.close()
    assert set(lines_of(tmp_path)[0]) == set(METRICS) >= set(NAMES.split())


def test_rates_are_summed_and_times_are_maxima():
    changes = {"data_wait_ms": 700.0, "peak_memory_bytes": 7, "skipped_samples": 2}
    slow = {**RANK, "step_ms": 1000.0, **changes}
    reduced = SimpleNamespace(**make_record([RANK, slow], 4e9, step=3, **OTHERS))
    assert reduced.step_ms == 1000.0
    assert reduced.tokens_per_s == 2000.0
    assert reduced.samples_per_s == 20.0
    assert reduced.media_per_s == 10.0
    assert reduced.mfu == pytest.approx(2e9 / (2 * 4e9))
    assert reduced.data_wait_ms == 700.0
    assert reduced.slowest_rank == 1
    assert reduced.straggler_fraction == pytest.approx(1 - (10 + 700) / 2 / 700)
    assert reduced.peak_memory_bytes == 7
    assert reduced.skipped_samples == 2
    assert (reduced.decoded_media, reduced.data_read_bytes) == (6, 2 * 10**6)
    assert reduced.encoder_ms is None


def test_table_defines_reduction_over_ranks():
    reduced = {name: metric.reduce for name, metric in METRICS.items() if metric.reduce}
    first, second = (dict.fromkeys([*RANK], value) for value in (500, 2000))
    result = make_record([first, second], None, step=1, **OTHERS)
    expected = {"max": 2000, "sum": 2500, "rate": 2500 / 2.0}
    assert {name: result[name] for name in reduced} == {n: expected[r] for n, r in reduced.items()}
    assert all(type(result[name]) is METRICS[name].value_type for name in reduced)
    empty = make_record([rank_values(step_ms=1.0)] * 2, None, step=1, **OTHERS)
    modules = {"encoder_ms", "llm_ms", "generator_ms", "pipeline_ms", "compile_ms"}
    assert {n for n in reduced if empty[n] is None} == {*modules, "generated_images_per_s"}


def test_record_with_unknown_metric_raises():
    with pytest.raises(AssertionError, match="unknown"):
        make_record([RANK], None, step=1, unknown=1.0, **OTHERS)


def test_mfu_of_unknown_device_is_null():
    assert make_record([RANK], None, step=1, **OTHERS)["mfu"] is None


def test_cpu_peak_is_measured_flops_of_matmul():
    flops = peak_flops(CPU)
    assert flops is not None
    assert 1e8 < flops < 1e14


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A800-SXM4-80GB", 312.0),
        ("NVIDIA GB200", 2500.0),
    ],
)
def test_gpu_peak_follows_device_name(monkeypatch, name, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == tflops * 1e12


def test_unknown_gpu_has_no_peak(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    assert peak_flops(torch.device("cuda")) is None


def test_peak_memory_of_process_is_in_bytes():
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident_bytes = resident_pages * os.sysconf("SC_PAGE_SIZE")
    assert 0.9 * resident_bytes <= peak_memory_bytes(CPU) < 100 * resident_bytes


# --- console output ------------------------------------------------------------------------------


def test_step_line_contains_all_metrics():
    values = record(encoder_ms=12.0, llm_ms=80.0, validation_loss=3.0)
    line = describe_step(values, eta_s=80.0)
    for part in (
        "loss 2.5000",
        "held-out loss 3.0000",
        "2,000 tokens/s",
        "20.0 samples/s",
        "10.0 images/s",
        "MFU 20.0 %",
        "GiB",
        "data wait 2 %",
        "encoder 12 ms",
        "LLM 80 ms",
        "ETA 0:01:20",
    ):
        assert part in line


def test_step_lines_without_terminal_are_unformatted(tmp_path):
    text = io.StringIO()
    tracker = recorder(tmp_path, Console(file=text, width=40), log_interval=2)
    for step in range(1, 5):
        tracker.record(record(step))
    tracker.close()
    lines = text.getvalue().splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["step 2/20", "step 4/20"]
    assert "\x1b" not in text.getvalue()


def test_terminal_shows_progress_bar_and_metrics(tmp_path):
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=80)
    tracker = recorder(tmp_path, console)
    tracker.record(record(7))
    tracker.close()
    assert "7/20" in text.getvalue()
    assert "tokens/s" in text.getvalue()


def test_summary_shows_labels_and_values():
    text = io.StringIO()
    print_summary(Console(file=text), "Run", {"llm": "1.0 M parameters", "ranks": "2"})
    assert "Run" in text.getvalue()
    assert "1.0 M parameters" in text.getvalue()


def test_loss_plot_includes_steps_before_resume(tmp_path):
    first = recorder(tmp_path)
    for step in (1, 2, 3):
        first.record(record(step, validation_loss=3.0 if step == 3 else None))
    first.close()
    tracker = recorder(tmp_path, start_step=2)
    tracker.record(record(3))
    tracker.close()
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3]
    header = (tmp_path / "loss.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width_px, height_px = struct.unpack(">II", header[16:])
    assert width_px > 400
    assert height_px > 200


# --- trackers ------------------------------------------------------------------------------------


class Failing:
    """Tracker that accepts two records and then fails."""

    def __init__(self):
        self.seen = 0

    def emit(self, record):
        self.seen += 1
        if self.seen > 2:
            raise ConnectionResetError("gone")

    def close(self):
        pass


class Hanging:
    """Tracker that never returns from its first record."""

    def emit(self, record):
        threading.Event().wait()

    def close(self):
        pass


def test_failed_tracker_warns_once(caplog):
    failing = Failing()
    sink = BackgroundSink("tracker", lambda: failing, LOG)
    for step in range(100):
        sink.emit({"step": step})
    sink.close()
    assert failing.seen == 3
    assert [r.message for r in caplog.records].count(
        "tracker failed: ConnectionResetError: gone; it is disabled for the rest of the run, "
        "metrics.jsonl continues"
    ) == len(caplog.records)


def test_tracker_that_cannot_start_warns_once(caplog):
    def start():
        raise OSError("no network")

    sink = BackgroundSink("tracker", start, LOG)
    sink.emit({"step": 1})
    sink.close()
    assert len(caplog.records) == 1


def test_blocked_tracker_delays_neither_steps_nor_exit(caplog):
    sink = BackgroundSink("tracker", Hanging, LOG, close_s=0.2)
    for step in range(5000):
        sink.emit({"step": step})
    sink.close()
    assert len(caplog.records) == 1
    assert "is too slow" in caplog.text


def test_tracker_that_does_not_finish_is_abandoned(caplog):
    sink = BackgroundSink("tracker", Hanging, LOG, close_s=0.2)
    sink.emit({"step": 1})
    sink.close()
    assert "did not finish" in caplog.text


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def unreachable_wandb(monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed_port()}")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def test_unreachable_wandb_records_offline(tmp_path, caplog, unreachable_wandb):
    tracker = recorder(tmp_path, wandb="online")
    for step in range(1, 21):
        tracker.record(record(step))
    assert [line["step"] for line in lines_of(tmp_path)] == list(range(1, 21))
    tracker.close()
    assert "is unreachable" in caplog.text
    assert "is disabled for the rest of the run" not in caplog.text
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))


def test_wandb_offline_writes_run(tmp_path, caplog, unreachable_wandb):
    tracker = recorder(tmp_path, wandb="offline")
    tracker.record(record())
    tracker.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert file.stat().st_size > 0
    assert not [r for r in caplog.records if r.name == LOG.name]


def test_resumed_run_continues_wandb_run(tmp_path, unreachable_wandb):
    identities = []
    for start_step in (0, 5, 0):
        tracker = recorder(tmp_path, start_step=start_step, wandb="offline")
        tracker.record(record(start_step + 1))
        tracker.close()
        identities.append((tmp_path / "wandb_run_id").read_text().strip())
    first, resumed, fresh = identities
    assert first == resumed != fresh
    actual = [file.stem for file in tmp_path.glob("wandb/offline-run-*/run-*.wandb")]
    assert {f"run-{first}", f"run-{fresh}"} <= set(actual)


def test_late_scores_belong_to_last_step(tmp_path, monkeypatch):
    emitted = []
    tracker = SimpleNamespace(emit=emitted.append, close=lambda: None)
    monkeypatch.setattr("torchmm.training.tracking.recorder.start_trackers", lambda run: [tracker])
    run_recorder = recorder(tmp_path)
    run_recorder.record(record(1))
    run_recorder.record(record(2, scores={"held/cider": 1.0}))
    run_recorder.add_scores({"task/exact_match": 0.25})
    run_recorder.add_scores({"task/exact_match": 0.5})
    run_recorder.close()
    first, last = lines_of(tmp_path)
    assert first["scores"] is None and last["loss"] == 2.5
    assert last["scores"] == {"held/cider": 1.0, "task/exact_match": 0.5}
    assert [values["step"] for values in emitted] == [1, 2, 2, 2]
    assert [values.get("loss") for values in emitted] == [2.5, 2.5, None, None]
    assert emitted[-1]["scores"] == last["scores"]
