"""How many ranks share what: the sizes of a device mesh."""

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
        """Ranks that read different samples."""
        return self.replicate * self.shard

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return prod(self)


AXES = MeshSizes._fields
"""Names of the device mesh's axes, which are also keys of [parallel] and [parallel.NAME]."""


def replica_groups(units: Mapping[str, MeshSizes]) -> int:
    """Replica groups of disaggregated modules, which share no samples: the greatest common divisor
    of the modules' data-parallel sizes."""
    return gcd(*(unit.data_parallel for unit in units.values()))
