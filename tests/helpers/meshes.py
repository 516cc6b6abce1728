"""Meshes that all cases of a launch share.

A mesh is four process groups, and a group of gloo is three threads in every rank, one of which
wakes a hundred times per second for as long as the process lives: sixty cases with meshes of their
own made 770 threads and 1,000 open files, and ranks spent more time switching than computing.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from torchmm.parallel.mesh import ParallelMesh, build_mesh, build_units
from torchmm.recipe.mesh_sizes import MeshSizes
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.placement_sizes import resolve_sizes

CPU = torch.device("cpu")


_MESHES: dict[tuple, ParallelMesh] = {}
"""Of this rank, which is a process of its own."""


def mesh_for(config: ParallelConfig) -> ParallelMesh:
    """`build_mesh`, once for all configurations of the same sizes. Collective the first time."""
    sizes = resolve_sizes(config, dist.get_world_size())
    key = (sizes, config.expert, config.context, config.mirrors)
    if key not in _MESHES:
        _MESHES[key] = build_mesh(config, CPU)
    return _MESHES[key]


def units_for(units: Mapping[str, MeshSizes]) -> ParallelMesh:
    """`build_units`, in the same way."""
    key = tuple(units.items())
    if key not in _MESHES:
        _MESHES[key] = build_units(units, CPU)
    return _MESHES[key]
