"""FSDP2 of a multimodal model: every modality module is a root of its own.

Separate roots let encoder and LLM run their backward passes one after the other (and later, on
meshes and in orders of their own). Every layer is one communication unit; embeddings, norms and
heads belong to the root's unit.

Gradients are added up over the ranks that share a module, never averaged: every loss is divided by
the targets of the whole global batch before its backward, so the sum is the gradient. Rejected:
FSDP's average, undone by a factor in the losses. Modules with sizes of their own would each need
another factor, and torch applies a given divisor twice where the shard dimension has one rank.

A stage that is on one rank only has no FSDP2 (`needs_fsdp`). It computes in the same precision with
`torchmm.parallel.precision`.

Without a pipeline, FSDP gathers layer by layer and reduces in the last backward of the step or in
every backward (`LayerSharding`). In a pipeline every stage is a root, and data-parallel replicas
run plans of their own, with other numbers of forwards or none at all. FSDP's automatic collectives
would then differ in number and order, so `StepSharding` gathers once before all computation and
reduces once after a stage's last backward, at the turn that the plan says
(`torchmm.pipelining.plan.reductions`). Rejected: gathering per forward (as many collectives as
forwards, which replicas do not agree on), and FSDP's own reductions in a stage's last backward
(which is the last differs between replicas).
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
from torchmm.models.layers.experts import expert_parts
from torchmm.parallel import torch_private
from torchmm.parallel.precision import MixedPrecision
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.sizes import MeshSizes


def needs_fsdp(sizes: MeshSizes) -> bool:
    """Return True if several ranks share a stage of the module.

    Tensor-parallel ranks count, too: the optimizer and checkpoints expect their parameters on the
    mesh of FSDP2.

    Args:
        sizes: parallelism degrees of the module.
    """
    return sizes.ranks > sizes.pipeline


def apply_fsdp(
    module: LayeredModule,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    reshard_after_forward: bool = True,
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """Shards `module` in place over a 1-D mesh, or 2-D (replicate, shard) for HSDP.

    Parameters, gradients and reductions stay float32; computing is done in `dtype`. Gradients are
    summed over the ranks of `mesh`.

    Args:
        reshard_after_forward: whether gathered layers are freed after each forward and gathered
            again for backward; False for stages that `StepSharding` drives.
        expert_mesh: the same of the ranks that have the same experts, if those are divided
            (`torchmm.parallel.expert`): experts are communication units of their own.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    reshard = None if reshard_after_forward else False  # None: all but the root
    units = [*module.layers, module]
    if expert_mesh is not None:
        experts = expert_parts(module.layers)
        placement = partial(_placement_of_experts, expert_mesh)
        for part in experts:  # first: a layer's unit takes what no other has
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
        unit.set_force_sum_reduction_for_comms(True)  # or NCCL would multiply by 1 on its way
    for method in module.forward_methods:
        register_fsdp_forward_method(module, method)


def _placement_of_experts(mesh: DeviceMesh, parameter: nn.Parameter) -> Shard:
    """Over features where a rank would otherwise have less than an expert, if they divide."""
    assert isinstance(parameter, DTensor)
    shards = mesh.size(-1)
    few = len(parameter.to_local()) < shards
    return Shard(1) if few and parameter.shape[1] % shards == 0 else Shard(0)


class StepSharding:
    """Drives the FSDP2 of one stage: one all-gather and one reduction per unit and step.

    `unshard` comes before the step's first forward of the stage and `start_reducing` (or, without
    gradients, `reshard`) after its last action. All data-parallel replicas of a stage must call
    them in the same order among their stages, whether they ran the stage or not. On CUDA what
    comes after runs beside the reduction; gradients may be used after `finish_reducing`.

    Args:
        module: a root of FSDP2 (see `apply_fsdp`), whose memory may still be unallocated.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        assert isinstance(module, FSDPModule), f"{type(module).__name__}: call apply_fsdp first"
        self._root = module
        self._units = _units(module)
        self._prepared = False
        self._pending: list = []
        self._reducing: list | None = None
        """What a reduction that runs has in use."""

    def unshard(self) -> None:
        """Start gathering all parameters. The first forward of each unit waits for its own."""
        if not self._prepared:
            self._prepare()
        # All at once: FSDP's own prefetching follows the order of forwards, which plans choose.
        handles = (unit.unshard(async_op=True) for unit in self._units)
        self._pending = [handle for handle in handles if handle is not None]

    def accumulate_gradients(self) -> None:
        """Adds what `stage_backward_weight` left on the gathered parameters to the step's sums."""
        torch_private.accumulate_gradients(self._root)

    def start_reducing(self) -> torch.cuda.Event | None:
        """Begins to add gradients up over the data-parallel ranks; frees the gathered parameters.

        Parameters that no backward has reached count as zeros.

        Returns:
            On CUDA, an event at the end of it, with a time.
        """
        self._wait()
        # A replica without a task for this stage has to take part in the reduction all the same.
        torch_private.fill_missing_gradients(self._root)
        self._set_reducing(True)
        self._reducing = torch_private.start_reducing(self._root)
        return torch_private.end_of_reducing(self._root)

    def finish_reducing(self) -> None:
        """Lets what comes after wait for the reduction, if there is one."""
        if self._reducing is not None:
            torch_private.finish_reducing(self._root, self._reducing)
            self._set_reducing(False)
            self._reducing = None

    def reshard(self) -> None:
        """Frees the gathered parameters without a reduction."""
        self._wait()
        for unit in self._units:
            unit.reshard()
        torch_private.clear_forward_order(self._root)

    def _prepare(self) -> None:
        # Here and not on construction: FSDP's state settles once parameters have memory.
        torch_private.initialize_fsdp(self._root)
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
    """Lets FSDP2 gather and free the layers of a stage as they run, in forward and backward.

    Gradients are reduced during backward, either in the last backward of the step or in every
    backward. All data-parallel replicas must run the same forwards and backwards. Only one layer is
    gathered at a time, and every microbatch gathers every layer twice.

    Args:
        module: Root of FSDP2 (see `apply_fsdp`).
        reduces_each: Whether every backward reduce-scatters its gradients into sharded float32
            sums. Replicas (HSDP) all-reduce these sums in the last backward only. If False, float32
            sums of unsharded gradients are reduced once, in the last backward.
    """

    def __init__(self, module: torch.nn.Module, reduces_each: bool = False) -> None:
        assert isinstance(module, FSDPModule), f"{type(module).__name__}: call apply_fsdp first"
        self._root = module
        self._units = _units(module)
        self._reduces_each = reduces_each
        self._has_buffer = False
        self._backwards = 0

    def begin_step(self, backwards: int) -> None:
        """Set the number of backward passes of the step."""
        self._backwards = backwards
        self._set_last(False)

    def before_forward(self) -> None:
        """Free the buffer of the last reduction, which overlapped with other modules until now."""
        if self._has_buffer:
            torch_private.release_reduced(self._root)
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
    """Return the FSDP2 units of a module, so that switches need not visit all submodules."""
    return [m for m in module.modules() if isinstance(m, FSDPModule)]


Sharding = StepSharding | LayerSharding | MixedPrecision
"""How the parameters of a stage are gathered and its gradients reduced, or, on one rank, cast."""


def reshards_after_forward(parallel: ParallelConfig) -> bool:
    """Return True if FSDP2 frees gathered parameters after each forward.

    By default it does, except in a pipeline, where every microbatch would gather them again, and
    with disaggregated modules, whose replicas run different tasks.
    """
    if parallel.reshard_after_forward == "default":
        has_pipeline = parallel.pipeline * parallel.mirrors > 1
        return not has_pipeline and parallel.placement != "disaggregated"
    return parallel.reshard_after_forward == "always"
