"""Losses of the text by data source.

The LLM adds the losses of the targets of each microbatch, and training reads the sums once per
step:

    losses.add(loss_L, sources_L)     last stage, every forward pass
    losses.pop_sums(device)               once per step: (S, 2) loss and number of targets by source

Shape legend: L targets of a microbatch, S data sources.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class SourceLosses:
    """Sums of the losses and numbers of targets by data source.

    Args:
        sources: Number of data sources. The sums of a run with one source are not needed.
    """

    def __init__(self, sources: int) -> None:
        self.sources = sources
        self._sums_S2: Tensor | None = None

    def __bool__(self) -> bool:
        return self.sources > 1

    def add(self, loss_L: Tensor, sources_L: Tensor) -> None:
        """Add the losses of targets.

        Args:
            loss_L: (L,), float32, without gradients.
            sources_L: (L,), int64, index of the data source of each target.
        """
        if self._sums_S2 is None:
            self._sums_S2 = torch.zeros(self.sources, 2, device=loss_L.device)
        values_L2 = torch.stack([loss_L, torch.ones_like(loss_L)], dim=1)
        self._sums_S2.index_add_(0, sources_L, values_L2)

    def pop_sums(self, device: torch.device) -> Tensor:
        """Return and reset the sums of this rank since the last call, (S, 2), float32.

        Zero on ranks without the last stage of the LLM.
        """
        taken_S2, self._sums_S2 = self._sums_S2, None
        return torch.zeros(self.sources, 2, device=device) if taken_S2 is None else taken_S2


def mean_by_source(names: Sequence[str], sums: Sequence[float]) -> dict[str, float] | None:
    """Return the mean loss per target of each source with targets, or None for one source.

    Args:
        names: Names of the sources.
        sums: Loss and number of targets of each source, flattened.
    """
    if len(names) < 2:
        return None
    pairs = zip(names, sums[0::2], sums[1::2], strict=True)
    return {name: loss / targets for name, loss, targets in pairs if targets}
