"""The private parts of torch that pipelining needs, in one place, for torch 2.11 to 2.14.

- `torch.distributed.pipelining._backward`: backward of a stage, whole or split into the gradients
  of its inputs and those of its weights. Up to 2.12 the split may be wrong for a weight that is
  used twice; `supports_weight_split` finds out by trying.
- FSDP2's state: gathering and reducing at moments of our own needs the state to be initialised
  before the first forward, the groups of parameters, and the callback that ends a backward.
- DTensors of tensors that are not on their mesh's device; local tensors without the view that
  `to_local` makes of a parameter.
- Functional collectives and symmetric memory: operators that start a collective and return; a
  custom operator can name a process group by a string only, so it has to be looked up.

- How long members of a group wait for each other, which can be changed once they have met.

Everything else uses public functions. Rejected: torch's `PipelineStage`, which has one number of
microbatches for all stages, shapes that never change, and was rewritten between 2.11 and 2.13.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.utils import get_compilation_metrics
from torch._guards import CompileContext
from torch._inductor import inductor_prims
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import (
    GroupName,
    _resolve_process_group,
    _set_pg_timeout,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining._backward import (
    _get_grad_fn_or_grad_acc,
    stage_backward_input,
)
from torch.distributed.pipelining._backward import stage_backward_weight as _backward_weight
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

__all__ = [
    "COMPILE_ERRORS",
    "accumulate_gradients",
    "clear_forward_order",
    "end_of_reducing",
    "fill_missing_gradients",
    "finish_reducing",
    "fused_gather_matmul",
    "fused_matmul_scatter",
    "fused_multiply_add",
    "group_named",
    "has_dynamic_sizes",
    "high_priority",
    "initialize_fsdp",
    "is_view",
    "local_tensors",
    "placed_like",
    "release_reduced",
    "stage_backward_input",
    "stage_backward_weight",
    "start_all_gather",
    "start_all_reduce",
    "start_copy_engine_gather",
    "start_copy_engine_scatter",
    "start_reduce_scatter",
    "start_reducing",
    "supports_weight_split",
    "wait",
]


COMPILE_ERRORS = (TorchDynamoException, FailOnRecompileLimitHit)
"""Errors of torch.compile itself, raised before the compiled function runs."""


@cache
def supports_weight_split() -> bool:
    """Whether a backward split in two is right also for a weight that is used twice."""
    weight = torch.nn.Parameter(torch.tensor([3.0]))
    x = torch.tensor([2.0], requires_grad=True)
    with torch.enable_grad():
        output = x * weight * weight
    _, groups = stage_backward_input([output], [torch.ones(1)], [x], iter([weight]))
    stage_backward_weight(iter([weight]), groups)
    assert weight.grad is not None
    return weight.grad.item() == 12.0  # d(x w^2)/dw = 2 x w


def stage_backward_weight(
    weights: Iterator[torch.nn.Parameter], groups: list[dict[str, Any]], retain_graph: bool = False
) -> None:
    """torch's function of this name, with the weights of a group in an order all ranks share.

    Adding up gradients of a DTensor may communicate, and torch goes through a set of graph nodes,
    whose order is that of memory addresses: tensor-parallel ranks would mix up a norm's weight and
    bias.
    """
    known = list(weights)
    position = {_get_grad_fn_or_grad_acc(weight): index for index, weight in enumerate(known)}
    for group in groups:
        group["params"] = sorted(group["params"], key=position.__getitem__)
    groups.sort(key=lambda group: position[group["params"][0]])
    _backward_weight(iter(known), groups, retain_graph=retain_graph)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd counts `tensor` as a view, which cannot be detached in place."""
    return tensor._is_view()


def placed_like(local: Tensor, like: DTensor, shape: torch.Size) -> DTensor:
    """A DTensor of this rank's part, where it is: `DTensor.from_local` would move it to the mesh.

    Args:
        like: with the same mesh and placements.
        shape: of the whole.
    """
    stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    meta = TensorMeta(shape, stride, local.dtype)
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def local_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the local tensors of DTensors, and other tensors unchanged."""
    return [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]


def initialize_fsdp(module: FSDPModule) -> None:
    """Makes `module` a root, as its first forward would."""
    module._get_fsdp_state()._lazy_init()


def accumulate_gradients(module: FSDPModule) -> None:
    """Moves gradients in the compute dtype into sums in the dtype of the reduction.

    A backward through FSDP's hooks does so by itself; `stage_backward_weight` bypasses them.
    """
    for group in _groups(module):
        for parameter in group.fsdp_params:
            if parameter.sharded_param.requires_grad:
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()


def fill_missing_gradients(module: FSDPModule) -> None:
    """Gives zeros to gathered parameters without a gradient, so that all ranks reduce alike.

    2.13's `set_reduce_scatter_unused_params` is not used: 2.11 has no such setting, and its zeros
    are in the compute dtype, which a group that has accumulated in another one rejects.
    """
    accumulate_gradients(module)
    for group in _groups(module):
        for parameter in group.fsdp_params:
            whole = parameter.unsharded_param
            if not parameter.sharded_param.requires_grad or whole.grad is not None:
                continue
            if parameter.reduce_dtype in (None, whole.dtype):
                whole.grad = torch.zeros_like(whole)
            elif parameter.unsharded_accumulated_grad is None:
                zeros = torch.zeros_like(whole, dtype=parameter.reduce_dtype)
                parameter.unsharded_accumulated_grad = zeros


def start_reducing(module: FSDPModule) -> list[Any]:
    """Starts the reduction of all groups' gradients: FSDP's own sequence, but the current stream
    waits for none of it.

    FSDP lets each group's reduction wait for the one before, to have one buffer at a time; the
    buffers of all take no more than the gradients did that they come from.

    Returns:
        What to hand to `finish_reducing`.
    """
    communication: Any = module._get_fsdp_state()._comm_ctx
    held: list[Any] = []
    for group in _groups(module):
        group.post_backward()
        # A list since 2.13; before, one state or none.
        if hasattr(communication, "reduce_scatter_states"):
            held += communication.reduce_scatter_states
            communication.reduce_scatter_states.clear()
        else:
            held.append(communication.reduce_scatter_state)
            communication.reduce_scatter_state = None
    return held


def finish_reducing(module: FSDPModule, held: list[Any]) -> None:
    """Lets the current stream wait for all reductions of `start_reducing`; ends the backward."""
    module._get_fsdp_state()._root_post_backward_final_callback()
    held.clear()  # what this stream allocates from here on is written after the reductions


def release_reduced(module: FSDPModule) -> None:
    """Let the current stream wait for reduce-scatters that read buffers, and free the buffers.

    FSDP does so at the end of the last backward, and in other backward passes before a layer is
    reduced. Until then, the buffer of the last unit occupies memory.
    """
    communication: Any = module._get_fsdp_state()._comm_ctx
    # A list since 2.13; before, one state or none.
    held = getattr(communication, "reduce_scatter_states", None)
    if held is None:
        own = communication.reduce_scatter_state
        held = [] if own is None else [own]
        communication.reduce_scatter_state = None
    for state in held:
        if state.event is not None:
            communication.device_handle.current_stream().wait_event(state.event)
    held.clear()


def end_of_reducing(module: FSDPModule) -> torch.cuda.Event | None:
    """On CUDA: when all reductions are complete that were started last; with a time."""
    communication = module._get_fsdp_state()._comm_ctx
    scatters = communication.reduce_scatter_stream
    sums = communication.all_reduce_stream
    if not isinstance(scatters, torch.cuda.Stream):
        return None
    sums.wait_stream(scatters)  # sums over replicas come after, if there are any
    end = torch.cuda.Event(enable_timing=True)
    end.record(sums)
    return end


class CompileEvent(NamedTuple):
    """What torch.compile did at a moment."""

    number: str
    during_us: float
    """By the clock of the day, some time in it."""

    @classmethod
    def current(cls) -> CompileEvent:
        """What it is doing now."""
        return cls(str(CompileContext.current_compile_id()), time.time_ns() / 1e3)

    def figures(self) -> tuple[str, float, bool]:
        """Which guards of other graphs had failed, how many milliseconds it took, whether a cache
        had the code."""
        parts = [  # forward and backward; numbers begin anew where everything is forgotten
            part
            for part in get_compilation_metrics()
            if str(part.compile_id) == self.number and (part.end_time_us or 0) >= self.during_us
        ]
        reason = next((part.recompile_reason for part in parts if part.recompile_reason), "")
        took_ms = sum((part.duration_us or 0) / 1e3 for part in parts)
        hits = sum(part.aotautograd_local_cache_hit_count or 0 for part in parts)
        return reason, took_ms, hits > 0


def has_dynamic_sizes(tensor: Tensor) -> bool:
    """Return True if `torch._dynamo.maybe_mark_dynamic` has marked sizes of this tensor."""
    return hasattr(tensor, "_dynamo_weak_dynamic_indices")


def compiler_named(backend: str) -> Callable[..., Any]:
    """A backend of torch.compile, which gets a graph and example inputs."""
    return lookup_backend(backend)


def fused_multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c, rounded once if it is compiled by inductor and twice otherwise."""
    return inductor_prims.fma(a, b, c)


def usual_code_cache() -> str:
    """Where torch.compile keeps code if nobody has said otherwise."""
    return default_cache_dir()


def clear_forward_order(module: FSDPModule) -> None:
    """Forgets the order of forwards, which otherwise only the end of a backward does."""
    module._get_fsdp_state()._comm_ctx.post_forward_order.clear()
    for group in _groups(module):
        group._post_forward_indices.clear()


def _groups(module: FSDPModule) -> Iterator[Any]:
    """FSDP's groups of parameters in `module`, which must be initialised."""
    for state in module._get_fsdp_state()._state_ctx.all_states:
        # A list since 2.13; before, a state has one group or none.
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        yield from groups


def new_patient_group(timeout: timedelta) -> ProcessGroup:
    """A gloo group of all ranks who wait that long for each other once they have met; until then
    no longer than in the group of all, so that a rank that dies at the start is noticed."""
    device = torch.device("cpu")
    everyone = dist.group.WORLD
    assert everyone is not None
    meeting = timeout
    if "cpu" in dist.get_backend_config():
        meeting = min(timeout, everyone._get_backend(device).options._timeout)
    group = dist.new_group(backend="gloo", timeout=meeting)
    _set_pg_timeout(timeout, group)
    return group


def high_priority(timeout: timedelta) -> Any:
    """Return NCCL options of groups whose kernels are scheduled before others that are ready."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return options


def group_named(name: str) -> ProcessGroup:
    """The process group of that name."""
    return _resolve_process_group(GroupName(name))


def start_all_gather(x_SD: Tensor, group: ProcessGroup) -> Tensor:
    """(ranks x S, D); to be read after `wait` only."""
    operators = torch.ops._c10d_functional
    return operators.all_gather_into_tensor(x_SD, group.size(), group.group_name)


def start_all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum; to be read after `wait` only."""
    return torch.ops._c10d_functional.all_reduce(x, "sum", group.group_name)


def start_reduce_scatter(x_ND: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's (N / ranks, D) of the sum; to be read after `wait` only."""
    operators = torch.ops._c10d_functional
    return operators.reduce_scatter_tensor(x_ND, "sum", group.size(), group.group_name)


def start_copy_engine_gather(x_SD: Tensor, group: ProcessGroup) -> Tensor:
    """`start_all_gather` through symmetric memory: on CUDA, without the multiprocessors.

    No other operation on symmetric memory may be started in this group before `wait`: all use the
    group's one workspace.
    """
    return torch.ops.symm_mem._low_contention_all_gather(x_SD, group.group_name)


def start_copy_engine_scatter(x_ND: Tensor, group: ProcessGroup) -> Tensor:
    """`start_reduce_scatter` through symmetric memory; only the sum takes multiprocessors."""
    return torch.ops.symm_mem._low_contention_reduce_scatter(x_ND, "sum", group.group_name)


def wait(started: Tensor) -> Tensor:
    """The result of one of the operations above, complete."""
    return torch.ops._c10d_functional.wait_tensor(started)


def fused_gather_matmul(
    x_SD: Tensor, matrices: list[Tensor], group: ProcessGroup, keep: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """All ranks' rows, if they are to be kept, and their products with `matrices` (D, F)."""
    fused = torch.ops.symm_mem.fused_all_gather_matmul
    return fused(x_SD, matrices, 0, group.group_name, return_A=keep)


def fused_matmul_scatter(x_NF: Tensor, matrix_FD: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's (N / ranks, D) of the sum over ranks of x @ matrix."""
    fused = torch.ops.symm_mem.fused_matmul_reduce_scatter
    return fused(x_NF, matrix_FD, "sum", 0, group.group_name)
