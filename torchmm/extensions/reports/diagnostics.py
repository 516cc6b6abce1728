"""Diagnostics of one selected step: pipeline timeline, memory per rank, profiler trace.

    metrics.timeline_step          timeline/step-N.*, and memory.json: measured and predicted peaks
    metrics.profile_step           profile/step-N-rank-R.json, for Perfetto
    metrics.memory_snapshot_step   profile/memory-step-N-rank-R.pickle, for PyTorch's memory viewer

The predicted peak is that of a dry run (`balance.simulation`) of the plan and the samples of the
step. A difference to the measured peak is therefore an error of the memory model. Every rank
predicts the plan of its pipeline, because replicas have different samples.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from torchmm.balance.pipeweaver.activation_checkpointing.recompute_costs import (
    compute_plan_costs_with_recompute,
)
from torchmm.balance.run_costs import build_cost_model, load_run_profile
from torchmm.balance.simulation.simulator import simulate
from torchmm.common.batch import Microbatch
from torchmm.common.files import replace_atomically
from torchmm.costs.flops import task_durations
from torchmm.extensions.reports.page.run_contents import MEMORY_FILE
from torchmm.extensions.reports.section import ReportKeys
from torchmm.extensions.reports.timelines import plot_prediction, plot_schedules, save_timeline
from torchmm.parallel.gather import gather_floats
from torchmm.parallel.mesh import ParallelMesh
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.planning.resolved_recipe import ResolvedRecipe
from torchmm.training.hooks.hook import FinishedStep, Hook, TrainingContext
from torchmm.training.pipeline import Pipeline
from torchmm.training.tracking.run_directory import TIMELINE_FOLDER

logger = logging.getLogger("torchmm")


class DiagnosticsHook(Hook):
    """Hook that writes timeline, memory and profiler files of the steps in the recipe."""

    def __init__(self, training: TrainingContext) -> None:
        super().__init__(training)
        self._profile_step = self.recipe.metrics.profile_step
        keys = ReportKeys.from_parent(self.recipe.metrics)
        self._snapshot_step = keys.memory_snapshot_step
        self._timeline_step = min(keys.timeline_step, self.recipe.training.steps)
        self._is_cuda = self.components.mesh.device.type == "cuda"
        self._profile_dir = self.components.run_dir / "profile"
        self._profiler: profile | None = None
        self._profiling = ExitStack()
        if self._profile_step or self._snapshot_step:
            self._profile_dir.mkdir(parents=True, exist_ok=True)
        if self._snapshot_step and self._is_cuda:
            torch.cuda.memory._record_memory_history()

    def before_step(self, step: int) -> None:
        """Start the profiler if the step is profiled."""
        if step == self._profile_step:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._is_cuda
            profiler = profile(activities=activities, record_shapes=True)
            self._profiler = self._profiling.enter_context(profiler)
            self._profiling.enter_context(record_function(f"step {step}"))

    def after_step(self, done: FinishedStep) -> None:
        """Write the files of this step."""
        step = done.step
        if self._profiler is not None:
            self._profiling.close()
            self._profiler.export_chrome_trace(self._profile_file(f"step-{step}", "json"))
            self._profiler = None
        if step == self._snapshot_step and self._is_cuda:
            torch.cuda.memory._dump_snapshot(self._profile_file(f"memory-step-{step}", "pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        if step == self._timeline_step:
            with self.training.health.phase(step, "step"):
                self._save_timeline(step, done)
                self._save_memory(step, done)

    def close(self) -> None:
        """Stop the profiler if the profiled step failed."""
        self._profiling.close()

    def _profile_file(self, name: str, suffix: str) -> str:
        return str(self._profile_dir / f"{name}-rank-{self.components.mesh.rank}.{suffix}")

    def _save_timeline(self, step: int, done: FinishedStep) -> None:
        """Write records, trace and figures of a pipeline step. Collective."""
        parts = self.components
        if parts.mesh.plan_size == 1:
            return
        directory = parts.run_dir / TIMELINE_FOLDER
        microbatches = done.batch.microbatches
        save_timeline(directory, step, done.outcome, microbatches, parts.mesh)
        if parts.mesh.rank == 0:
            plan = done.outcome.plan
            metas = [m.task_meta for m in microbatches]
            flops = task_durations(plan.graph, parts.pipeline.descriptions, metas)
            is_searched = self.recipe.parallel.schedule == "searched"
            plot = plot_schedules if is_searched else plot_prediction
            plot(directory, step, plan, flops)

    def _save_memory(self, step: int, done: FinishedStep) -> None:
        """Write measured and predicted peak memory of all ranks. Collective."""
        parts = self.components
        predicted_bytes = predict_peak_bytes(
            parts.run, parts.pipeline, parts.mesh, done.outcome.plan, done.batch.microbatches
        )
        rows = gather_floats([float(done.local["peak_memory_bytes"]), predicted_bytes])
        ranks = [
            {
                "measured_bytes": round(measured),
                "predicted_bytes": None if math.isnan(predicted) else round(predicted),
            }
            for measured, predicted, *_ in rows
        ]
        if parts.mesh.rank == 0:
            values = {"step": step, "device": parts.mesh.device.type, "ranks": ranks}
            text = json.dumps(values) + "\n"
            replace_atomically(parts.run_dir / MEMORY_FILE, text.encode())


def predict_peak_bytes(
    run: ResolvedRecipe,
    pipeline: Pipeline,
    mesh: ParallelMesh,
    plan: PipelinePlan,
    microbatches: Sequence[Microbatch],
) -> float:
    """Return the simulated peak memory of this rank in a step, or NaN if it cannot be simulated."""
    modules = pipeline.descriptions
    metas = [m.task_meta for m in microbatches]
    targets = [m.target_count for m in microbatches]
    try:
        model = build_cost_model(run, modules, load_run_profile(run.recipe, mesh.device))
        layerwise = pipeline.sharding == "layer"
        costs = compute_plan_costs_with_recompute(
            plan, modules, metas, model, targets=targets, layerwise=layerwise
        )
        return float(simulate(plan, costs).peak_bytes[mesh.plan_rank])
    except ValueError as error:  # a failed prediction does not stop the run
        logger.warning("memory cannot be predicted: %s", error)
        return math.nan
