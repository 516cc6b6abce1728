"""Text loss of the reference: cross entropy, label smoothing and z-loss."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class TextLoss:
    """Settings of the text loss."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __call__(self, logits_TV: Tensor, targets_T: Tensor) -> Tensor:
        """Return the sum over targets: the value of the cross entropy, the gradient of the loss."""
        logits_TV = logits_TV.float()
        is_target_T = targets_T != -100
        entropy = functional.cross_entropy(logits_TV, targets_T, reduction="sum")
        smoothed = functional.cross_entropy(
            logits_TV, targets_T, reduction="sum", label_smoothing=self.label_smoothing
        )
        squares_T = logits_TV.logsumexp(-1).square()
        loss = smoothed + self.z_loss * squares_T[is_target_T].sum()
        return loss - (loss - entropy).detach()
