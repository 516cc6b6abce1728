"""Values of a step that all ranks must share: batch sizes before the step, losses after it.

All functions except `copy_losses` are collective over all ranks, in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchmm.common.device_copies import HostCopy
from torchmm.common.errors import DataError, NonFiniteError
from torchmm.data.loader import StepBatch
from torchmm.models.layers.experts import max_expert_load_ratio
from torchmm.models.multimodal import MultimodalModel
from torchmm.parallel.gather import gather_floats
from torchmm.parallel.health.non_finite import find_non_finite_origin
from torchmm.parallel.health.peers import HealthMonitor, check_finite
from torchmm.parallel.mesh import ParallelMesh
from torchmm.training.components import RunComponents
from torchmm.training.step import StepOutcome, gather_corrupt_samples


class StepTotals(NamedTuple):
    """Sums of a step over all ranks, known before the step begins."""

    targets: float
    """Target tokens, or preference pairs, of the text loss in the global batch."""
    images: float
    """Images to generate in the global batch."""
    samples: int
    corrupt_samples: int
    """Corrupt samples that no earlier step has counted."""
    is_stopping: bool
    """Whether a rank received a stop signal. This step is then the last one."""
    lacks_data: bool
    """Whether a rank has no data. No rank does the step then."""
    is_unsettled: bool
    """Whether a rank could not decode a sample that other ranks have not replaced yet."""


def agree_on_batch(
    components: RunComponents, step: int, batch: StepBatch | None, stop_requested: bool
) -> tuple[StepBatch | None, StepTotals]:
    """Return the batch without corrupt samples, and the totals of the step.

    Args:
        components: Components of the run.
        step: Number of the step that begins.
        batch: Batch of this rank; None if this rank received a stop signal and has no data.
        stop_requested: Whether this rank received a stop signal.

    Returns:
        The batch is None on all ranks if it is None on one rank.
    """
    totals = _sum_over_ranks(components, step, batch, stop_requested)
    if batch is None or totals.lacks_data:
        return None, totals
    if totals.is_unsettled:
        is_balanced = batch.rank_images is not None
        corrupt = gather_corrupt_samples(batch.corrupt, components.mesh, of_all_ranks=is_balanced)
        batch = components.loader.mask_corrupt(batch, corrupt)
        totals = _sum_over_ranks(components, step, batch, stop_requested)
    return batch, totals


def _sum_over_ranks(
    components: RunComponents, step: int, batch: StepBatch | None, stop_requested: bool
) -> StepTotals:
    """Return the totals of a step.

    A rank without data takes part. The other ranks wait for it here with equal parameters, so that
    all ranks can save them.
    """
    microbatches = [] if batch is None else batch.microbatches
    local = [
        sum(m.loss_count for m in microbatches),
        sum(m.generated_count for m in microbatches),
        sum(len(m.meta.samples) for m in microbatches),
        0 if batch is None else len(batch.skipped),
        float(stop_requested),
        float(components.checkpoints.failed),
        float(batch is None),
        # Ranks with the same samples have different counts until all of them have settled them.
        0.0 if batch is None else float(len(batch.corrupt)),
    ]
    if batch is None:
        components.logger.warning(
            "no data for step %d: %s", step, components.loader.timeout_message
        )
    try:
        totals = components.mesh.sum_over_data_parallel(local)
    except RuntimeError as error:
        if batch is not None:
            raise
        raise DataError(
            components.loader.timeout_message
        ) from error  # the other ranks did not wait for data
    targets, images, samples, corrupt, stopping, failed_saves, without_data, unsettled = totals
    if failed_saves:
        components.checkpoints.wait()  # raises the error of the save
    return StepTotals(
        targets,
        images,
        int(samples),
        int(corrupt),
        stopping > 0,
        without_data > 0,
        unsettled > 0,
    )


def copy_losses(
    outcome: StepOutcome, grad_norm: Tensor, model: MultimodalModel, mesh: ParallelMesh
) -> HostCopy:
    """Return a copy of losses, gradient norm and expert load without waiting for the device.

    Collective for models with experts.
    """
    load = torch.zeros((), device=mesh.device)
    if model.llm.expert_loads:
        loads_LE = model.llm.expert_loads.pop_loads(mesh.device)
        dist.all_reduce(loads_LE)
        load = max_expert_load_ratio(loads_LE)
    by_source_S2 = model.llm.source_losses.pop_sums(mesh.device)
    scalars = torch.stack([*outcome.weighted_and_module_losses, grad_norm, load])
    terms = model.llm.loss_terms.pop_sums(mesh.device)
    return HostCopy(torch.cat([scalars, by_source_S2.flatten(), terms]))


def check_losses(
    step: int,
    copy: HostCopy,
    model: MultimodalModel,
    mesh: ParallelMesh,
    health: HealthMonitor,
    run_again: Callable[[], StepOutcome],
) -> dict[str, Any]:
    """Wait for the device and return the metrics of `copy_losses` over all ranks.

    Args:
        step: Number of the step.
        copy: Result of `copy_losses`.
        model: Stages of this rank.
        mesh: Mesh of the run.
        health: Heartbeat, which shows that this rank waits for its device.
        run_again: Forward and backward passes of the step, to find the cause of an error.

    Raises:
        NonFiniteError: A loss or the gradient norm is not finite on some rank. The update has
            changed nothing.
    """
    # The only place where a step waits for its device (`torchmm.common.device_copies`).
    with health.waiting_for_device():
        loss, text, image, grad_norm, load, *sums = copy.tolist()
    # Tensor-parallel ranks have equal losses.
    ranks = mesh.module_mesh.sizes.tensor
    rows = gather_floats([loss / ranks, grad_norm, text / ranks, image / ranks, *sums])
    try:
        check_finite(step, ("loss", "grad_norm", "loss_text", "loss_image"), rows)
    except NonFiniteError as error:  # raised by all ranks
        location = find_non_finite_origin(model, run_again)
        raise NonFiniteError(f"{error}. Where: {location}") from None
    loss, _, text, image, *sums = (sum(column) for column in zip(*rows, strict=True))
    llm = model.llm
    by_source = sums[: 2 * len(llm.source_losses.names)]
    terms = sums[len(by_source) :]
    return {
        "loss": loss,
        "loss_text": text,
        "loss_image": image,
        "loss_by_source": llm.source_losses.means(by_source),
        **llm.loss_terms.means(terms),
        "grad_norm": grad_norm,
        "max_expert_load_ratio": load or None,
    }
