"""Device meshes of a run: the model and data shards of each rank.

One mesh with the dimensions (pipeline, replicate, shard, tensor) covers all ranks. Ranks that
differ only in `pipeline` or `tensor` process the same samples. `replicate` x `shard` are the
data-parallel ranks: FSDP2 shards over `shard`, and all-reduces over `replicate` (HSDP). For
context parallelism, groups of `shard` ranks divide packed sequences, so they also process the same
samples (`torchmm.parallel.context`).

    pipeline = 2, shard = 2, tensor = 2 on two nodes

    node 0   pipeline 0   shard 0:  ranks 0 1     shard 1:  ranks 2 3
    node 1   pipeline 1   shard 0:  ranks 4 5     shard 1:  ranks 6 7

    tensor group {0 1}   FSDP2 group {0 2}   pipeline {0 4}
    samples of data-parallel rank 0: ranks {0 1 4 5}, which execute one plan with 2 plan ranks
    shares = [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]     shares[data-parallel rank][plan rank]

Invariants:

- Ranks increase along each dimension. Process groups sort their ranks, so DTensor shards would
  otherwise be assigned to wrong ranks.
- `pipeline` is the outermost dimension, because it has the least communication. Its ranks can be on
  different nodes. `tensor` is the innermost dimension.
- All ranks of a plan rank execute the same actions. They are tensor-parallel or context-parallel.
- Scalars are summed over all ranks and divided by the number of ranks with equal values. A
  flattened mesh would need an additional process group.

Disaggregated modules (DistTrain, sections 4.1 and 7) have separate ranks. Encoders, LLM and
generator are *units*: consecutive blocks of ranks, each with a separate mesh, in which FSDP2 and
tensor parallelism work as usual. The plan of a replica group connects the units
(`torchmm.pipelining.schedules.disaggregated`). Its plan ranks are the pipeline ranks of all units,
sorted by module and replica. They all read the same samples.

    encoder: shard = 2              LLM: pipeline = 2, shard = 1, tensor = 2
    ranks 0, 1                      ranks 2 3 (stage 0), 4 5 (stage 1)
    one replica group:              shares = [[[0], [1], [2, 3], [4, 5]]]

Replicas of a unit can have different numbers of microbatches, because gradients are summed and not
averaged (`torchmm.parallel.fsdp`). Process groups span several units only for P2P transfers
of the plan and for collectives over all ranks.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchmm.common.errors import ConfigError, PeerError
from torchmm.common.log import report_progress
from torchmm.parallel import torch_compat
from torchmm.parallel.gather import host_collective_device
from torchmm.parallel.tensor.collectives import LayerHooks
from torchmm.recipe.mesh_sizes import AXES, MeshSizes, replica_groups
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.placement_sizes import encoder_mesh_sizes, resolve_sizes

logger = logging.getLogger("torchmm")
PIPELINE, REPLICATE, SHARD, TENSOR = AXES
EXPERT_SHARD = "expert_shard"
EXPERT = "expert"
CONTEXT_SHARD = "context_shard"
CONTEXT = "context"
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with settings of the CUDA allocator. The second is the older name."""
EXPANDABLE_SEGMENTS = "expandable_segments:True"
STORE_GRACE_S = 5.0
"""Additional seconds after which the store of torch must have reported its own timeout."""


@dataclass(frozen=True)
class ModuleMesh:
    """Ranks of one module, or of all modules with the same parallelism degrees."""

    mesh: DeviceMesh
    """Mesh with the dimensions `AXES`."""
    experts: DeviceMesh | None = None
    """The same ranks with `shard` divided into `EXPERT_SHARD` and `EXPERT`. None without expert
    parallelism (`torchmm.parallel.expert`)."""
    contexts: DeviceMesh | None = None
    """The same ranks with `shard` divided into `CONTEXT_SHARD` and `CONTEXT`. None without context
    parallelism (`torchmm.parallel.context`)."""
    context_subgroups: Mapping[int, dist.ProcessGroup] = field(default_factory=dict)
    """Smaller context-parallel groups of this rank, by number of ranks. Empty without
    `parallel.llm.dynamic_context`."""

    def __post_init__(self) -> None:
        # Process groups sort their ranks, but a mesh does not. If ranks are in a different order,
        # DTensors assign shards to the wrong ranks.
        for dim, name in enumerate(AXES):
            steps = self.mesh.mesh.diff(dim=dim)
            assert (steps > 0).all(), (
                f"ranks along {name} are not in increasing order: {self.mesh.mesh.tolist()}"
            )

    @property
    def sizes(self) -> MeshSizes:
        """Parallelism degree of each dimension."""
        return MeshSizes(*self.mesh.shape)

    @property
    def pipeline(self) -> DeviceMesh:
        """1-D mesh of the pipeline of this rank."""
        return self.mesh[PIPELINE]

    @property
    def fsdp(self) -> DeviceMesh:
        """Mesh for `fully_shard`: 1-D, or 2-D (replicate, shard) for HSDP."""
        return self.mesh[REPLICATE, SHARD] if self.sizes.replicate > 1 else self.mesh[SHARD]

    @property
    def tensor(self) -> DeviceMesh:
        """1-D mesh of the tensor-parallel ranks."""
        return self.mesh[TENSOR]

    @property
    def expert(self) -> DeviceMesh | None:
        """1-D mesh of the ranks among which experts are divided, or None."""
        return None if self.experts is None else self.experts[EXPERT]

    @property
    def context(self) -> DeviceMesh | None:
        """1-D mesh of the context-parallel ranks, or None."""
        return None if self.contexts is None else self.contexts[CONTEXT]

    @property
    def expert_fsdp(self) -> DeviceMesh | None:
        """Mesh for `fully_shard` of experts: the ranks with the same experts, or None."""
        if self.experts is None:
            return None
        if self.sizes.replicate > 1:
            return self.experts[REPLICATE, EXPERT_SHARD]
        return self.experts[EXPERT_SHARD]

    def colocated(self, sizes: MeshSizes) -> ModuleMesh:
        """Return the mesh of a module on the same ranks with a smaller pipeline or tensor degree.

        The module is replicated: each block of consecutive pipeline ranks has it, and each group of
        tensor-parallel ranks (Optimus, section 4.1). Ranks with the same index in their block and
        group have the same stage, and are data-parallel ranks. Collective.

        Args:
            sizes: Valid parallelism degrees of the module (`encoder_mesh_sizes`).
        """
        if sizes == self.sizes:
            return self
        # Dimensions: block, stage, replicate, shard, group, tensor. Blocks and groups are
        # additional data-parallel dimensions. Merging them in rank order places shards on adjacent
        # ranks, and replicas on distant ranks.
        ranks = self.mesh.mesh.unflatten(0, (-1, sizes.pipeline)).unflatten(-1, (-1, sizes.tensor))
        ranks = ranks.transpose(0, 1).reshape(sizes).contiguous()
        mesh = DeviceMesh(self.mesh.device_type, ranks, mesh_dim_names=AXES)
        return ModuleMesh(mesh)


@dataclass(frozen=True)
class ParallelMesh:
    """Ranks of a run: the mesh of the module of this rank, and the ranks of plans."""

    device: torch.device
    module_mesh: ModuleMesh
    """Mesh of the module of this rank, or of all modules if they are not disaggregated."""
    global_ranks: Sequence[Sequence[Sequence[int]]]
    """Global ranks, by data-parallel rank (share of the global batch) and plan rank. The ranks of a
    plan rank execute the same actions: they are tensor-parallel or context-parallel."""
    units: Mapping[str, MeshSizes] = field(default_factory=dict)
    """Parallelism degrees of disaggregated modules, in the order of their ranks."""
    layer_hooks: LayerHooks | None = None
    """Hooks of layers that stop during collectives of the LLM. If None, layers do not stop."""

    @property
    def rank(self) -> int:
        """Global rank."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """Number of ranks of the run."""
        return dist.get_world_size()

    @cached_property
    def _position(self) -> tuple[int, int]:
        """(share of the global batch, plan rank) of this rank."""
        return next(
            (share, plan_rank)
            for share, plan_ranks in enumerate(self.global_ranks)
            for plan_rank, ranks in enumerate(plan_ranks)
            if self.rank in ranks
        )

    @property
    def plan_size(self) -> int:
        """Number of ranks of a plan."""
        return len(self.global_ranks[0])

    @property
    def plan_rank(self) -> int:
        """Rank in the plan."""
        return self._position[1]

    @property
    def plan_ranks(self) -> Sequence[Sequence[int]]:
        """Global ranks of the plan of this rank, by plan rank."""
        return self.global_ranks[self._position[0]]

    @property
    def mirror_count(self) -> int:
        """Number of plan ranks that form one tensor-parallel group of the LLM.

        It is the number of tensor-parallel groups that encoders have within this group.
        """
        group_size = len(self.plan_ranks[self.plan_rank])
        return self.module_mesh.sizes.tensor * self.context_size // group_size

    @property
    def context_size(self) -> int:
        """Number of context-parallel ranks."""
        return 1 if self.module_mesh.context is None else self.module_mesh.context.size()

    @property
    def context_rank(self) -> int:
        """Context-parallel rank."""
        return 0 if self.module_mesh.context is None else self.module_mesh.context.get_local_rank()

    @property
    def ranks_per_sample(self) -> int:
        """Number of ranks that process the same samples."""
        return sum(len(ranks) for ranks in self.plan_ranks)

    @property
    def is_first_sample_rank(self) -> bool:
        """True on the first of the ranks that process the same samples."""
        return self.rank == self.plan_ranks[0][0]

    @property
    def data_parallel_size(self) -> int:
        """Number of data-parallel ranks: the number of shares of the global batch."""
        return len(self.global_ranks)

    @property
    def data_parallel_rank(self) -> int:
        """Data-parallel rank: the index of the share of the global batch."""
        return self._position[0]

    @cached_property
    def _sum_groups(self) -> Sequence[dist.ProcessGroup]:
        """Process groups of which a sequence of sums is a sum over all ranks."""
        if self.units:
            assert dist.group.WORLD is not None
            return [dist.group.WORLD]
        return [
            self.module_mesh.mesh.get_group(a) for a in AXES if self.module_mesh.mesh[a].size() > 1
        ]

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sums of `values` over all ranks, bitwise identical on all ranks. Collective.

        Values stay on their device, without a synchronization of the host. All-gathers are used
        because the order of additions in all-reduces can differ between groups.
        """
        for group in self._sum_groups:
            gathered = values.new_empty(group.size(), values.numel())
            dist.all_gather_into_tensor(gathered, values.reshape(1, -1), group)
            values = gathered.sum(0).view(values.shape)
        return values

    @property
    def sizes(self) -> dict[str, int]:
        """Parallelism degrees by dimension, or by module and dimension, for checkpoints."""
        if not self.units:
            return {**self.module_mesh.sizes._asdict(), CONTEXT: self.context_size}
        return {
            f"{name}.{dimension}": size
            for name, unit in self.units.items()
            for dimension, size in unit._asdict().items()
        }

    def first_global_rank(self, pipeline: int) -> int:
        """Return the first global rank of a plan rank, in the plan of data-parallel rank 0."""
        return self.global_ranks[0][pipeline][0]

    def sum_over_data_parallel(self, values: list[float]) -> list[float]:
        """Return sums over the data-parallel ranks, in float64. Collective over all ranks.

        All ranks that process the same samples must pass the same values. Send values of a single
        rank, such as a loss, to the remaining ranks first.
        """
        if self.world_size == 1:
            return list(values)
        totals = torch.tensor(values, dtype=torch.float64, device=host_collective_device())
        dist.all_reduce(totals)
        return (totals / self.ranks_per_sample).tolist()


def select_device(device: str) -> torch.device:
    """Return the device of this process. "auto" selects the CUDA device of the local rank, if any.

    Raises:
        ConfigError: CUDA is requested, but not available.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError('training.device = "cuda": no CUDA device is available; use "auto"')
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    # Matmuls use full float32, too. With TF32, audio encoder gradients were off by 3e-4 on an H200.
    torch.backends.cudnn.allow_tf32 = False
    index = int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.cuda.device_count())
    return torch.device("cuda", index)


def use_expandable_segments(device: torch.device, config: ParallelConfig) -> None:
    """Enable expandable segments of the CUDA allocator, unless the environment configures it.

    Microbatches differ in their numbers of patches. Without expandable segments, freed blocks are
    often too small for the next request, and reserved memory remains unused.

    Call before the first CUDA allocation, because torch reads the variable once. Symmetric memory
    is excluded, as the ranks map allocations of each other.
    """
    if device.type != "cuda":
        return
    for name in ALLOCATOR_VARIABLES:
        if name in os.environ:
            logger.info("CUDA allocator: %s = %s (environment)", name, os.environ[name])
            return
    if config.async_tensor_parallel and config.async_tensor_backend in ("auto", "symmetric_memory"):
        logger.info("CUDA allocator: default settings, because of symmetric memory")
        return
    os.environ[ALLOCATOR_VARIABLES[0]] = EXPANDABLE_SEGMENTS
    logger.info("CUDA allocator: %s = %s", ALLOCATOR_VARIABLES[0], EXPANDABLE_SEGMENTS)


@report_progress("connecting to the other ranks")
def start_process_group(config: ParallelConfig, device: torch.device) -> None:
    """Join the process group of torchrun. Without torchrun, the process is a group of one rank.

    Raises:
        ConfigError: The backend does not support tensors of the device, or torchrun would restart
            ranks that could not connect to each other.
    """
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        os.environ.setdefault(key, value)
    is_single_rank = os.environ["WORLD_SIZE"] == "1"
    backend: str = config.backend
    if not is_single_rank and (device.type, backend) in {("cuda", "gloo"), ("cpu", "nccl")}:
        raise ConfigError(
            f'parallel.backend = "{backend}": does not support tensors on {device.type} '
            'devices; use "auto"'
        )
    if backend == "auto":
        # gloo, alongside NCCL, carries the CPU collectives of checkpoints and health checks.
        backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=config.timeout_s)
    _check_store_connection(config.timeout_s)
    store = _create_store(timeout)
    dist.init_process_group(
        backend,
        timeout=timeout,
        store=store,
        rank=-1 if store is None else int(os.environ["RANK"]),
        world_size=-1 if store is None else int(os.environ["WORLD_SIZE"]),
    )
    if is_single_rank:  # no other rank waits for it if a program exits with an open group
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())


def _check_store_connection(timeout_s: float) -> None:
    """Check that the store of torch is at the rendezvous address, or is not started yet.

    A store client waits without a timeout for a server that accepts connections and does not
    respond.

    Raises:
        PeerError: A different program uses the port.
    """
    environment = os.environ
    if environment["WORLD_SIZE"] == "1" or environment["RANK"] == "0":
        return
    address = environment["MASTER_ADDR"]
    port = int(environment["MASTER_PORT"])

    timeout = timedelta(seconds=timeout_s)
    failures = []

    def connect() -> None:
        try:
            dist.TCPStore(address, port, None, False, timeout, wait_for_workers=False)
        except Exception as error:  # raised below, in the main thread
            failures.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout_s + STORE_GRACE_S)
    if thread.is_alive():
        raise PeerError(
            f"rank {environment['RANK']} did not connect to any rank at {address}:{port}, "
            "where another program accepts connections and does not respond; use another "
            "MASTER_PORT"
        )
    if failures:
        raise failures[0]


def _create_store(timeout: timedelta) -> dist.Store | None:
    """Return the store for the addresses of ranks, or None for the default of torch.

    torchrun has one store for all attempts. By default, restarted ranks would read the addresses of
    exited ranks, so each attempt uses a separate key prefix. The prefix is the restart count, which
    is equal on all ranks only if a single torchrun process starts them: each node counts its own
    restarts.

    Raises:
        ConfigError: Several nodes share such a store, and torchrun would restart their ranks.
    """
    environment = os.environ
    if environment["WORLD_SIZE"] == "1" and "MASTER_ADDR" not in environment:
        return dist.HashStore()
    restarts = int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if not restarts or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    if environment["LOCAL_WORLD_SIZE"] != environment["WORLD_SIZE"]:
        raise ConfigError(
            f"torchrun --max-restarts={restarts} on several nodes would not recover, because "
            "restarted ranks would use the addresses of exited ranks. Start torchrun with "
            "--rdzv-backend=c10d and the environment variable "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or without --max-restarts"
        )
    port = int(environment["MASTER_PORT"])
    shared = dist.TCPStore(environment["MASTER_ADDR"], port, is_master=False, timeout=timeout)
    return dist.PrefixStore(f"attempt-{environment['TORCHELASTIC_RESTART_COUNT']}", shared)


def encoder_meshes(
    config: ParallelConfig, mesh: ParallelMesh, encoders: Iterable[str]
) -> dict[str, ModuleMesh]:
    """Return the meshes of colocated encoders, by name. Collective.

    Encoders with equal parallelism degrees share a mesh. Other placements have no encoder meshes.

    Raises:
        ConfigError: Parallelism degrees of an encoder are invalid.
    """
    if config.placement != "colocated":
        return {}
    mesh_of_sizes: dict[MeshSizes, ModuleMesh] = {}
    meshes = {}
    for name in encoders:
        sizes = encoder_mesh_sizes(config, name, mesh.module_mesh.sizes)
        if sizes not in mesh_of_sizes:
            mesh_of_sizes[sizes] = mesh.module_mesh.colocated(sizes)
        meshes[name] = mesh_of_sizes[sizes]
    return meshes


def build_mesh(config: ParallelConfig, device: torch.device) -> ParallelMesh:
    """Return the mesh of `config` over all ranks of the process group. Collective.

    Raises:
        ConfigError: The product of the parallelism degrees is not the number of ranks.
    """
    sizes = resolve_sizes(config, dist.get_world_size())
    layer_hooks = LayerHooks() if config.tp_comm_fraction else None
    options: dict[int | str, Any] = {}
    if layer_hooks is not None and device.type == "cuda":
        # A kernel that is launched after the start of a collective must not delay the collective.
        options[TENSOR] = torch_compat.high_priority_options(timedelta(seconds=config.timeout_s))
    mesh = init_device_mesh(
        device.type, tuple(sizes), mesh_dim_names=AXES, backend_override=options or None
    )
    experts = _divide_shards(mesh, config.expert, (EXPERT_SHARD, EXPERT))
    contexts = _divide_shards(mesh, config.context, (CONTEXT_SHARD, CONTEXT))
    # Context-parallel ranks are adjacent shards, so shares are in the order of ranks.
    ranks = _by_share(mesh.mesh).unflatten(0, (-1, config.context)).transpose(1, 2)
    group_size = config.context * sizes.tensor // config.mirrors
    shares = ranks.reshape(sizes.data_parallel // config.context, -1, group_size)
    subgroups = _context_subgroups(mesh.mesh, config)
    module_mesh = ModuleMesh(mesh, experts, contexts, subgroups)
    return ParallelMesh(device, module_mesh, shares.tolist(), layer_hooks=layer_hooks)


def _divide_shards(mesh: DeviceMesh, size: int, names: tuple[str, str]) -> DeviceMesh | None:
    """Divide the shard dimension into groups of `size` adjacent shards. Collective if `size` > 1.

    Args:
        mesh: Mesh with the dimensions `AXES`.
        size: Shards per group. If 1, the result is None.
        names: Names of the dimensions across groups and within a group.
    """
    if size == 1:
        return None
    ranks = mesh.mesh.unflatten(AXES.index(SHARD), (-1, size))
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=(PIPELINE, REPLICATE, *names, TENSOR))


def _context_subgroups(ranks: torch.Tensor, config: ParallelConfig) -> dict[int, dist.ProcessGroup]:
    """Return the smaller context-parallel groups of this rank, by number of ranks.

    All ranks create all groups in the same order. The dict is empty without
    `parallel.llm.dynamic_context`.

    Args:
        ranks: Global ranks by pipeline, replicate, shard and tensor rank.
        config: Section [parallel] of the recipe.
    """
    groups = {}
    size = 2
    while config.dynamic_context and size < config.context:
        members = ranks.movedim(AXES.index(SHARD), -1).reshape(-1, size).tolist()
        groups[size], _ = dist.new_subgroups_by_enumeration(members)
        size *= 2
    return groups


def _by_share(ranks: torch.Tensor) -> torch.Tensor:
    """Return the ranks of a mesh by data-parallel, pipeline and tensor rank."""
    return ranks.flatten(1, 2).transpose(0, 1)


def build_units(units: Mapping[str, MeshSizes], device: torch.device) -> ParallelMesh:
    """Build the meshes of disaggregated modules, and return the mesh of this rank. Collective.

    Args:
        units: Parallelism degrees of each module, in the order of their ranks.
        device: Device of this rank.

    Raises:
        ConfigError: The number of ranks of all units is not the world size.
    """
    required = sum(unit.ranks for unit in units.values())
    world_size = dist.get_world_size()
    if required != world_size:
        sizes = ", ".join(f"{name} {unit.ranks}" for name, unit in units.items())
        raise ConfigError(
            f"disaggregated modules: {sizes} require {required} ranks, not {world_size}"
        )
    module_mesh = None
    for ranks in _unit_ranks(units).values():
        # Creating the groups of a unit is collective over all ranks.
        mesh = DeviceMesh(device.type, ranks, mesh_dim_names=AXES)
        if dist.get_rank() in ranks.flatten().tolist():
            module_mesh = ModuleMesh(mesh)
    assert module_mesh is not None
    # Global ranks by replica group and plan rank.
    groups = replica_groups(units)
    shares: list[list[list[int]]] = [[] for _ in range(groups)]
    for name, ranks in _unit_ranks(units).items():
        by_group = _by_share(ranks).unflatten(0, (groups, units[name].data_parallel // groups))
        for group, replicas in enumerate(by_group):
            shares[group] += replicas.flatten(0, 1).tolist()
    return ParallelMesh(device, module_mesh, shares, units)


def _unit_ranks(units: Mapping[str, MeshSizes]) -> dict[str, torch.Tensor]:
    """Return the global ranks of each module, by pipeline, replicate, shard and tensor rank."""
    ranks = {}
    first = 0
    for name, unit in units.items():
        ranks[name] = torch.arange(first, first + unit.ranks, dtype=torch.int).view(*unit)
        first += unit.ranks
    return ranks
