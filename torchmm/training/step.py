"""Forward and backward passes of one optimizer step on one rank.

The text loss is the sum over target tokens divided by the number of targets of the global batch, or
the same with preference pairs instead of targets.
The image loss is the sum over generated images divided by their number. Both are independent of the
number of ranks, microbatches and stages. The training loss is their weighted sum.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from torchmm.common.batch import Microbatch
from torchmm.common.module_names import GENERATOR, LLM
from torchmm.parallel.gather import gather_texts
from torchmm.parallel.mesh import ParallelMesh
from torchmm.pipelining.plan.actions import COMPUTE
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.run.runtime import StepResult
from torchmm.recipe.model_section import GeneratorConfig
from torchmm.training.pipeline import Pipeline


@dataclass(frozen=True)
class StepOutcome:
    """Result of the forward and backward passes of one step on one rank.

    Attributes:
        losses: Maps a module ("llm", "generator") to the sum of losses on this rank divided by the
            number of targets or images in the global batch. Scalars, float32. 0 on ranks without
            the last stage of the module.
        loss: Weighted sum of `losses`, a float32 scalar.
        plan: Plan of the step.
        result: Losses and timing records of the runtime.
    """

    losses: dict[str, Tensor]
    loss: Tensor
    plan: PipelinePlan
    result: StepResult

    @cached_property
    def module_ms(self) -> dict[str, float]:
        """Time in forward and backward passes by module. On CUDA, waits for the end of the step."""
        times_ms: dict[str, float] = {}
        for record in self.result.records or ():
            if record.action.type in COMPUTE:
                module = self.plan.graph.layout.stages[record.action.stage].module
                times_ms[module] = times_ms.get(module, 0.0) + record.end_ms - record.start_ms
        return times_ms

    @property
    def weighted_and_module_losses(self) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted sum, text loss and image loss."""
        return self.loss, self.losses[LLM], self.losses[GENERATOR]

    @property
    def compute_ms(self) -> float:
        """Time in forward and backward passes of all modules."""
        return sum(self.module_ms.values())


def loss_weights(generator: GeneratorConfig | None) -> dict[str, float]:
    """Return the coefficient of the loss of each module, or an empty dict without a generator."""
    if generator is None:
        return {}
    return {LLM: generator.text_loss_weight, GENERATOR: generator.loss_weight}


def gather_corrupt_samples(
    local_samples: Mapping[str, str], mesh: ParallelMesh, *, of_all_ranks: bool = False
) -> dict[str, str]:
    """Return the samples that could not be decoded, with reasons. Collective over all ranks.

    Args:
        local_samples: Maps "source[index]" of samples that this rank could not decode to reasons.
        mesh: Mesh of the run.
        of_all_ranks: Whether to return the samples of all ranks of the run, instead of the ranks
            with the same samples.
    """
    texts = gather_texts(json.dumps(local_samples))
    reasons: dict[str, str] = {}
    peers = sorted(rank for ranks in mesh.plan_ranks for rank in ranks)
    for rank in range(mesh.world_size) if of_all_ranks else peers:
        reasons = {**json.loads(texts[rank]), **reasons}
    return dict(sorted(reasons.items()))


@dataclass
class TrainStep:
    """Forward and backward passes of a step, which accumulate gradients of the global mean loss.

    Args:
        pipeline: Pipeline of this rank.
        mesh: Mesh of the run.
        loss_weights: Loss coefficients by module name. Defaults to 1.
    """

    pipeline: Pipeline
    mesh: ParallelMesh
    loss_weights: Mapping[str, float] = field(default_factory=dict)

    def run(
        self,
        plan: PipelinePlan,
        microbatches: Sequence[Microbatch],
        global_targets: float,
        global_images: float = 0.0,
        *,
        annotate: bool = False,
    ) -> StepOutcome:
        """Accumulate the gradients of a step.

        Args:
            plan: Plan of these microbatches.
            microbatches: Microbatches of this data-parallel rank, on the CPU.
            global_targets: Target tokens in the global batch, over all ranks.
            global_images: Generated images in the global batch that are included in the loss.
            annotate: Whether to name each action in profiles.
        """
        counts = {LLM: max(global_targets, 1.0), GENERATOR: max(global_images, 1.0)}
        weights = {name: self.loss_weights.get(name, 1.0) for name in counts}
        scales = dict.fromkeys((s.module for s in self.pipeline.layout.stages), 0.0)
        for name, count in counts.items():
            scales[name] = weights[name] / count
        if self.pipeline.router_balance is not None:
            # Losses that balance experts are means over the tokens of the global batch.
            tokens = sum(len(m.input_ids_T) for m in microbatches) * self.mesh.data_parallel_size
            self.pipeline.router_balance.scale = weights[LLM] / max(tokens, 1)
        result = self.pipeline.run(plan, microbatches, loss_scale=scales, annotate=annotate)
        zero = torch.zeros((), device=self.mesh.device)
        losses = {
            name: torch.stack([zero, *result.losses_of(name).values()]).sum() / count
            for name, count in counts.items()
        }
        loss = sum((weights[name] * losses[name] for name in counts), zero)
        return StepOutcome(losses, loss, plan, result)
