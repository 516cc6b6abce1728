"""Which part of a message each tensor-parallel rank sends and gets.

Tensor-parallel ranks run the same tasks, so each of them has what a task hands on. Under sequence
parallelism each sends a slice of it only, an equal part of its rows (the last dimension but one),
to a rank with the same rows of the destination:

- Between stages of a module whose layers keep slices of the sequence, these are what travels: no
  rank gathers anything, neither forwards nor backwards.
- Between modules, and where stages hand on what their layers need whole (the features that later
  layers add, hidden states of layers that keep no slices), the consumer gathers its slices over its
  tensor-parallel ranks, and for gradients the producer does (`torchmm.pipelining.run.stage`).
- Groups of other sizes cut the same rows into other slices; each rank then sends what of its slice
  belongs into another one's (`torchmm.parallel.p2p`).

Everything stays whole without sequence parallelism, in which ranks work on whole sequences, and
what stays on a rank of the plan and is needed whole there.

Rejected: to cut and gather on the wire, in the channels, where neither the plan nor autograd knows
of it; and uneven slices, as collectives want equal ones: the last are padded.
"""

from __future__ import annotations

from math import lcm
from typing import NamedTuple


class TensorRanks(NamedTuple):
    """The tensor-parallel ranks of a module."""

    size: int = 1
    sends_slices: bool = False
    """Whether messages of the module are sliced."""
    keeps_slices: bool = False
    """Whether between two of its layers a rank has a slice of the sequence only."""


class Slices(NamedTuple):
    """Into how many slices the ranks at both ends of a message cut the rows of a tensor."""

    source: int
    destination: int
    gathered: bool = True
    """Whether the tasks at both ends work on all rows; else on a rank's slice."""

    def padded(self, rows: int) -> int:
        """As many rows as both ends cut into equal slices."""
        multiple = lcm(self.source, self.destination)
        return -(-rows // multiple) * multiple


class MessageSlices(NamedTuple):
    """Slices of the tensors of a message; None: they travel whole."""

    hidden: Slices | None
    """Of hidden states, and of those that an encoder's connector reads too."""
    others: Slices | None
    """Of what travels beside them, or to another module."""
