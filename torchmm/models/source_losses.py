"""Losses of the text by data source.

The LLM adds the losses of the targets of each microbatch, and training reads the sums once per
step:

    losses.add(loss_L, sources_L)    last stage, every forward pass
    losses.pop_sums(device)          once per step: (S, 2) loss and number of targets by source
    losses.means(sums)               from the sums over all ranks: mean loss by source name

Shape legend: L targets of a microbatch, S data sources.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class SourceLosses:
    """Sums of the losses and numbers of targets by data source.

    Args:
        names: Names of the data sources. Fewer than two need no sums, and S is then 0.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = tuple(names) if len(names) > 1 else ()
        self._sums_S2: Tensor | None = None

    def __bool__(self) -> bool:
        return bool(self.names)

    def add(self, loss_L: Tensor, sources_L: Tensor) -> None:
        """Add the losses of targets.

        Args:
            loss_L: (L,), float32, without gradients.
            sources_L: (L,), int64, index of the data source of each target.
        """
        if self._sums_S2 is None:
            self._sums_S2 = torch.zeros(len(self.names), 2, device=loss_L.device)
        values_L2 = torch.stack([loss_L, torch.ones_like(loss_L)], dim=1)
        self._sums_S2.index_add_(0, sources_L, values_L2)

    def pop_sums(self, device: torch.device) -> Tensor:
        """Return and reset the sums of this rank since the last call, (S, 2), float32.

        Zero on ranks without the last stage of the LLM.
        """
        sums_S2, self._sums_S2 = self._sums_S2, None
        return torch.zeros(len(self.names), 2, device=device) if sums_S2 is None else sums_S2

    def means(self, sums: Sequence[float]) -> dict[str, float] | None:
        """Return the mean loss per target by source name, or None with fewer than two sources.

        Args:
            sums: Loss and number of targets of each source, flattened. Sources without targets
                are omitted from the result.
        """
        if not self:
            return None
        pairs = zip(self.names, sums[0::2], sums[1::2], strict=True)
        return {name: loss / targets for name, loss, targets in pairs if targets}
