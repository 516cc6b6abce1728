"""Meshes of modules on ranks of their own (DistTrain §4.1, §7).

Encoders, LLM and generator are *units*: consecutive blocks of the world's ranks, each with a mesh
of its own, in which FSDP2 and tensor parallelism work as if it were the whole world. What joins
units is the plan of a replica group (`torchmm.pipelining.schedules.disaggregated`): its ranks are,
module by module and replica by replica, the pipeline ranks of all units; all of them read the same
samples.

A unit's replicas divide the microbatches of a group unevenly, which does no harm because gradients
are added up, not averaged (`torchmm.parallel.fsdp`). Rejected: one mesh with a dimension for the
modules, as their sizes differ; and process groups across units, because nothing but the plan's
tensors and a few scalars per step, which go over the whole world, has to cross.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchmm.common.errors import ConfigError
from torchmm.parallel.mesh import PIPELINE, ParallelMesh
from torchmm.recipe.sizes import AXES, MeshSizes, replica_groups


@dataclass(frozen=True)
class UnitMesh(ParallelMesh):
    """The mesh of this rank's module, and its place among all modules.

    `replicate_size`, `shard_size` and `tensor_size` are the module's own; pipeline and
    data-parallel sizes and ranks are those of plans, which cover a replica group.
    """

    module: str
    """Whose stages this rank has."""
    units: Mapping[str, MeshSizes]
    """Of all modules, in the order of their ranks."""

    @cached_property
    def plan_ranks(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """By replica group and rank of the plan: the global ranks that are tensor-parallel."""
        return tuple(_plan_ranks(self.units, g) for g in range(replica_groups(self.units)))

    @cached_property
    def _place(self) -> tuple[int, int]:
        """Replica group and rank of the plan."""
        return next(
            (group, place)
            for group, ranks in enumerate(self.plan_ranks)
            for place, alike in enumerate(ranks)
            if self.rank in alike
        )

    @property
    def pipeline_size(self) -> int:
        """Ranks of a plan: those of all modules in a replica group."""
        return len(self.plan_ranks[0])

    @property
    def pipeline_rank(self) -> int:
        """This rank's in the plan."""
        return self._place[1]

    @property
    def pipeline_ranks(self) -> list[int]:
        """The first global rank of each rank of the plan, of this rank's replica group."""
        return [alike[0] for alike in self.plan_ranks[self._place[0]]]

    @property
    def channel_ranks(self) -> tuple[tuple[int, ...], ...]:
        """All global ranks of each rank of the plan."""
        return self.plan_ranks[self._place[0]]

    @property
    def samples_ranks(self) -> int:
        """Ranks of a replica group."""
        return self.world_size // len(self.plan_ranks)

    @property
    def data_parallel_size(self) -> int:
        """Replica groups, which work on different samples."""
        return len(self.plan_ranks)

    @property
    def data_parallel_rank(self) -> int:
        """This rank's replica group."""
        return self._place[0]

    @property
    def norm_ranks(self) -> dist.ProcessGroup | None:
        """All ranks: what a rank has, only ranks of its own unit share."""
        return dist.group.WORLD

    @property
    def norm_sharing(self) -> int | None:
        """Replicas, shards and tensor-parallel ranks of a stage of the module."""
        return self.mesh.size() // self.mesh[PIPELINE].size()

    @property
    def unit_mesh_sizes(self) -> Mapping[str, MeshSizes] | None:
        """`units`."""
        return self.units

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by module and dimension."""
        return {
            f"{name}.{dimension}": size
            for name, unit in self.units.items()
            for dimension, size in unit._asdict().items()
        }

    def global_rank(self, pipeline: int) -> int:
        """Global rank of the first tensor-parallel rank at a place in the first group's plan."""
        return self.plan_ranks[0][pipeline][0]

    def colocated(
        self, pipeline: int, replicate: int | None = None, tensor: int | None = None
    ) -> ParallelMesh:
        """Not for modules on ranks of their own.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("modules are either colocated or on ranks of their own, not both")


def build_units(units: Mapping[str, MeshSizes], device: torch.device) -> UnitMesh:
    """This rank's unit; collective over the started process group.

    Args:
        units: by module, in the order in which they take ranks.

    Raises:
        ConfigError: the units have another number of ranks together than there are.
    """
    wanted, world_size = sum(unit.ranks for unit in units.values()), dist.get_world_size()
    if wanted != world_size:
        sizes = ", ".join(f"{name} {unit.ranks}" for name, unit in units.items())
        raise ConfigError(f"modules on ranks of their own: {sizes} make {wanted}, not {world_size}")
    found = None
    for name, ranks in _unit_ranks(units).items():
        # All ranks take part in making the groups of all units.
        mesh = DeviceMesh(device.type, ranks, mesh_dim_names=AXES)
        if dist.get_rank() in ranks.flatten().tolist():
            found = UnitMesh(device, mesh, name, dict(units))
    assert found is not None
    return found


def _unit_ranks(units: Mapping[str, MeshSizes]) -> dict[str, torch.Tensor]:
    """Global ranks of every module, by pipeline, replicate, shard and tensor rank."""
    ranks, first = {}, 0
    for name, unit in units.items():
        ranks[name] = torch.arange(first, first + unit.ranks, dtype=torch.int).view(*unit)
        first += unit.ranks
    return ranks


def _plan_ranks(units: Mapping[str, MeshSizes], group: int) -> tuple[tuple[int, ...], ...]:
    groups, found = replica_groups(units), []
    for name, ranks in _unit_ranks(units).items():
        replicas = units[name].data_parallel // groups
        by_replica = ranks.flatten(1, 2).transpose(0, 1)  # data-parallel rank, pipeline, tensor
        own = by_replica[group * replicas : (group + 1) * replicas]
        found += [tuple(alike) for replica in own.tolist() for alike in replica]
    return tuple(found)
