"""What one rank computes for all: references, which the others would only compute again."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def on_first_rank(compute: Callable[[], T]) -> T:
    """What `compute` returns on rank 0, on every rank. Collective over the world."""
    found = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]  # type: ignore[return-value]
