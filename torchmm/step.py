"""Forward and backward of one optimizer step on one rank, as a plan, and what it took.

The loss is the *sum* over targets divided by the number of targets of the whole global batch, so
neither the number of ranks nor that of microbatches or stages changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchmm.batch import Microbatch
from torchmm.parallel.mesh import ParallelMesh
from torchmm.pipeline import Pipeline
from torchmm.pipelining.actions import COMPUTE
from torchmm.pipelining.plan import PipelinePlan
from torchmm.pipelining.runtime import StepResult


@dataclass(frozen=True)
class StepOutcome:
    """A step of one rank.

    Attributes:
        loss: float32 scalar: this rank's sum of target losses / targets of the global batch; 0 on
            ranks without the LLM's last stage.
        plan: what was run.
        result: losses and records.
        module_ms: time in forwards and backwards by module name.
        span_ms: from the first action's start to the last one's end.
    """

    loss: Tensor
    plan: PipelinePlan
    result: StepResult
    module_ms: dict[str, float]
    span_ms: float

    @property
    def compute_ms(self) -> float:
        """Time in forwards and backwards."""
        return sum(self.module_ms.values())


@dataclass
class TrainStep:
    """Runs the microbatches of a step and leaves gradients of the global mean loss."""

    pipeline: Pipeline
    mesh: ParallelMesh

    def run(
        self, microbatches: Sequence[Microbatch], global_targets: float, annotate: bool = False
    ) -> StepOutcome:
        """Accumulates gradients.

        Args:
            microbatches: this data-parallel rank's share, on the CPU.
            global_targets: targets in the whole global batch, over all ranks.
            annotate: name each action in profiles.
        """
        device, targets = self.mesh.device, max(global_targets, 1.0)
        moved = [microbatch.to(device) for microbatch in microbatches]
        # FSDP averages gradients over the data-parallel ranks: undo that in the loss.
        scale = self.mesh.data_parallel_size / targets
        plan, result = self.pipeline.run(moved, loss_scale=scale, annotate=annotate)
        losses = torch.stack([torch.zeros((), device=device), *result.losses.values()])
        module_ms, span_ms = self._times_ms(plan, result)
        return StepOutcome(losses.sum() / targets, plan, result, module_ms, span_ms)

    def _times_ms(self, plan: PipelinePlan, result: StepResult) -> tuple[dict[str, float], float]:
        times_ms: dict[str, float] = {}
        for record in result.records or ():
            if record.action.type in COMPUTE:
                module = plan.graph.layout.stages[record.action.stage].module
                times_ms[module] = times_ms.get(module, 0.0) + record.end_ms - record.start_ms
        return times_ms, max((r.end_ms for r in result.records or ()), default=0.0)
