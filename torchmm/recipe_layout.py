"""How many ranks share what: the sizes of a device mesh."""

from __future__ import annotations

from typing import NamedTuple


class Layout(NamedTuple):
    """Sizes of the device mesh; their product is the number of ranks."""

    pipeline: int
    replicate: int
    shard: int
    tensor: int

    @property
    def data_parallel(self) -> int:
        """Ranks that read different samples."""
        return self.replicate * self.shard
