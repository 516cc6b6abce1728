"""The components of a run: built by `build.build_run`, used by the training loop and its hooks."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from torchmm.data.loader import Loader
from torchmm.data.sources.sample_set import SampleSet
from torchmm.models.multimodal import MultimodalModel
from torchmm.parallel.compilation import Compilation
from torchmm.parallel.mesh import ParallelMesh
from torchmm.planning.planner import Planner
from torchmm.planning.resolved_recipe import ResolvedRecipe
from torchmm.training.checkpoint.load import RestoredRun
from torchmm.training.checkpoint.manager import CheckpointManager
from torchmm.training.optimizers.optimizer import RunOptimizer
from torchmm.training.optimizers.weight_average import WeightAverage
from torchmm.training.pipeline import Pipeline
from torchmm.training.tracking.recorder import MetricsRecorder


@dataclass
class RunComponents:
    """The components of a run on one rank."""

    run: ResolvedRecipe
    run_dir: Path
    logger: logging.Logger
    mesh: ParallelMesh
    tokenizer: PreTrainedTokenizerBase
    model: MultimodalModel
    """The stages of this rank."""
    pipeline: Pipeline
    compilation: Compilation
    planner: Planner
    optimizer: RunOptimizer
    average: WeightAverage | None
    """Moving average of the weights (`training.ema_decay`)."""
    checkpoints: CheckpointManager
    restored: RestoredRun | None
    """The loaded checkpoint. None if training starts at step 0."""
    loader: Loader
    held_out: SampleSet | None
    """Validation samples. None without validation."""
    recorder: MetricsRecorder | None
    """Metrics recorder of rank 0. None on the other ranks."""
