"""Tensor and sequence parallelism of a layered module, from its Hugging Face plan strings.

A plan maps submodule name patterns to the style strings Hugging Face configs use; this file
gives each string its DTensor meaning. Inside an attention or MLP ("scope") the input is
converted to a DTensor once, by a hook, so that the parallel linears that share it (q, k, v;
gate, up) also share one collective in backward instead of one each.

Without sequence parallelism every tensor between scopes is a plain replicated tensor. With it,
the first layer keeps this rank's slice of the sequence (dimension 1), norms and residuals work
on slices, scopes gather on entry and reduce-scatter on exit, and the final norm gathers, so
embedding and head see whole sequences.

Rejected: Hugging Face's own tensor-parallel layers, rewritten between 5.17 and 5.23; DTensor
activations everywhere, which HF forwards mix with plain tensors.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from torchmm.errors import ConfigError
from torchmm.models.layered import LayeredModule

HEADS_DIM = 2
"""Queries and keys are (batch, tokens, heads, head_dim) when q_norm and k_norm see them."""


def apply_tensor_parallel(
    module: LayeredModule, mesh: DeviceMesh, sequence_parallel: bool = False
) -> None:
    """Splits `module` over the 1-D `mesh`, in place; parameters may be on the meta device.

    Raises:
        ConfigError: the attention heads do not divide among the ranks, or a style is unknown.
    """
    size = mesh.size()
    if size == 1:
        return
    _check_heads(module, size)
    plan = module.tensor_parallel_plan()
    trainable = {name: p.requires_grad for name, p in module.named_parameters()}
    styles = {
        pattern: _style(pattern, name, module, size, sequence_parallel)
        for pattern, name in plan.items()
    }
    parallelize_module(module, mesh, {k: v for k, v in styles.items() if v is not None})
    for pattern in module.tensor_parallel_scopes():
        parallelize_module(module, mesh, {pattern: _GatherInput(sequence_parallel)})
    module.tie_parameters()
    for name, parameter in module.named_parameters():  # some styles make trainable copies
        parameter.requires_grad_(trainable[name])
    if sequence_parallel:
        module.layers[0].register_forward_pre_hook(partial(_split_sequence, mesh))


def _check_heads(module: LayeredModule, size: int) -> None:
    problems = [
        f"[parallel] tensor = {size} does not divide the attention heads of {module.name!r} "
        f"(heads={sizes.heads}, kv_heads={sizes.kv_heads}); choose a common divisor"
        for sizes in set(module.describe().layers)
        if sizes.heads % size or (sizes.kv_heads % size and size % sizes.kv_heads)
    ]
    if problems:
        raise ConfigError(problems)


def _style(
    pattern: str, name: str, module: LayeredModule, size: int, sequence_parallel: bool
) -> ParallelStyle | None:
    sizes = module.describe().layers[0]
    if pattern.endswith(("k_proj", "v_proj")) and sizes.kv_heads < size:
        return _ReplicatedKeyValue(sizes.kv_heads, sizes.head_dim)
    between = Shard(1) if sequence_parallel else Replicate()
    styles: dict[str, ParallelStyle | None] = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(output_layouts=between),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "replicated_with_grad_allreduce": SequenceParallel(
            sequence_dim=HEADS_DIM, use_local_output=True
        ),
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "sequence": SequenceParallel(use_local_output=True) if sequence_parallel else None,
        "sequence_gather": _GatherOutput() if sequence_parallel else None,
    }
    if name not in styles:
        raise ConfigError(
            f"tensor parallelism of {module.name!r}: style {name!r} of {pattern!r} is not "
            "supported; set [parallel] tensor = 1"
        )
    return styles[name]


class _GatherInput(ParallelStyle):
    """Makes the first tensor argument a replicated DTensor, gathering it from slices if need be."""

    def __init__(self, sequence_parallel: bool) -> None:
        super().__init__()
        self.layout: Placement = Shard(1) if sequence_parallel else Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def hook(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
            def gather(x: Tensor) -> DTensor:
                # Gradients of the replicated input arrive as partial sums of the ranks' heads;
                # from_local's backward reduces them back to `layout`.
                local = DTensor.from_local(x, device_mesh, [self.layout], run_check=False)
                return local.redistribute(placements=[Replicate()])

            if args:
                return (gather(args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": gather(kwargs["hidden_states"])}

        module.register_forward_pre_hook(hook, with_kwargs=True)
        return module


class _GatherOutput(SequenceParallel):
    """A norm on sequence slices whose output is gathered to the whole sequence."""

    def __init__(self) -> None:
        super().__init__(use_local_output=False)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)

        def gather(_: nn.Module, __: tuple, output: DTensor) -> Tensor:
            return output.redistribute(placements=[Replicate()]).to_local()

        module.register_forward_hook(gather)
        return module


class _ReplicatedKeyValue(ParallelStyle):
    """Key or value projection with fewer heads than ranks: computed whole, one head kept.

    Ranks that share a head hold equal weights; each contributes the gradient of its own query
    heads, and the partial gradients are summed.
    """

    def __init__(self, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.kv_heads = kv_heads
        self.head_dim = head_dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            replicated = distribute_tensor(parameter, device_mesh, [Replicate()])
            module.register_parameter(name, nn.Parameter(replicated, parameter.requires_grad))
        rank_of_head = device_mesh.size() // self.kv_heads
        first = device_mesh.get_local_rank() // rank_of_head * self.head_dim

        def keep_head(_: nn.Module, __: tuple, output: DTensor) -> Tensor:
            whole = output.to_local(grad_placements=[Partial()])
            return whole[..., first : first + self.head_dim]

        module.register_forward_hook(keep_head)
        return module


def _split_sequence(mesh: DeviceMesh, module: nn.Module, args: tuple) -> tuple:
    """Keeps this rank's slice of dimension 1 of the hidden states; backward gathers."""
    hidden = args[0]
    if hidden.shape[1] % mesh.size():
        raise ConfigError(
            f"[parallel] sequence_parallel: {hidden.shape[1]} tokens per microbatch do not divide "
            f"by tensor = {mesh.size()}; change training.sequence_length"
        )
    whole = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
    return (whole.redistribute(placements=[Shard(1)]).to_local(), *args[1:])
