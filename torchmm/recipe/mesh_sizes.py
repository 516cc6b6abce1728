"""Sizes of a device mesh: the number of ranks in each parallel dimension."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd, prod
from typing import NamedTuple


class MeshSizes(NamedTuple):
    """Sizes of the device mesh; their product is the number of ranks."""

    pipeline: int
    replicate: int
    shard: int
    tensor: int

    @property
    def data_parallel(self) -> int:
        """Number of ranks that read different samples."""
        return self.replicate * self.shard

    @property
    def ranks(self) -> int:
        """Total number of ranks."""
        return prod(self)


AXES = MeshSizes._fields
"""Names of the device mesh's axes, which are also keys of [parallel] and [parallel.NAME]."""


def replica_groups(units: Mapping[str, MeshSizes]) -> int:
    """Return the number of replica groups of disaggregated modules, which share no samples.

    It is the greatest common divisor of the data-parallel sizes of the modules.
    """
    return gcd(*(unit.data_parallel for unit in units.values()))
