"""The device mesh of a run: which ranks hold which part of the model and of the batch.

One mesh with the dimensions (pipeline, replicate, shard, tensor) covers all ranks. Ranks that
differ only in `pipeline` or `tensor` work on the same samples; `replicate` x `shard` together are
the data-parallel ranks. FSDP2 shards over `shard` and, where `replicate` > 1, keeps copies over
`replicate` (HSDP). Groups of shards may share rows of the LLM (`torchmm.parallel.context`); these
ranks work on the same samples, too. `pipeline` is the outermost dimension, because its ranks talk
least: they are the ones to be on different machines. Scalars are summed over the whole world and
divided by the number of ranks that pass the same, which avoids a flattened mesh and its extra
process group.

Modules may have ranks of their own (DistTrain §4.1, §7). Encoders, LLM and generator are then
*units*: consecutive blocks of the world's ranks, each with a mesh of its own, in which FSDP2 and
tensor parallelism work as if it were the whole world. What joins units is the plan of a replica
group (`torchmm.pipelining.schedules.disaggregated`): its ranks are, module by module and replica by
replica, the pipeline ranks of all units; all of them read the same samples.

A unit's replicas divide the microbatches of a group unevenly, which does no harm because gradients
are added up, not averaged (`torchmm.parallel.fsdp`). Rejected: one mesh with a dimension for the
modules, as their sizes differ; and process groups across units, because nothing but the plan's
tensors and a few scalars per step, which go over the whole world, has to cross.
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
from torchmm.common.log import working
from torchmm.parallel import torch_private
from torchmm.parallel.gather import exchange_device
from torchmm.parallel.tensor.collectives import LayerHooks
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.placement_sizes import encoder_mesh_sizes, resolve_sizes
from torchmm.recipe.sizes import AXES, MeshSizes, replica_groups

logger = logging.getLogger("torchmm")
PIPELINE, REPLICATE, SHARD, TENSOR = AXES
EXPERT_SHARD = "expert_shard"
EXPERT = "expert"
CONTEXT_SHARD = "context_shard"
CONTEXT = "context"
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with settings of the CUDA allocator; the second is the older name."""
EXPANDABLE_SEGMENTS = "expandable_segments:True"
STORE_GRACE_S = 5.0
"""So much later than its own time limit torch's store may say that it met nobody."""


@dataclass(frozen=True)
class ModuleMesh:
    """The ranks that have one module, or all modules that are of the same sizes."""

    mesh: DeviceMesh
    """Its dimensions are `AXES`."""
    experts: DeviceMesh | None = None
    """The same ranks with `shard` divided into `EXPERT_SHARD` and `EXPERT`, if groups of them
    divide experts among themselves (`torchmm.parallel.expert`)."""
    contexts: DeviceMesh | None = None
    """The same ranks with `shard` divided into `CONTEXT_SHARD` and `CONTEXT`, if groups of them
    share the LLM's rows (`torchmm.parallel.context`)."""

    def __post_init__(self) -> None:
        # Process groups sort their ranks, a mesh does not: with ranks in any other order, what a
        # DTensor takes for its rows would be those of another rank.
        for dim, name in enumerate(AXES):
            steps = self.mesh.mesh.diff(dim=dim)
            assert (steps > 0).all(), (
                f"ranks along {name} are not in increasing order: {self.mesh.mesh.tolist()}"
            )

    @property
    def sizes(self) -> MeshSizes:
        """Sizes by dimension."""
        return MeshSizes(*self.mesh.shape)

    @property
    def pipeline(self) -> DeviceMesh:
        """1-D mesh of the ranks of this rank's pipeline."""
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
        """1-D mesh of the ranks among which experts are divided; None: they are not."""
        return None if self.experts is None else self.experts[EXPERT]

    @property
    def context(self) -> DeviceMesh | None:
        """1-D mesh of the ranks that share the LLM's rows; None: none do."""
        return None if self.contexts is None else self.contexts[CONTEXT]

    @property
    def expert_fsdp(self) -> DeviceMesh | None:
        """As `fsdp`, of the ranks that have the same experts."""
        if self.experts is None:
            return None
        if self.sizes.replicate > 1:
            return self.experts[REPLICATE, EXPERT_SHARD]
        return self.experts[EXPERT_SHARD]

    def colocated(self, sizes: MeshSizes) -> ModuleMesh:
        """The mesh of a module on the same ranks, with a shorter pipeline or split over fewer ranks
        (Optimus §4.1).

        Blocks of consecutive pipeline ranks have the module each, and so do groups of the
        tensor-parallel ranks; ranks at the same place of their block and group have the same
        stages, and share them like data-parallel ranks. Collective.

        Args:
            sizes: of the module, which fit (`encoder_mesh_sizes`).
        """
        if sizes == self.sizes:
            return self
        # Block, stage, replicate, shard, group, tensor: blocks and groups divide the data like
        # other ranks do. All of them together stay in the order of their ranks, so that shards are
        # next to each other, and copies far apart.
        ranks = self.mesh.mesh.unflatten(0, (-1, sizes.pipeline)).unflatten(-1, (-1, sizes.tensor))
        ranks = ranks.transpose(0, 1).reshape(sizes).contiguous()
        mesh = DeviceMesh(self.mesh.device_type, ranks, mesh_dim_names=AXES)
        return ModuleMesh(mesh)


@dataclass(frozen=True)
class ParallelMesh:
    """All ranks of a run: the mesh of this rank's module, and this rank's place in plans."""

    device: torch.device
    own: ModuleMesh
    """Of this rank's module; without modules on ranks of their own, of all of them."""
    shares: Sequence[Sequence[Sequence[int]]]
    """By share of the global batch and rank of the plan that works on it: global ranks. They are
    tensor-parallel or share rows: what all of them do is one rank's work in the plan."""
    units: Mapping[str, MeshSizes] = field(default_factory=dict)
    """Sizes by module, in the order of their ranks, where modules have ranks of their own."""
    layer_hooks: LayerHooks | None = None
    """Hooks of layers that stop during collectives of the LLM. If None, layers do not stop."""

    @property
    def rank(self) -> int:
        """Global rank."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return dist.get_world_size()

    @cached_property
    def _place(self) -> tuple[int, int]:
        """Share of the batch and rank of the plan."""
        return next(
            (share, place)
            for share, ranks in enumerate(self.shares)
            for place, alike in enumerate(ranks)
            if self.rank in alike
        )

    @property
    def pipeline_size(self) -> int:
        """Ranks of a plan."""
        return len(self.shares[0])

    @property
    def pipeline_rank(self) -> int:
        """Which of these ranks this is: its rank in a plan."""
        return self._place[1]

    @property
    def plan_ranks(self) -> Sequence[Sequence[int]]:
        """By rank of this rank's plan: global ranks."""
        return self.shares[self._place[0]]

    @property
    def mirrors(self) -> int:
        """Ranks of a plan that are one tensor-parallel group: as many as encoders have groups in
        it."""
        alike = len(self.plan_ranks[self.pipeline_rank])
        return self.own.sizes.tensor * self.context_size // alike

    @property
    def context_size(self) -> int:
        """Ranks that share a row of the LLM."""
        return 1 if self.own.context is None else self.own.context.size()

    @property
    def context_rank(self) -> int:
        """Which of these ranks this is."""
        return 0 if self.own.context is None else self.own.context.get_local_rank()

    @property
    def samples_ranks(self) -> int:
        """Ranks that work on the same samples."""
        return sum(len(alike) for alike in self.plan_ranks)

    @property
    def is_first_of_samples(self) -> bool:
        """Whether this rank is the first of them."""
        return self.rank == self.plan_ranks[0][0]

    @property
    def data_parallel_size(self) -> int:
        """Shares of the global batch."""
        return len(self.shares)

    @property
    def data_parallel_rank(self) -> int:
        """The share that this rank works on."""
        return self._place[0]

    @cached_property
    def _sum_groups(self) -> Sequence[dist.ProcessGroup]:
        """Process groups such that sums over each of them in turn are sums over all ranks."""
        if self.units:
            assert dist.group.WORLD is not None
            return [dist.group.WORLD]
        return [self.own.mesh.get_group(a) for a in AXES if self.own.mesh[a].size() > 1]

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sums of `values` over all ranks, bitwise equal on all ranks; collective.

        Values stay on their device, for which the host does not wait. All-gathers are used instead
        of all-reduces, whose order of additions may differ between groups.
        """
        for group in self._sum_groups:
            gathered = values.new_empty(group.size(), values.numel())
            dist.all_gather_into_tensor(gathered, values.reshape(1, -1), group)
            values = gathered.sum(0).view(values.shape)
        return values

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by dimension, or by module and dimension, as a checkpoint records them."""
        if not self.units:
            return {**self.own.sizes._asdict(), CONTEXT: self.context_size}
        return {
            f"{name}.{dimension}": size
            for name, unit in self.units.items()
            for dimension, size in unit._asdict().items()
        }

    def global_rank(self, pipeline: int) -> int:
        """The first global rank at a place in the first share's plan."""
        return self.shares[0][pipeline][0]

    def sum_over_data(self, values: list[float]) -> list[float]:
        """Sums over the data-parallel ranks, in float64; every rank must call it.

        Ranks of one pipeline, like those of one tensor-parallel group, must pass the same values;
        what only one of them has (a loss) the others must have been sent first.
        """
        if self.world_size == 1:
            return list(values)
        totals = torch.tensor(values, dtype=torch.float64, device=exchange_device())
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
    # float32's precision, as products have: TF32 put gradients of sound towers 3e-4 off on an H200.
    torch.backends.cudnn.allow_tf32 = False
    index = int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.cuda.device_count())
    return torch.device("cuda", index)


def use_expandable_segments(device: torch.device, config: ParallelConfig) -> None:
    """Let the CUDA allocator extend its segments, unless the environment configures the allocator.

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


@working("connecting to the other ranks")
def start_process_group(config: ParallelConfig, device: torch.device) -> None:
    """Joins the process group of torchrun's environment; a lone process forms a group of one.

    Raises:
        ConfigError: torchrun would restart ranks, which could not find each other then; the backend
            does not carry tensors of the device.
    """
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        os.environ.setdefault(key, value)
    alone = os.environ["WORLD_SIZE"] == "1"
    backend: str = config.backend
    if not alone and (device.type, backend) in {("cuda", "gloo"), ("cpu", "nccl")}:
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
    _look_for_store(config.timeout_s)
    store = _meeting_place(timeout)
    dist.init_process_group(
        backend,
        timeout=timeout,
        store=store,
        rank=-1 if store is None else int(os.environ["RANK"]),
        world_size=-1 if store is None else int(os.environ["WORLD_SIZE"]),
    )
    if alone:  # nobody else waits for it, at the end of programs that leave it open
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())


def _look_for_store(timeout_s: float) -> None:
    """Nothing, where torch's store is at the address at which ranks meet, or is still to come.

    A client of the store waits without end for what accepts connections and says nothing.

    Raises:
        PeerError: another program has the port.
    """
    environment = os.environ
    if environment["WORLD_SIZE"] == "1" or environment["RANK"] == "0":
        return
    address = environment["MASTER_ADDR"]
    port = int(environment["MASTER_PORT"])

    timeout = timedelta(seconds=timeout_s)
    failures = []

    def look() -> None:
        try:
            dist.TCPStore(address, port, None, False, timeout, wait_for_workers=False)
        except Exception as error:  # raised below, in the main thread
            failures.append(error)

    thread = threading.Thread(target=look, daemon=True)
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


def _meeting_place(timeout: timedelta) -> dist.Store | None:
    """Where ranks leave their addresses; None: where torch does by itself.

    torchrun keeps one store for all attempts: unless told otherwise, restarted ranks would read the
    addresses of those that died. So every attempt gets keys of its own. Their number is only known
    to be the same on all ranks where one torchrun starts all of them: nodes count for themselves.

    Raises:
        ConfigError: several nodes share such a store, and torchrun would restart their ranks.
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
    """Meshes of colocated encoders by name, one for those of the same sizes; none where all modules
    are interleaved. Collective.

    Raises:
        ConfigError: sizes do not fit.
    """
    if config.placement != "colocated":
        return {}
    made: dict[MeshSizes, ModuleMesh] = {}
    found = {}
    for name in encoders:
        sizes = encoder_mesh_sizes(config, name, mesh.own.sizes)
        if sizes not in made:
            made[sizes] = mesh.own.colocated(sizes)
        found[name] = made[sizes]
    return found


def build_mesh(config: ParallelConfig, device: torch.device) -> ParallelMesh:
    """The mesh of `config` over all ranks of the started process group.

    Raises:
        ConfigError: the sizes do not multiply to the number of ranks.
    """
    sizes = resolve_sizes(config, dist.get_world_size())
    layer_hooks = LayerHooks() if config.tp_comm_fraction else None
    options: dict[int | str, Any] = {}
    if layer_hooks is not None and device.type == "cuda":
        # A piece that is launched after the start of a collective must not delay its kernel.
        options[TENSOR] = torch_private.high_priority(timedelta(seconds=config.timeout_s))
    mesh = init_device_mesh(
        device.type, tuple(sizes), mesh_dim_names=AXES, backend_override=options or None
    )
    experts = _divide_shards(mesh, config.expert, (EXPERT_SHARD, EXPERT))
    contexts = _divide_shards(mesh, config.context, (CONTEXT_SHARD, CONTEXT))
    # Groups that share rows are neighbouring shards, so shares follow each other in their ranks.
    ranks = _by_share(mesh.mesh).unflatten(0, (-1, config.context)).transpose(1, 2)
    group_size = config.context * sizes.tensor // config.mirrors
    shares = ranks.reshape(sizes.data_parallel // config.context, -1, group_size)
    own = ModuleMesh(mesh, experts, contexts)
    return ParallelMesh(device, own, shares.tolist(), layer_hooks=layer_hooks)


def _divide_shards(mesh: DeviceMesh, size: int, names: tuple[str, str]) -> DeviceMesh | None:
    """Groups of so many neighbouring shards. Collective if there are any.

    Args:
        names: of the dimension along groups, and of the one within.
    """
    if size == 1:
        return None
    ranks = mesh.mesh.unflatten(AXES.index(SHARD), (-1, size))
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=(PIPELINE, REPLICATE, *names, TENSOR))


def _by_share(ranks: torch.Tensor) -> torch.Tensor:
    """A mesh's ranks by data-parallel, pipeline and tensor rank."""
    return ranks.flatten(1, 2).transpose(0, 1)


def build_units(units: Mapping[str, MeshSizes], device: torch.device) -> ParallelMesh:
    """This rank's unit; collective over the started process group.

    Args:
        units: by module, in the order in which they take ranks.

    Raises:
        ConfigError: the units have another number of ranks together than there are.
    """
    wanted = sum(unit.ranks for unit in units.values())
    world_size = dist.get_world_size()
    if wanted != world_size:
        sizes = ", ".join(f"{name} {unit.ranks}" for name, unit in units.items())
        raise ConfigError(
            f"disaggregated modules: {sizes} require {wanted} ranks, not {world_size}"
        )
    found = None
    for ranks in _unit_ranks(units).values():
        # All ranks take part in making the groups of all units.
        mesh = DeviceMesh(device.type, ranks, mesh_dim_names=AXES)
        if dist.get_rank() in ranks.flatten().tolist():
            found = ModuleMesh(mesh)
    assert found is not None
    # By replica group and rank of its plan: the global ranks that are tensor-parallel.
    groups = replica_groups(units)
    shares: list[list[list[int]]] = [[] for _ in range(groups)]
    for name, ranks in _unit_ranks(units).items():
        by_group = _by_share(ranks).unflatten(0, (groups, units[name].data_parallel // groups))
        for group, own in enumerate(by_group):
            shares[group] += own.flatten(0, 1).tolist()
    return ParallelMesh(device, found, shares, units)


def _unit_ranks(units: Mapping[str, MeshSizes]) -> dict[str, torch.Tensor]:
    """Global ranks of every module, by pipeline, replicate, shard and tensor rank."""
    ranks = {}
    first = 0
    for name, unit in units.items():
        ranks[name] = torch.arange(first, first + unit.ranks, dtype=torch.int).view(*unit)
        first += unit.ranks
    return ranks
