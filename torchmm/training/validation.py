"""Losses on held-out samples, computed by forward-only plans."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from torchmm.common.module_names import GENERATOR
from torchmm.data.loader import StepBatch
from torchmm.models.source_losses import SourceLosses
from torchmm.parallel.mesh import ParallelMesh
from torchmm.training.pipeline import Pipeline


# "force_eager": compiling for a few held-out batches takes longer than it saves.
@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def held_out_losses(
    pipeline: Pipeline,
    batches: Iterable[StepBatch],
    mesh: ParallelMesh,
    source_losses: SourceLosses | None = None,
) -> dict[str, Any]:
    """Return the mean losses over all held-out batches and ranks.

    The loss of "llm" is the mean over target tokens or preference pairs, that of "generator" the
    mean over images. With `source_losses`, "by_source" has the result of `SourceLosses.means`.

    Args:
        pipeline: Pipeline of this rank.
        batches: Held-out batches.
        mesh: Mesh of the run.
        source_losses: Sums by held-out source, to which the LLM adds its losses.
    """
    sums = {name: torch.zeros((), device=mesh.device) for name in ("llm", GENERATOR)}
    targets = images = 0
    for batch in batches:
        losses = pipeline.losses(batch.microbatches)
        for module, by_microbatch in losses.items():
            sums[module] += torch.stack(by_microbatch).sum()
        targets += sum(m.loss_count for m in batch.microbatches)
        images += sum(m.generated_count for m in batch.microbatches)
    # All ranks with the same samples count targets, but only one tensor-parallel group of them has
    # the losses of a module.
    fraction = mesh.ranks_per_sample / mesh.module_mesh.sizes.tensor
    by_source: list[float] = []
    if source_losses is not None:
        by_source = source_losses.pop_sums(mesh.device).flatten().tolist()
    local = [*(loss.item() * fraction for loss in sums.values()), targets, images, *by_source]
    text, image, all_targets, all_images, *by_source = mesh.sum_over_data_parallel(local)
    means: dict[str, Any] = {
        "llm": text / max(1.0, all_targets),
        GENERATOR: image / max(1.0, all_images),
    }
    return means if source_losses is None else means | {"by_source": source_losses.means(by_source)}
