"""Key of this extension in the recipe section `[validation]`, and its section."""

from __future__ import annotations

from pydantic import Field

from torchmm.recipe.section import Section


class BenchmarksConfig(Section):
    """Tasks of lmms-eval, answered by a process of its own with an exported snapshot while training
    goes on. `scripts/lmms_eval.sh` makes what it needs."""

    tasks: list[str] = Field(default=[])
    """Names of tasks: lmms-eval's, or those in `folder`."""
    interval: int = Field(default=0, ge=0)
    """Steps between snapshots; also after the last step; 0: never."""
    folder: str | None = None
    """Directory of further tasks (YAML files and what they use)."""
    limit: int | None = Field(default=None, ge=1)
    """Questions of each task that are answered; none: all."""
    batch_size: int = Field(default=8, ge=1)
    """Questions that are answered together."""
    gpu: int | None = Field(default=None, ge=0)
    """Number of the GPU, on rank 0's machine, that answers; none: its CPUs. Leave one that no rank
    uses."""
    python: str = ".lmms-eval/bin/python"
    """Python in which lmms-eval is installed."""
    timeout_s: float = Field(default=3600.0, gt=0)
    """How long a run waits at its end for answers under way."""


class EvaluationKeys(Section):
    """Keys of evaluations by other programs."""

    benchmarks: BenchmarksConfig = Field(default=BenchmarksConfig())
    """Tasks of lmms-eval."""
