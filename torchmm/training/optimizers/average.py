"""An exponential moving average of the weights (`training.ema_decay`).

Averages are float32, like their parameters in shape and in how they are sharded, and each rank
averages what it has: nothing is communicated, and replicas and tied copies stay bit-equal as their
parameters do. As with torch's `AveragedModel` the average begins as the weights after the first
step. That class is not used: it copies the whole module, parameters that are frozen and hooks of
FSDP2 included, and keeps averages in the parameters' dtype, in which a bfloat16 one would not move.

Rejected: averages as states of the optimizer, whose kernels and checkpoints take all that is there
for their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from torchmm.models.hf.load import local_tensor

Averages = dict[Tensor, Tensor]
"""By parameter."""


class WeightAverage:
    """Of the parameters of `model` that are trained; there may be none on this rank.

    Args:
        model: this rank's part, with its memory.
        decay: what is kept of the average in each step, above 0 and below 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model = model
        self._decay = decay
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._averages: Averages = {}

    @property
    def averages(self) -> Averages:
        """Float32, like their parameters; empty before the first step."""
        return self._averages

    def zeros(self) -> Averages:
        """To be loaded into."""
        return {p: torch.zeros_like(p, dtype=torch.float32) for p in self._parameters}

    def restore(self, averages: Mapping[Tensor, Tensor]) -> None:
        """Goes on from these; from none, begins anew."""
        self._averages = dict(averages)

    @torch.no_grad()
    def update(self) -> None:
        """To be called after each update of the parameters."""
        if not self._averages:
            self._averages = self.zeros()
            for parameter, average in self._averages.items():
                local_tensor(average).copy_(local_tensor(parameter))
            return
        pairs = [(local_tensor(a), local_tensor(p)) for p, a in self._averages.items()]
        alike = [(a, p) for a, p in pairs if p.dtype == a.dtype]
        narrow = [(a, p) for a, p in pairs if p.dtype != a.dtype]
        if alike:
            torch._foreach_lerp_([a for a, _ in alike], [p for _, p in alike], 1 - self._decay)
        if narrow:  # without a copy of them in float32
            torch._foreach_mul_([a for a, _ in narrow], self._decay)
            values = [p for _, p in narrow]
            torch._foreach_add_([a for a, _ in narrow], values, alpha=1 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Averages take the parameters' places meanwhile, which wait in the host's memory.

        To be entered by all ranks between steps. Before the first step nothing changes.
        """
        with torch.no_grad():
            kept = [(local_tensor(p), local_tensor(p).to("cpu", copy=True)) for p in self._averages]
            for parameter, average in self._averages.items():
                local_tensor(parameter).copy_(local_tensor(average))
        self._free_gathered()
        try:
            yield
        finally:
            with torch.no_grad():
                for value, before in kept:
                    value.copy_(before)
            self._free_gathered()

    def _free_gathered(self) -> None:
        """What FSDP2 may have kept after a forward is of other values."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
