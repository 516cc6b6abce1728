"""The interface of hooks, and the data that hooks receive from the training loop.

All ranks have the same hooks. A hook is due by the step number alone, so all ranks reach the
collectives inside hooks together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchmm.data.corrupt import CorruptLimit
from torchmm.data.loader import StepBatch
from torchmm.parallel.health.peers import HealthMonitor
from torchmm.training.components import RunComponents
from torchmm.training.metrics import Record
from torchmm.training.shutdown import StopSignal
from torchmm.training.step import StepOutcome


@dataclass
class TrainState:
    """Training progress that checkpoints store in addition to tensors. Identical on all ranks."""

    step: int
    """Last finished step."""
    data: dict[str, Any]
    """State of the data loader after that step."""
    corrupt: CorruptLimit
    best: float | None = None
    """Lowest badness of `checkpoint.keep_best` so far."""
    early_stopping: dict[str, Any] = field(default_factory=dict)
    """State of `EarlyStoppingHook`."""
    end_reason: str = ""
    """Reason why the run is complete before its last step. Empty otherwise."""

    @classmethod
    def resume(cls, components: RunComponents) -> TrainState:
        """Return the state of the loaded checkpoint, or that of a new run."""
        data = components.run.recipe.data
        corrupt = CorruptLimit(
            data.max_corrupt_samples, data.max_corrupt_fraction, components.loader.samples_per_pass
        )
        if components.restored is None:
            return cls(0, {}, corrupt)
        saved = components.restored.state
        corrupt.add(**saved["corrupt"])
        early_stopping = saved.get("early_stopping", {})
        step = components.restored.step
        return cls(step, saved["data"], corrupt, saved.get("best"), early_stopping)

    def as_json(self) -> dict[str, Any]:
        """Return the values to store in a checkpoint."""
        counts = {"corrupt": self.corrupt.corrupt, "seen": self.corrupt.seen}
        return {
            "data": self.data,
            "corrupt": counts,
            "best": self.best,
            "early_stopping": self.early_stopping,
        }


@dataclass
class FinishedStep:
    """A finished training step."""

    step: int
    record: Record
    """Metrics of the step. Hooks may set more metrics."""
    local: Mapping[str, float]
    """Metrics of this rank, before their reduction over ranks."""
    outcome: StepOutcome
    batch: StepBatch
    is_stopping: bool
    """Whether a rank received a stop signal. This step is then the last one."""


@dataclass
class TrainingContext:
    """Objects of the training loop that hooks may use.

    The trainer is excluded, because a reference cycle would keep data workers alive after training,
    and the process waits for them when it exits.
    """

    components: RunComponents
    state: TrainState
    health: HealthMonitor
    stop: StopSignal


class Hook:
    """Base class of hooks. All methods do nothing by default.

    Args:
        training: Objects of the training loop.
    """

    def __init__(self, training: TrainingContext) -> None:
        self.training = training
        self.components = training.components
        self.recipe = training.components.run.recipe

    def before_step(self, step: int) -> None:
        """Prepare for a step. Must not communicate."""

    def after_step(self, done: FinishedStep) -> None:
        """Process a finished step. May communicate."""

    def finish(self) -> None:
        """Complete the work of the hook after the last step or a stop signal.

        May communicate. Not called if training fails.
        """

    def close(self) -> None:
        """Release resources, also if training fails. Must not communicate."""

    def is_due(self, step: int, interval: int) -> bool:
        """Return True after every `interval` steps and after the last step of the run."""
        is_last = step == self.recipe.training.steps or self.training.state.end_reason != ""
        return interval > 0 and (is_last or step % interval == 0)

    def is_complete(self) -> bool:
        """Return True if all steps of the run are finished, or a hook has completed the run."""
        state = self.training.state
        return state.step >= self.recipe.training.steps or state.end_reason != ""
