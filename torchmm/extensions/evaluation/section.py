"""Key of this extension in the recipe section `[validation]`, and its section."""

from __future__ import annotations

from pydantic import Field

from torchmm.recipe.section import Section


class BenchmarksConfig(Section):
    """Evaluation of exported snapshots with lmms-eval, in a separate process during training.

    `scripts/lmms_eval.sh` installs lmms-eval. See docs/guides/evaluation.md.
    """

    tasks: list[str] = Field(default=[])
    """Names of lmms-eval tasks, or of tasks in `folder`."""
    interval: int = Field(default=0, ge=0)
    """Number of steps between evaluations. One also runs after the last step. 0 disables them."""
    folder: str | None = None
    """Directory of additional tasks (YAML files)."""
    limit: int | None = Field(default=None, ge=1)
    """Maximum number of questions per task. If None, all questions are used."""
    batch_size: int = Field(default=8, ge=1)
    """Batch size of the evaluation."""
    gpu: int | None = Field(default=None, ge=0)
    """Index of the GPU on the host of rank 0. Use a GPU without a training rank. If None, the
    evaluation runs on the CPU."""
    python: str = ".lmms-eval/bin/python"
    """Python executable of the environment with lmms-eval."""
    timeout_s: float = Field(default=3600.0, gt=0)
    """Maximum time in seconds that the run waits at its end for evaluations in progress."""


class EvaluationKeys(Section):
    """Keys of evaluations by other programs."""

    benchmarks: BenchmarksConfig = Field(default=BenchmarksConfig())
    """Evaluation with lmms-eval."""
