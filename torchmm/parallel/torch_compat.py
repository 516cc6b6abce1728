"""Private APIs of torch that torchmm uses, for torch 2.11 to 2.14.

- `torch.distributed.pipelining._backward`: full backward pass of a stage, or split into gradients
  of inputs and of weights. Up to 2.12, the split can be wrong for a weight that is used twice, so
  `supports_weight_split` tests it.
- State of FSDP2: collectives at times that the plan chooses need an initialized state before the
  first forward pass, the parameter groups, and the callback at the end of a backward pass.
- DTensors of tensors that are not on the device of their mesh, and local tensors without the view
  that `to_local` creates.
- Functional collectives and symmetric memory: operators that start a collective and return. A
  custom operator can reference a process group only by its name.
- Timeouts of a process group, which can be changed after the group has connected.
- torch.compile: errors, metrics of compilations, cache directory.

All remaining code uses public functions. `PipelineStage` of torch is not used: it needs equal
microbatch counts for all stages and constant shapes, and was rewritten between 2.11 and 2.13.
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
    "dtensor_like",
    "fill_missing_gradients",
    "find_process_group",
    "finish_reducing",
    "free_reduce_buffers",
    "fused_gather_matmul",
    "fused_matmul_scatter",
    "fused_multiply_add",
    "has_dynamic_sizes",
    "high_priority_options",
    "initialize_fsdp",
    "is_view",
    "local_tensors",
    "record_reduction_end",
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
    """Return True if a split backward pass is correct for a weight that is used twice."""
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
    """Run `stage_backward_weight` of torch with the same order of weights on all ranks.

    Accumulating the gradient of a DTensor can communicate. torch iterates over a set of graph
    nodes, in the order of memory addresses. Tensor-parallel ranks could exchange gradients of
    different weights, such as the weight and the bias of a norm.
    """
    ordered = list(weights)
    position = {_get_grad_fn_or_grad_acc(weight): index for index, weight in enumerate(ordered)}
    for group in groups:
        group["params"] = sorted(group["params"], key=position.__getitem__)
    groups.sort(key=lambda group: position[group["params"][0]])
    _backward_weight(iter(ordered), groups, retain_graph=retain_graph)


def is_view(tensor: torch.Tensor) -> bool:
    """Return True if autograd treats `tensor` as a view, which cannot be detached in place."""
    return tensor._is_view()


def dtensor_like(local: Tensor, like: DTensor, shape: torch.Size) -> DTensor:
    """Return a DTensor of a local tensor on its current device.

    `DTensor.from_local` would move the tensor to the device of the mesh.

    Args:
        local: Local shard.
        like: DTensor with the same mesh and placements.
        shape: Shape of the full tensor.
    """
    stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    meta = TensorMeta(shape, stride, local.dtype)
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def local_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the local tensors of DTensors, and other tensors unchanged."""
    return [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]


def initialize_fsdp(module: FSDPModule) -> None:
    """Initialize `module` as an FSDP root, as in its first forward pass."""
    module._get_fsdp_state()._lazy_init()


def accumulate_gradients(module: FSDPModule) -> None:
    """Move gradients in the compute dtype into sums in the reduction dtype.

    Backward hooks of FSDP do this automatically, but `stage_backward_weight` bypasses them.
    """
    for group in _groups(module):
        for parameter in group.fsdp_params:
            if parameter.sharded_param.requires_grad:
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()


def fill_missing_gradients(module: FSDPModule) -> None:
    """Set missing gradients of unsharded parameters to zero, so that all ranks reduce the same.

    `set_reduce_scatter_unused_params` of 2.13 is not used. torch 2.11 does not have it, and its
    zeros have the compute dtype, which a group with sums in a different dtype rejects.
    """
    accumulate_gradients(module)
    for group in _groups(module):
        for parameter in group.fsdp_params:
            unsharded = parameter.unsharded_param
            if not parameter.sharded_param.requires_grad or unsharded.grad is not None:
                continue
            if parameter.reduce_dtype in (None, unsharded.dtype):
                unsharded.grad = torch.zeros_like(unsharded)
            elif parameter.unsharded_accumulated_grad is None:
                zeros = torch.zeros_like(unsharded, dtype=parameter.reduce_dtype)
                parameter.unsharded_accumulated_grad = zeros


def start_reducing(module: FSDPModule) -> list[Any]:
    """Start the gradient reduction of all groups, without blocking the current stream.

    FSDP delays the reduction of each group until the previous one is complete, to have one buffer
    at a time. Here, the buffers use at most the memory of the gradients they come from.

    Returns:
        State for `finish_reducing`.
    """
    communication: Any = module._get_fsdp_state()._comm_ctx
    states: list[Any] = []
    for group in _groups(module):
        group.post_backward()
        # A list since 2.13. Before, one state or None.
        if hasattr(communication, "reduce_scatter_states"):
            states += communication.reduce_scatter_states
            communication.reduce_scatter_states.clear()
        else:
            states.append(communication.reduce_scatter_state)
            communication.reduce_scatter_state = None
    return states


def finish_reducing(module: FSDPModule, states: list[Any]) -> None:
    """Make the current stream wait for the reductions, and end the backward pass."""
    module._get_fsdp_state()._root_post_backward_final_callback()
    states.clear()  # later allocations of this stream are written after the reductions


def free_reduce_buffers(module: FSDPModule) -> None:
    """Make the current stream wait for reduce-scatters, and free their buffers.

    FSDP does this at the end of the last backward pass, and in other backward passes before a layer
    is reduced. Until then, the buffer of the last unit uses memory.
    """
    communication: Any = module._get_fsdp_state()._comm_ctx
    # A list since 2.13. Before, one state or None.
    states = getattr(communication, "reduce_scatter_states", None)
    if states is None:
        state_of_scatter = communication.reduce_scatter_state
        states = [] if state_of_scatter is None else [state_of_scatter]
        communication.reduce_scatter_state = None
    for state in states:
        if state.event is not None:
            communication.device_handle.current_stream().wait_event(state.event)
    states.clear()


def record_reduction_end(module: FSDPModule) -> torch.cuda.Event | None:
    """Return an event with a time at the end of the last reductions, or None without CUDA."""
    communication = module._get_fsdp_state()._comm_ctx
    scatters = communication.reduce_scatter_stream
    sums = communication.all_reduce_stream
    if not isinstance(scatters, torch.cuda.Stream):
        return None
    sums.wait_stream(scatters)  # all-reduces of replicas follow, if any
    end = torch.cuda.Event(enable_timing=True)
    end.record(sums)
    return end


class CompileEvent(NamedTuple):
    """A compilation of torch.compile."""

    number: str
    observed_us: float
    """Wall-clock time during the compilation, in microseconds."""

    @classmethod
    def current(cls) -> CompileEvent:
        """Return the compilation that is in progress."""
        return cls(str(CompileContext.current_compile_id()), time.time_ns() / 1e3)

    def statistics(self) -> tuple[str, float, bool]:
        """Return (failed guards of other graphs, duration in ms, whether a cache had the code)."""
        metrics = [  # forward and backward; a reset of torch.compile restarts the numbers
            metric
            for metric in get_compilation_metrics()
            if str(metric.compile_id) == self.number
            and (metric.end_time_us or 0) >= self.observed_us
        ]
        reason = next(
            (metric.recompile_reason for metric in metrics if metric.recompile_reason), ""
        )
        duration_ms = sum((metric.duration_us or 0) / 1e3 for metric in metrics)
        hits = sum(metric.aotautograd_local_cache_hit_count or 0 for metric in metrics)
        return reason, duration_ms, hits > 0


def has_dynamic_sizes(tensor: Tensor) -> bool:
    """Return True if `torch._dynamo.maybe_mark_dynamic` has marked sizes of this tensor."""
    return hasattr(tensor, "_dynamo_weak_dynamic_indices")


def find_compiler(backend: str) -> Callable[..., Any]:
    """Return a backend of torch.compile: a function of a graph and example inputs."""
    return lookup_backend(backend)


def fused_multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c, rounded once if it is compiled by inductor and twice otherwise."""
    return inductor_prims.fma(a, b, c)


def default_code_cache() -> str:
    """Return the default cache directory of torch.compile."""
    return default_cache_dir()


def clear_forward_order(module: FSDPModule) -> None:
    """Clear the recorded order of forward passes. FSDP clears it only at the end of a backward."""
    module._get_fsdp_state()._comm_ctx.post_forward_order.clear()
    for group in _groups(module):
        group._post_forward_indices.clear()


def _groups(module: FSDPModule) -> Iterator[Any]:
    """Yield the parameter groups of FSDP in `module`, which must be initialized."""
    for state in module._get_fsdp_state()._state_ctx.all_states:
        # A list since 2.13. Before, a state has one group or None.
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        yield from groups


def new_long_timeout_group(timeout: timedelta) -> ProcessGroup:
    """Return a gloo group of all ranks with a timeout that applies after it has connected.

    The timeout for connecting is at most that of the default group, so that a rank that exits
    during the start is detected.
    """
    device = torch.device("cpu")
    world = dist.group.WORLD
    assert world is not None
    connect_timeout = timeout
    if "cpu" in dist.get_backend_config():
        connect_timeout = min(timeout, world._get_backend(device).options._timeout)
    group = dist.new_group(backend="gloo", timeout=connect_timeout)
    _set_pg_timeout(timeout, group)
    return group


def high_priority_options(timeout: timedelta) -> Any:
    """Return NCCL options of groups whose kernels have priority over other ready kernels."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return options


def find_process_group(name: str) -> ProcessGroup:
    """Return the process group with a name."""
    return _resolve_process_group(GroupName(name))


def start_all_gather(x_SD: Tensor, group: ProcessGroup) -> Tensor:
    """Start an all-gather. The result (ranks x S, D) is valid after `wait`."""
    operators = torch.ops._c10d_functional
    return operators.all_gather_into_tensor(x_SD, group.size(), group.group_name)


def start_all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Start an all-reduce. The sum is valid after `wait`."""
    return torch.ops._c10d_functional.all_reduce(x, "sum", group.group_name)


def start_reduce_scatter(x_ND: Tensor, group: ProcessGroup) -> Tensor:
    """Start a reduce-scatter. The local result (N / ranks, D) is valid after `wait`."""
    operators = torch.ops._c10d_functional
    return operators.reduce_scatter_tensor(x_ND, "sum", group.size(), group.group_name)


def start_copy_engine_gather(x_SD: Tensor, group: ProcessGroup) -> Tensor:
    """Start an all-gather in symmetric memory. On CUDA, copy engines run it instead of SMs.

    No other symmetric memory operation of this group may start before `wait`, because all of them
    use the workspace of the group.
    """
    return torch.ops.symm_mem._low_contention_all_gather(x_SD, group.group_name)


def start_copy_engine_scatter(x_ND: Tensor, group: ProcessGroup) -> Tensor:
    """Start a reduce-scatter in symmetric memory. Only the sum uses SMs."""
    return torch.ops.symm_mem._low_contention_reduce_scatter(x_ND, "sum", group.group_name)


def wait(started: Tensor) -> Tensor:
    """Return the complete result of an operation that was started."""
    return torch.ops._c10d_functional.wait_tensor(started)


def fused_gather_matmul(
    x_SD: Tensor, matrices: list[Tensor], group: ProcessGroup, returns_input: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """Return the rows of all ranks, or None, and their matmuls with `matrices` (D, F)."""
    fused = torch.ops.symm_mem.fused_all_gather_matmul
    return fused(x_SD, matrices, 0, group.group_name, return_A=returns_input)


def fused_matmul_scatter(x_NF: Tensor, matrix_FD: Tensor, group: ProcessGroup) -> Tensor:
    """Return the local (N / ranks, D) of the sum over ranks of x @ matrix."""
    fused = torch.ops.symm_mem.fused_matmul_reduce_scatter
    return fused(x_NF, matrix_FD, "sum", 0, group.group_name)
