"""FSDP2 of a multimodal model. Each modality module is a separate root.

With separate roots, encoders and LLM can have different meshes, and plans can choose the order of
their backward passes. Each layer is one communication unit. Embeddings, norms and heads belong to
the unit of the root.

Gradients are summed over the ranks that share a module, not averaged. Each loss is divided by the
number of target tokens of the global batch before the backward pass, so the sum is the gradient. An
average would need a correction factor per module, and torch applies a divide factor twice if the
shard dimension has one rank.

A stage on a single rank has no FSDP2 (`needs_fsdp`). It computes in the same precision with
`torchmm.parallel.precision`.

    no pipeline (`LayerSharding`)    all-gather per layer in each forward and backward pass,
                                     reduce in the last or in each backward pass
    pipeline (`StepSharding`)        all-gather once before all computation,
                                     reduce once after the last backward pass of the stage

In a pipeline, data-parallel replicas run different plans, with different numbers of forward passes
per stage, or none. Automatic collectives of FSDP would differ in number and order between replicas.
The plan therefore defines the position of each reduction (`torchmm.pipelining.plan.reductions`).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard

from torchmm.models.layered import LayeredModule
from torchmm.models.layers.experts import expert_modules
from torchmm.parallel import torch_compat
from torchmm.parallel.precision import MixedPrecision
from torchmm.recipe.mesh_sizes import MeshSizes
from torchmm.recipe.parallel_section import ParallelConfig


def needs_fsdp(sizes: MeshSizes) -> bool:
    """Return True if several ranks share a stage of the module.

    Tensor-parallel ranks are included, because the optimizer and checkpoints require their
    parameters on the mesh of FSDP2.

    Args:
        sizes: Parallelism degrees of the module.
    """
    return sizes.ranks > sizes.pipeline


def apply_fsdp(
    module: LayeredModule,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    reshard_after_forward: bool = True,
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """Shard `module` in place over a 1-D mesh, or over a 2-D mesh (replicate, shard) for HSDP.

    Parameters, gradients and reductions are float32. Computation uses `dtype`. Gradients are summed
    over the ranks of `mesh`.

    Args:
        module: Stage to shard.
        mesh: Mesh of the ranks that share the stage.
        dtype: Compute dtype.
        reshard_after_forward: Whether unsharded layers are freed after each forward pass and
            all-gathered again for the backward pass. Must be False for `StepSharding`.
        expert_mesh: Mesh of the ranks with the same experts, for expert parallelism
            (`torchmm.parallel.expert`). Experts are then separate communication units.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    reshard = None if reshard_after_forward else False  # None: all units except the root
    units = [*module.layers, module]
    if expert_mesh is not None:
        experts = expert_modules(module.layers)
        placement = partial(_expert_placement, expert_mesh)
        for part in experts:  # before layers, whose units contain all remaining parameters
            fully_shard(
                part,
                mesh=expert_mesh,
                mp_policy=policy,
                reshard_after_forward=reshard,
                shard_placement_fn=placement,
            )
        units = [*experts, *units]
    for unit in (*module.layers, module):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    for unit in units:
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # otherwise NCCL multiplies by 1
    for method in module.forward_methods:
        register_fsdp_forward_method(module, method)


def _expert_placement(mesh: DeviceMesh, parameter: nn.Parameter) -> Shard:
    """Return the shard dimension: features if a rank would have less than one expert."""
    assert isinstance(parameter, DTensor)
    shards = mesh.size(-1)
    few = len(parameter.to_local()) < shards
    return Shard(1) if few and parameter.shape[1] % shards == 0 else Shard(0)


class StepSharding:
    """FSDP2 of one stage, with one all-gather and one reduction per unit and step.

    Call `unshard` before the first forward pass of the stage in a step, and `start_reducing` (or
    `reshard` without gradients) after its last action. All data-parallel replicas of a stage must
    call them in the same order relative to their other stages, even if they did not run the stage.
    On CUDA, later work overlaps with the reduction. Gradients are valid after `finish_reducing`.

    Args:
        module: Root of FSDP2 (see `apply_fsdp`). Its memory can still be unallocated.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        assert isinstance(module, FSDPModule), f"{type(module).__name__}: call apply_fsdp first"
        self._root = module
        self._units = _units(module)
        self._prepared = False
        self._pending: list = []
        self._reducing: list | None = None
        """Buffers of a reduction in progress."""

    def unshard(self) -> None:
        """Start all all-gathers. The first forward pass of each unit waits for its all-gather."""
        if not self._prepared:
            self._prepare()
        # Prefetching of FSDP follows the order of forward passes, which depends on the plan.
        handles = (unit.unshard(async_op=True) for unit in self._units)
        self._pending = [handle for handle in handles if handle is not None]

    def accumulate_gradients(self) -> None:
        """Add the gradients of `stage_backward_weight` to the sums of the step."""
        torch_compat.accumulate_gradients(self._root)

    def start_reducing(self) -> torch.cuda.Event | None:
        """Start the gradient reduction over data-parallel ranks, and free unsharded parameters.

        Missing gradients are zeros.

        Returns:
            Event with a time at the end of the reduction, or None without CUDA.
        """
        self._wait()
        # Replicas without a task for this stage must join the reduction.
        torch_compat.fill_missing_gradients(self._root)
        self._set_reducing(True)
        self._reducing = torch_compat.start_reducing(self._root)
        return torch_compat.record_reduction_end(self._root)

    def finish_reducing(self) -> None:
        """Make later work wait for the reduction, if one is in progress."""
        if self._reducing is not None:
            torch_compat.finish_reducing(self._root, self._reducing)
            self._set_reducing(False)
            self._reducing = None

    def reshard(self) -> None:
        """Free the unsharded parameters without a reduction."""
        self._wait()
        for unit in self._units:
            unit.reshard()
        torch_compat.clear_forward_order(self._root)

    def _prepare(self) -> None:
        # Not in the constructor: the FSDP state is final only after parameters have memory.
        torch_compat.initialize_fsdp(self._root)
        self._root.set_reshard_after_forward(False)
        self._set_reducing(False)
        self._prepared = True

    def _set_reducing(self, reducing: bool) -> None:
        self._root.set_is_last_backward(reducing)
        for unit in self._units:
            unit.set_reshard_after_backward(reducing, recurse=False)
            unit.set_requires_gradient_sync(reducing, recurse=False)

    def _wait(self) -> None:
        for handle in self._pending:
            handle.wait()
        self._pending.clear()


class LayerSharding:
    """FSDP2 of a stage that all-gathers and frees its layers in each forward and backward pass.

    Gradients are reduced during backward, in the last backward pass of the step or in each backward
    pass. All data-parallel replicas must run the same forward and backward passes. Only one layer
    is unsharded at a time, and each microbatch all-gathers each layer twice.

    Args:
        module: Root of FSDP2 (see `apply_fsdp`).
        reduces_every_microbatch: Whether each backward pass reduce-scatters its gradients into
            sharded float32 sums. Replicas (HSDP) all-reduce these sums only in the last backward
            pass. If False, float32 sums of unsharded gradients are reduced once, in the last
            backward pass.
    """

    def __init__(self, module: torch.nn.Module, reduces_every_microbatch: bool = False) -> None:
        assert isinstance(module, FSDPModule), f"{type(module).__name__}: call apply_fsdp first"
        self._root = module
        self._units = _units(module)
        self._reduces_each = reduces_every_microbatch
        self._has_buffer = False
        self._backwards = 0

    def begin_step(self, backwards: int) -> None:
        """Set the number of backward passes of the step."""
        self._backwards = backwards
        self._set_last(False)

    def before_forward(self) -> None:
        """Free the buffer of the last reduction, which overlapped with other modules until now."""
        if self._has_buffer:
            torch_compat.free_reduce_buffers(self._root)
            self._has_buffer = False

    def before_backward(self) -> None:
        """Prepare for a backward pass of the step."""
        self._backwards -= 1
        if self._backwards == 0:
            self._set_last(True)
        self._has_buffer = self._reduces_each and self._backwards > 0

    def _set_last(self, is_last: bool) -> None:
        # Other backward passes do not wait for the end of their reductions.
        self._root.set_is_last_backward(is_last)
        for unit in self._units:
            unit.set_requires_gradient_sync(is_last or self._reduces_each, recurse=False)
            unit.set_requires_all_reduce(is_last, recurse=False)


def _units(module: nn.Module) -> list[FSDPModule]:
    """Return the FSDP2 units of a module, so that settings need not iterate over all submodules."""
    return [m for m in module.modules() if isinstance(m, FSDPModule)]


Sharding = StepSharding | LayerSharding | MixedPrecision
"""Sharding of the parameters and gradients of a stage, or mixed precision on one rank."""


def should_reshard_after_forward(parallel: ParallelConfig) -> bool:
    """Return True if FSDP2 frees unsharded parameters after each forward pass.

    This is the default, with two exceptions. In a pipeline, each microbatch would all-gather them
    again. Replicas of disaggregated modules run different tasks.
    """
    if parallel.reshard_after_forward == "default":
        has_pipeline = parallel.pipeline * parallel.mirrors > 1
        return not has_pipeline and parallel.placement != "disaggregated"
    return parallel.reshard_after_forward == "always"
