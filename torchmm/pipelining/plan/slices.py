"""Token slices of pipeline messages under tensor parallelism.

Tensor-parallel ranks run the same tasks, so all of them have the output of a task. With sequence
parallelism, each rank sends only an equal slice of the tokens (dimension -2) to the rank of the
next stage that needs these tokens:

- Between stages of a module with sequence-parallel layers, activations are already sharded. No rank
  gathers tokens, neither in the forward nor in the backward pass.
- Between modules, and for activations that layers need unsharded (such as DeepStack features), the
  consumer all-gathers the slices over its tensor-parallel ranks. In the backward pass, the producer
  all-gathers the gradients (`torchmm.pipelining.run.stage`).
- If source and destination have different tensor-parallel sizes, each rank sends the overlap of its
  slice with each destination slice (`torchmm.parallel.p2p`).

Messages are not sliced without sequence parallelism, or if they stay on a rank and are needed
unsharded. Slices have equal sizes, as collectives require; the last slices are padded. Slicing is
part of the plan and not of the channel, because autograd has to see the gather.
"""

from __future__ import annotations

from math import lcm
from typing import NamedTuple


class TensorParallelism(NamedTuple):
    """Tensor parallelism of a module."""

    size: int = 1
    sends_token_slices: bool = False
    """Whether ranks send token slices instead of full messages."""
    is_sequence_sharded: bool = False
    """Whether activations between layers are sharded over the sequence."""


class Slices(NamedTuple):
    """Numbers of token slices of a tensor at both ends of a message."""

    source: int
    destination: int
    gathered: bool = True
    """Whether tasks use all tokens. If False, tasks use the local slice."""

    def padded(self, rows: int) -> int:
        """Return the number of tokens, padded so that both ends have equal slices."""
        multiple = lcm(self.source, self.destination)
        return -(-rows // multiple) * multiple


class MessageSlices(NamedTuple):
    """Slices of the tensors of a message. If None, the full tensor is sent."""

    hidden: Slices | None
    """Slices of hidden states, including those that the connector of an encoder reads."""
    additional: Slices | None
    """Slices of additional tensors, and of messages to another module."""
