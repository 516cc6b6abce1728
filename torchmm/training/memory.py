"""Peak memory of every rank, measured, beside what the plan of a step was predicted to need.

The prediction is the dry run's (`balance.simulation`), of the plan and the samples that the step
really had, so that a difference is one of the memory model and not of the workload. Every rank
predicts its own pipeline's plan: replicas have other samples. Rejected: in every step, which costs
a simulation each.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path

from torchmm.balance.recomputation.costs import costs_of_plan
from torchmm.balance.simulation.simulator import simulate
from torchmm.common.batch import Microbatch
from torchmm.common.files import replace_atomically
from torchmm.parallel.gather import gather_floats
from torchmm.parallel.mesh import ParallelMesh
from torchmm.planning.executions import run_costs, run_profile
from torchmm.planning.resolved import Resolved
from torchmm.training.page.contents import MEMORY_FILE
from torchmm.training.pipeline import Pipeline
from torchmm.training.step import StepOutcome

logger = logging.getLogger("torchmm")


def save_memory(
    run_dir: Path,
    step: int,
    measured_bytes: int,
    predicted_bytes: float,
    mesh: ParallelMesh,
) -> None:
    """Writes measured and predicted peaks of all ranks; collective.

    Args:
        measured_bytes: this rank's, since its start.
        predicted_bytes: this rank's; no number: it could not be predicted.
    """
    rows = gather_floats([float(measured_bytes), predicted_bytes])
    ranks = [
        {"measured_bytes": round(own), "predicted_bytes": None if math.isnan(to) else round(to)}
        for own, to, *_ in rows
    ]
    told = {"step": step, "device": mesh.device.type, "ranks": ranks}
    if mesh.rank == 0:
        replace_atomically(run_dir / MEMORY_FILE, (json.dumps(told) + "\n").encode())


def predicted_peak_bytes(
    run: Resolved,
    pipeline: Pipeline,
    mesh: ParallelMesh,
    outcome: StepOutcome,
    microbatches: Sequence[Microbatch],
) -> float:
    """What this rank needs at most in a step; no number where that cannot be simulated."""
    modules = pipeline.descriptions
    metas = [m.task_meta for m in microbatches]
    targets = [m.target_count for m in microbatches]
    try:
        model = run_costs(run, modules, run_profile(run.recipe, mesh.device))
        layerwise = pipeline.sharding == "layer"
        costs = costs_of_plan(
            outcome.plan, modules, metas, model, targets=targets, layerwise=layerwise
        )
        return float(simulate(outcome.plan, costs).peak_bytes[mesh.pipeline_rank])
    except ValueError as error:  # a picture of a run is no reason to end it
        logger.warning("memory cannot be predicted: %s", error)
        return math.nan
