"""A profiler trace or memory snapshot of one chosen step, by recipe switch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from torchmm.recipe.training_section import MetricsConfig


class StepProfiler:
    """Records the steps the recipe asks for, on every rank; other steps cost nothing.

    Files are in `profile/` of the run directory: `step-N-rank-R.json` opens in Perfetto,
    `memory-step-N-rank-R.pickle` in PyTorch's memory viewer (CUDA only).
    """

    def __init__(
        self, config: MetricsConfig, run_dir: Path, rank: int, device: torch.device
    ) -> None:
        self._config = config
        self._directory = run_dir / "profile"
        self._rank = rank
        self._cuda = device.type == "cuda"
        if config.profile_step or config.memory_snapshot_step:
            self._directory.mkdir(parents=True, exist_ok=True)
        if config.memory_snapshot_step and self._cuda:
            torch.cuda.memory._record_memory_history()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Wraps one training step."""
        if step == self._config.profile_step:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._cuda
            with (
                profile(activities=activities, record_shapes=True) as record,
                record_function(f"step {step}"),
            ):
                yield
            record.export_chrome_trace(str(self._file(f"step-{step}", "json")))
        else:
            yield
        if step == self._config.memory_snapshot_step and self._cuda:
            torch.cuda.memory._dump_snapshot(str(self._file(f"memory-step-{step}", "pickle")))
            torch.cuda.memory._record_memory_history(enabled=None)

    def _file(self, name: str, suffix: str) -> Path:
        return self._directory / f"{name}-rank-{self._rank}.{suffix}"
