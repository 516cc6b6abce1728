"""Meshes that all cases of a launch share.

A mesh has four process groups, and a gloo group has three threads in every rank, one of which wakes
100 times per second until the process ends. Sixty cases with separate meshes had 770 threads and
1,000 open files, and ranks spent more time in context switches than in computation.
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
"""Meshes of this rank, which is a separate process."""


def mesh_for(config: ParallelConfig) -> ParallelMesh:
    """Return `build_mesh` of a config, cached by its sizes. The first call is collective."""
    sizes = resolve_sizes(config, dist.get_world_size())
    key = (sizes, config.expert, config.context, config.dynamic_context, config.mirrors)
    if key not in _MESHES:
        _MESHES[key] = build_mesh(config, CPU)
    return _MESHES[key]


def units_for(units: Mapping[str, MeshSizes]) -> ParallelMesh:
    """Return `build_units` of sizes, cached in the same way."""
    key = tuple(units.items())
    if key not in _MESHES:
        _MESHES[key] = build_units(units, CPU)
    return _MESHES[key]
