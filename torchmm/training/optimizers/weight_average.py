"""Exponential moving average of the weights (`training.ema_decay`).

Averages are float32 and have the shapes and sharding of their parameters. Each rank averages its
local shards without communication. Replicas and tied copies therefore stay bitwise identical, like
their parameters. As in `AveragedModel` of torch, the average is initialized from the weights after
the first step.

`AveragedModel` is not used, because it copies the complete module, including frozen parameters and
hooks of FSDP2. It also stores averages in the dtype of the parameters, and a bfloat16 average would
not change. Averages are not optimizer states either, because optimizer kernels and checkpoints
would treat them as states of the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from torchmm.models.hf.load import local_tensor

Averages = dict[Tensor, Tensor]
"""Maps a parameter to its moving average, a float32 tensor with the same sharding."""


class WeightAverage:
    """Moving averages of the trained parameters of `model`. A rank may have none.

    Args:
        model: Model with the stages of this rank, whose parameters are allocated.
        decay: Fraction of the average that each step retains, above 0 and below 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model = model
        self._decay = decay
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._averages: Averages = {}

    @property
    def averages(self) -> Averages:
        """Moving averages by parameter, float32. Empty before the first step."""
        return self._averages

    def zeros(self) -> Averages:
        """Return zero-filled averages, into which a checkpoint is loaded."""
        return {p: torch.zeros_like(p, dtype=torch.float32) for p in self._parameters}

    def restore(self, averages: Mapping[Tensor, Tensor]) -> None:
        """Replace the averages. If `averages` is empty, the next update initializes them."""
        self._averages = dict(averages)

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages. Call it after each update of the parameters."""
        if not self._averages:
            self._averages = self.zeros()
            for parameter, average in self._averages.items():
                local_tensor(average).copy_(local_tensor(parameter))
            return
        pairs = [(local_tensor(a), local_tensor(p)) for p, a in self._averages.items()]
        same_dtype = [(a, p) for a, p in pairs if p.dtype == a.dtype]
        narrow = [(a, p) for a, p in pairs if p.dtype != a.dtype]
        if same_dtype:
            torch._foreach_lerp_(
                [a for a, _ in same_dtype], [p for _, p in same_dtype], 1 - self._decay
            )
        if narrow:  # computes in place, without a float32 copy of the parameters
            torch._foreach_mul_([a for a, _ in narrow], self._decay)
            values = [p for _, p in narrow]
            torch._foreach_add_([a for a, _ in narrow], values, alpha=1 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the parameters by their averages in this context. The parameters are on the CPU.

        All ranks enter it together, between steps. Before the first step, nothing changes.
        """
        with torch.no_grad():
            saved = [
                (local_tensor(p), local_tensor(p).to("cpu", copy=True)) for p in self._averages
            ]
            for parameter, average in self._averages.items():
                local_tensor(parameter).copy_(local_tensor(average))
        free_gathered_parameters(self._model)
        try:
            yield
        finally:
            with torch.no_grad():
                for value, before in saved:
                    value.copy_(before)
            free_gathered_parameters(self._model)


def free_gathered_parameters(model: nn.Module) -> None:
    """Free the all-gathered parameters of FSDP2, which have the previous values."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
