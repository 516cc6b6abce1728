"""References that one rank computes for all ranks."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def on_first_rank(compute: Callable[[], T]) -> T:
    """Return the result of `compute` on rank 0 to every rank. Collective over the world."""
    results = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(results)
    return results[0]  # type: ignore[return-value]
