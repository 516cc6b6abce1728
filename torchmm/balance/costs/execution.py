"""How a module is run: over how many ranks it is split, and what it recomputes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Execution:
    """How one module runs.

    Attributes:
        tensor: tensor-parallel ranks.
        sequence_parallel: whether activations between tensor-parallel regions are split too.
        async_tensor: whether communication of linears overlaps with their matrix products.
        shard, replicate: data-parallel ranks that share parameters, and copies of those groups.
        recompute: activation checkpointing.
    """

    tensor: int = 1
    sequence_parallel: bool = False
    async_tensor: bool = False
    shard: int = 1
    replicate: int = 1
    recompute: Recompute = "none"

    @property
    def residual_share(self) -> float:
        """What share of the positions a rank has between tensor-parallel regions."""
        return 1 / self.tensor if self.sequence_parallel else 1.0
