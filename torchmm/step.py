"""Forward and backward of one optimizer step: all microbatches of one rank.

Encoders and LLM run as separate stages: the LLM's backward ends at the encoder outputs, whose
gradients then start the encoders' backward. That is how a pipeline cuts the graph, it gives each
module its own time, and it lets FSDP2 finish one module's reductions while the other computes.
The loss is the *sum* over targets divided by the number of targets of the whole global batch, so
neither the number of ranks nor that of microbatches changes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchmm.batch import Microbatch
from torchmm.metrics import PhaseTimer
from torchmm.models.multimodal import MultimodalModel
from torchmm.parallel.fsdp import set_last_microbatch


@dataclass
class TrainStep:
    """Runs the microbatches of a step and leaves gradients of the global mean loss."""

    model: MultimodalModel
    device: torch.device
    data_parallel_size: int
    timer: PhaseTimer

    def run(self, microbatches: list[Microbatch], global_targets: float) -> Tensor:
        """Accumulates gradients.

        Args:
            microbatches: this rank's share, on the CPU.
            global_targets: targets in the whole global batch, over all ranks.

        Returns:
            float32 scalar: this rank's sum of target losses / `global_targets`.
        """
        total = torch.zeros((), device=self.device)
        for index, microbatch in enumerate(microbatches):
            last = index == len(microbatches) - 1
            set_last_microbatch(self.model.modality_modules(), last)
            total += self._forward_backward(microbatch.to(self.device), max(global_targets, 1.0))
        return total

    def _forward_backward(self, microbatch: Microbatch, global_targets: float) -> Tensor:
        with self.timer.phase("encoder"):
            features = self.model.encode(microbatch)
        cut = {n: f.detach().requires_grad_(f.requires_grad) for n, f in features.items()}
        with self.timer.phase("llm"):
            loss = self.model.llm(microbatch, cut) / global_targets
            # FSDP averages gradients over the data-parallel ranks: undo that in the loss.
            (loss * self.data_parallel_size).backward()
        outputs = [f for f in features.values() if f.requires_grad]
        with self.timer.phase("encoder"):
            if outputs:
                grads = [cut[n].grad for n, f in features.items() if f.requires_grad]
                torch.autograd.backward(outputs, grads)
        return loss.detach()
