"""Forward and backward of one optimizer step on one rank, as a plan, and what it took.

The text loss is the *sum* over targets divided by the number of targets of the whole global batch,
the image loss the sum over images divided by their number, so neither the number of ranks nor that
of microbatches or stages changes them. What is trained on is their weighted sum.
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
    """A step of one rank.

    Attributes:
        losses: float32 scalars by module ("llm", "generator"): this rank's sum of losses / number
            of targets or images in the global batch; 0 on ranks without the module's last stage.
        loss: their weighted sum.
        plan: what was run.
        result: losses and records.
    """

    losses: dict[str, Tensor]
    loss: Tensor
    plan: PipelinePlan
    result: StepResult

    @cached_property
    def module_ms(self) -> dict[str, float]:
        """Time in forwards and backwards by module name; on CUDA, waits for the step's end."""
        times_ms: dict[str, float] = {}
        for record in self.result.records or ():
            if record.action.type in COMPUTE:
                module = self.plan.graph.layout.stages[record.action.stage].module
                times_ms[module] = times_ms.get(module, 0.0) + record.end_ms - record.start_ms
        return times_ms

    @property
    def loss_of_each(self) -> tuple[Tensor, Tensor, Tensor]:
        """The weighted sum, the text's and the drawn images' loss."""
        return self.loss, self.losses[LLM], self.losses[GENERATOR]

    @property
    def compute_ms(self) -> float:
        """Time in forwards and backwards."""
        return sum(self.module_ms.values())


def loss_weights(generator: GeneratorConfig | None) -> dict[str, float]:
    """Factors of the losses, by module; none where there is only one."""
    if generator is None:
        return {}
    return {LLM: generator.text_loss_weight, GENERATOR: generator.loss_weight}


def gather_corrupt_samples(
    own: Mapping[str, str], mesh: ParallelMesh, *, of_all_ranks: bool = False
) -> dict[str, str]:
    """Return the samples that could not be decoded, with reasons; collective over all ranks.

    Args:
        own: reasons by "source[index]" of samples that this rank could not decode.
        of_all_ranks: Whether to return the samples of all ranks of the run, instead of the ranks
            with the same samples.
    """
    texts = gather_texts(json.dumps(own))
    found: dict[str, str] = {}
    alike = sorted(rank for ranks in mesh.plan_ranks for rank in ranks)
    for rank in range(mesh.world_size) if of_all_ranks else alike:
        found = {**json.loads(texts[rank]), **found}
    return dict(sorted(found.items()))


@dataclass
class TrainStep:
    """Runs the microbatches of a step and leaves gradients of the global mean loss.

    Args:
        loss_weights: factor of each module's loss, by name; 1 where none is given.
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
        """Accumulates gradients.

        Args:
            plan: of these microbatches.
            microbatches: this data-parallel rank's share, on the CPU.
            global_targets: targets in the whole global batch, over all ranks.
            global_images: generated images that count, in the whole global batch.
            annotate: name each action in profiles.
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
        nothing = torch.zeros((), device=self.mesh.device)
        losses = {
            name: torch.stack([nothing, *result.losses_of(name).values()]).sum() / count
            for name, count in counts.items()
        }
        loss = sum((weights[name] * losses[name] for name in counts), nothing)
        return StepOutcome(losses, loss, plan, result)
