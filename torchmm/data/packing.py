"""Packing of a stream of samples into sequences, and sequences to ranks. Pure functions of sizes.

Bounded best fit: every sample goes into the fullest open pack that still has room for it. When
none has, a new one is opened, and if there are too many open ones the fullest is closed first.
Unlike sorting by length this keeps the stream's order up to `open_packs` sequences, so that the
state to save is small and mixtures stay mixed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class Pack(Generic[T]):
    """Samples that share one sequence."""

    free_tokens: int
    items: list[T] = field(default_factory=list)


class Packer(Generic[T]):
    """Packs items one by one.

    Args:
        sequence_length: tokens of a pack.
        max_open: packs kept open.
    """

    def __init__(self, sequence_length: int, max_open: int) -> None:
        self.sequence_length = sequence_length
        self.max_open = max_open
        self.open: list[Pack[T]] = []
        """Open packs, oldest first."""
        self.closed: deque[list[T]] = deque()
        """Closed packs that nobody took yet."""

    def add(self, item: T, tokens: int) -> None:
        """Place one item of `tokens` tokens, at most `sequence_length`."""
        assert 0 < tokens <= self.sequence_length, f"{tokens=} {self.sequence_length=}"
        fitting = [p for p in self.open if p.free_tokens >= tokens]
        if fitting:
            pack = min(fitting, key=lambda p: p.free_tokens)
        else:
            if len(self.open) == self.max_open:
                self._close(min(self.open, key=lambda p: p.free_tokens))
            pack = Pack(self.sequence_length)
            self.open.append(pack)
        pack.items.append(item)
        pack.free_tokens -= tokens
        if pack.free_tokens == 0:
            self._close(pack)

    def flush(self) -> None:
        """Close all packs, oldest first (at the end of a validation epoch)."""
        for pack in list(self.open):
            self._close(pack)

    def _close(self, pack: Pack[T]) -> None:
        self.open = [p for p in self.open if p is not pack]
        self.closed.append(pack.items)


def assign(
    packs: Sequence[T], data_parallel_size: int, microbatch_size: int
) -> list[list[list[T]]]:
    """Packs of one global batch to ranks and microbatches, in natural order.

    Args:
        packs: the global batch, in order.
        data_parallel_size: ranks that share it.
        microbatch_size: packs per microbatch.

    Returns:
        packs by rank and microbatch.
    """
    per_rank = len(packs) // data_parallel_size
    assert per_rank * data_parallel_size == len(packs) and per_rank % microbatch_size == 0
    return [
        [
            list(packs[start : start + microbatch_size])
            for start in range(rank * per_rank, (rank + 1) * per_rank, microbatch_size)
        ]
        for rank in range(data_parallel_size)
    ]
