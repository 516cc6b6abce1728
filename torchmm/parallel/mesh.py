"""The device mesh of a run: which ranks hold which part of the model and of the batch.

One mesh with the dimensions (pipeline, replicate, shard, tensor) covers all ranks. Ranks that
differ only in `pipeline` or `tensor` work on the same samples; `replicate` x `shard` together are
the data-parallel ranks. FSDP2 shards over `shard` and, where `replicate` > 1, keeps copies over
`replicate` (HSDP). `pipeline` is the outermost dimension, because its ranks talk least: they are
the ones to be on different machines. Scalars are summed over the whole world and divided by the
number of ranks that pass the same, which avoids a flattened mesh and its extra process group.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchmm.common.errors import ConfigError
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.placement_sizes import encoder_mesh_sizes, resolve_sizes
from torchmm.recipe.sizes import AXES, MeshSizes

PIPELINE, REPLICATE, SHARD, TENSOR = AXES


@dataclass(frozen=True)
class ParallelMesh:
    """The mesh and this rank's place in it."""

    device: torch.device
    mesh: DeviceMesh
    """Its dimensions are `AXES`."""
    mirrors: int = field(default=1, kw_only=True)
    """Ranks of a plan that are one tensor-parallel group: as many as encoders have groups in it."""

    def __post_init__(self) -> None:
        # Process groups sort their ranks, a mesh does not: with ranks in any other order, what a
        # DTensor takes for its rows would be those of another rank.
        for dim, name in enumerate(self.mesh.mesh_dim_names or ()):
            steps = self.mesh.mesh.diff(dim=dim)
            assert (steps > 0).all(), f"ranks along {name} do not ascend: {self.mesh.mesh.tolist()}"

    @property
    def rank(self) -> int:
        """Global rank."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return dist.get_world_size()

    @property
    def pipeline_size(self) -> int:
        """Ranks of a plan: those that divide the layers of the model, and their mirrors."""
        return self.mesh[PIPELINE].size() * self.mirrors

    @property
    def pipeline_rank(self) -> int:
        """Which of these ranks this is: its rank in a plan."""
        mirror = self.mesh.get_local_rank(TENSOR) // self.group_size
        return self.mesh.get_local_rank(PIPELINE) * self.mirrors + mirror

    @property
    def group_size(self) -> int:
        """Tensor-parallel ranks that are one rank of a plan."""
        return self.tensor_size // self.mirrors

    @property
    def pipeline(self) -> DeviceMesh:
        """1-D mesh of the ranks of this rank's pipeline."""
        return self.mesh[PIPELINE]

    @property
    def pipeline_ranks(self) -> list[int]:
        """Global ranks of this rank's pipeline, by their rank in a plan."""
        place = self.mesh.get_local_rank(TENSOR) % self.group_size
        return [alike[place] for alike in self.plan_groups]

    @property
    def plan_groups(self) -> list[list[int]]:
        """By rank of the plan: the global ranks that are tensor-parallel."""
        replicate, shard = (self.mesh.get_local_rank(n) for n in (REPLICATE, SHARD))
        return self.mesh.mesh[:, replicate, shard].reshape(-1, self.group_size).tolist()

    @property
    def channel_ranks(self) -> Sequence[int | Sequence[int]]:
        """Between which global ranks tensors are sent, as `P2PChannels` takes them."""
        return self.pipeline_ranks

    @property
    def samples_ranks(self) -> int:
        """Ranks that work on the same samples."""
        return self.pipeline_size * self.group_size

    @property
    def replicate_size(self) -> int:
        """Copies of the sharded model."""
        return self.mesh[REPLICATE].size()

    @property
    def shard_size(self) -> int:
        """Ranks over which FSDP2 shards."""
        return self.mesh[SHARD].size()

    @property
    def tensor_size(self) -> int:
        """Tensor-parallel ranks."""
        return self.mesh[TENSOR].size()

    @property
    def data_parallel_size(self) -> int:
        """Ranks that work on different samples."""
        return self.replicate_size * self.shard_size

    @property
    def data_parallel_rank(self) -> int:
        """Which of the data-parallel shares of the batch this rank works on."""
        replicate = self.mesh.get_local_rank(REPLICATE)
        return replicate * self.shard_size + self.mesh.get_local_rank(SHARD)

    @property
    def norm_ranks(self) -> dist.ProcessGroup | None:
        """The ranks over which squares of gradients are added up; None: this rank has them all."""
        pipeline = self.mesh[PIPELINE]
        return pipeline.get_group() if pipeline.size() > 1 else None

    @property
    def norm_sharing(self) -> int | None:
        """How many of them have the same parameters; None: the ranks of a parameter's own mesh."""
        return None

    @property
    def unit_mesh_sizes(self) -> Mapping[str, MeshSizes] | None:
        """Sizes by module, where modules have ranks of their own."""
        return None

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by dimension, as a checkpoint records them."""
        return {name: self.mesh[name].size() for name in AXES}

    @property
    def fsdp(self) -> DeviceMesh:
        """Mesh for `fully_shard`: 1-D, or 2-D (replicate, shard) for HSDP."""
        return self.mesh[REPLICATE, SHARD] if self.replicate_size > 1 else self.mesh[SHARD]

    @property
    def tensor(self) -> DeviceMesh:
        """1-D mesh of the tensor-parallel ranks."""
        return self.mesh[TENSOR]

    def global_rank(self, pipeline: int) -> int:
        """Global rank of the first data- and tensor-parallel rank at a place in the pipeline."""
        place, mirror = divmod(pipeline, self.mirrors)
        return int(self.mesh.mesh[place, 0, 0, mirror * self.group_size])

    def colocated(
        self, pipeline: int, replicate: int | None = None, tensor: int | None = None
    ) -> ParallelMesh:
        """The mesh of a module on the same ranks, with a shorter pipeline or split over fewer ranks
        (Optimus §4.1).

        Blocks of consecutive pipeline ranks have the module each, and so do groups of the
        tensor-parallel ranks; ranks at the same place of their block and group have the same
        stages, and share them like data-parallel ranks. Collective.

        Args:
            replicate: copies of the sharded module; None: as many as here.
            tensor: tensor-parallel size; None: as here.

        Raises:
            ConfigError: the sizes are no divisors.
        """
        copies = self.replicate_size if replicate is None else replicate
        split = self.tensor_size if tensor is None else tensor
        stages = self.mesh[PIPELINE].size()
        if pipeline < 1 or stages % pipeline or split < 1 or self.tensor_size % split:
            raise ConfigError(
                f"a module with pipeline = {pipeline} and tensor = {split} on the ranks of one of "
                f"{stages} and {self.tensor_size}; give divisors"
            )
        groups = self.tensor_size // split
        data = self.data_parallel_size * (stages // pipeline) * groups
        if copies < 1 or data % copies:
            raise ConfigError(
                f"a module with replicate = {copies} on {data} data-parallel ranks; give a divisor"
            )
        if (pipeline, copies, split) == (stages, self.replicate_size, self.tensor_size):
            return self
        # Block, stage, replicate, shard, group, tensor: blocks and groups divide the data like
        # other ranks do. All of them together stay in the order of their ranks, so that shards are
        # next to each other, and copies far apart.
        ranks = self.mesh.mesh.unflatten(0, (-1, pipeline)).unflatten(-1, (groups, split))
        ranks = ranks.transpose(0, 1).reshape(pipeline, copies, data // copies, split)
        mesh = DeviceMesh(self.device.type, ranks.contiguous(), mesh_dim_names=AXES)
        return ParallelMesh(self.device, mesh)

    def sum_over_data(self, values: list[float]) -> list[float]:
        """Sums over the data-parallel ranks, in float64; every rank must call it.

        Ranks of one pipeline, like those of one tensor-parallel group, must pass the same values;
        what only one of them has (a loss) the others must have been sent first.
        """
        if self.world_size == 1:
            return list(values)
        totals = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(totals)
        return (totals / self.samples_ranks).tolist()


def select_device(device: str) -> torch.device:
    """The device of this process: "auto" takes CUDA where there is a device, one per local rank.

    Raises:
        ConfigError: CUDA is asked for and there is none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError('training.device = "cuda": no CUDA device is available; use "auto"')
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.cuda.device_count())
    return torch.device("cuda", index)


def start_process_group(config: ParallelConfig, device: torch.device) -> None:
    """Joins the process group of torchrun's environment; a lone process forms a group of one."""
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        os.environ.setdefault(key, value)
    backend: str = config.backend
    if backend == "auto":
        # gloo, alongside NCCL, carries the CPU collectives of checkpoints and health checks.
        backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    alone = os.environ["WORLD_SIZE"] == "1" and "MASTER_ADDR" not in os.environ
    dist.init_process_group(
        backend,
        timeout=timedelta(seconds=config.timeout_s),
        store=dist.HashStore() if alone else None,
        rank=int(os.environ["RANK"]) if alone else -1,
        world_size=1 if alone else -1,
    )


def encoder_meshes(
    config: ParallelConfig, mesh: ParallelMesh, encoders: Iterable[str]
) -> dict[str, ParallelMesh]:
    """Meshes of colocated encoders by name, one for those of the same sizes; none where all modules
    are interleaved. Collective.

    Raises:
        ConfigError: sizes do not fit.
    """
    if config.placement != "colocated":
        return {}
    llm = resolve_sizes(config, mesh.world_size)
    made: dict[tuple[int, int, int], ParallelMesh] = {}
    found = {}
    for name in encoders:
        own = encoder_mesh_sizes(config, name, llm)
        key = (own.pipeline, own.replicate, own.tensor)
        made[key] = found[name] = made.get(key) or mesh.colocated(*key)
    return found


def build_mesh(config: ParallelConfig, device: torch.device) -> ParallelMesh:
    """The mesh of `config` over all ranks of the started process group.

    Raises:
        ConfigError: the sizes do not multiply to the number of ranks.
    """
    sizes = resolve_sizes(config, dist.get_world_size())
    mesh = init_device_mesh(device.type, tuple(sizes), mesh_dim_names=AXES)
    return ParallelMesh(device, mesh, mirrors=config.mirrors)
