"""Tensor and sequence parallelism of a layered module, from its Hugging Face plan strings.

A plan maps submodule name patterns to the style strings Hugging Face configs use; this file
gives each string its DTensor meaning. Inside an attention or MLP ("scope") the input is
converted to a DTensor once, by a hook, so that the parallel linears that share it (q, k, v;
gate, up) also share one collective in backward instead of one each.

Without sequence parallelism every tensor between scopes is a plain replicated tensor. With it,
the first layer keeps this rank's slice of the sequence (the last dimension but one), norms and
residuals work on slices, scopes gather on entry and reduce-scatter on exit, and the last layer's
output is gathered, so what stands around the layers sees whole sequences. A length that the ranks
do not divide is padded with zeros between the scopes, never inside of them: attention sees only
real positions. Rejected: uneven slices; they may be empty, and collectives then hang (DTensor on
torch 2.13 with gloo).

Rejected: Hugging Face's own tensor-parallel layers, rewritten between 5.17 and 5.23; DTensor
activations everywhere, which HF forwards mix with plain tensors.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
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
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional

from torchmm.errors import ConfigError
from torchmm.models.layered import LayeredModule

SEQUENCE_DIM = -2
"""Hidden states are (batch, tokens, features) or (tokens, features)."""

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
    slices = _SequenceSlices(mesh) if sequence_parallel and "sequence" in plan.values() else None
    for pattern, name in plan.items():
        inside = slices if pattern.startswith(f"{module.layers_fqn}.") else None
        style = _style(pattern, name, module, size, inside)
        for part in module.matching(pattern) if style is not None else ():
            parallelize_module(part, mesh, style)
    for pattern in module.tensor_parallel_scopes():
        inside = slices if pattern.startswith(f"{module.layers_fqn}.") else None
        for part in module.matching(pattern):
            parallelize_module(part, mesh, _GatherInput(inside))
    if slices is not None and module.layers:
        module.layers[0].register_forward_pre_hook(slices.enter)
        module.layers[-1].register_forward_hook(slices.leave)
    module.tie_parameters()
    for name, parameter in module.named_parameters():  # some styles make trainable copies
        parameter.requires_grad_(trainable[name])


def _check_heads(module: LayeredModule, size: int) -> None:
    problems = [
        f"[parallel] tensor = {size} does not divide the attention heads of {module.name!r} "
        f"(heads={sizes.heads}, kv_heads={sizes.kv_heads}); choose a common divisor"
        for sizes in dict.fromkeys(module.layer_sizes())
        if sizes.heads % size or (sizes.kv_heads % size and size % sizes.kv_heads)
    ]
    if problems:
        raise ConfigError(problems)


def _style(
    pattern: str, name: str, module: LayeredModule, size: int, slices: _SequenceSlices | None
) -> ParallelStyle | None:
    sizes = module.layer_sizes()[0]
    if pattern.endswith(("k_proj", "v_proj")) and sizes.kv_heads < size:
        return _ReplicatedKeyValue(sizes.kv_heads, sizes.head_dim)
    styles: dict[str, ParallelStyle | None] = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel() if slices is None else _RowwiseIntoSlices(slices),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "replicated_with_grad_allreduce": SequenceParallel(
            sequence_dim=HEADS_DIM, use_local_output=True
        ),
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "packed_qkv": _PackedQkv(),
        "sequence": None
        if slices is None
        else SequenceParallel(sequence_dim=SEQUENCE_DIM, use_local_output=True),
    }
    if name not in styles:
        raise ConfigError(
            f"tensor parallelism of {module.name!r}: style {name!r} of {pattern!r} is not "
            "supported; set [parallel] tensor = 1"
        )
    return styles[name]


class _SequenceSlices:
    """The layers of one module, between which a rank has its slice of the sequence only.

    Slices are of equal length: the sequence is padded to a multiple of the ranks. Its true length
    is noted on entry.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._length = 0

    def enter(self, _: nn.Module, args: tuple) -> tuple:
        """Pre-hook of the first layer: keeps this rank's slice; backward gathers."""
        self._length = args[0].shape[SEQUENCE_DIM]
        return (self._slice(args[0], Replicate()), *args[1:])

    def reduce(self, _: nn.Module, __: tuple, partial: Tensor) -> Tensor:
        """Hook of a row-wise linear: sums what the ranks computed, of which each keeps a slice."""
        return self._slice(partial, Partial())

    def whole(self, slice_: Tensor) -> DTensor:
        """The slices of all ranks as a replicated DTensor, without padding."""
        sharded = DTensor.from_local(slice_, self._mesh, [Shard(SEQUENCE_DIM)], run_check=False)
        padded = sharded.redistribute(placements=[Replicate()])
        if padded.shape[SEQUENCE_DIM] == self._length:
            return padded
        return padded[..., : self._length, :]  # type: ignore[return-value]

    def leave(self, _: nn.Module, __: tuple, output: Tensor) -> Tensor:
        """Hook of the last layer: gathers."""
        return self.whole(output).to_local()

    def _slice(self, local: Tensor, placement: Placement) -> Tensor:
        padding = -self._length % self._mesh.size()
        padded = functional.pad(local, (0, 0, 0, padding)) if padding else local
        whole = DTensor.from_local(padded, self._mesh, [placement], run_check=False)
        return whole.redistribute(placements=[Shard(padded.ndim + SEQUENCE_DIM)]).to_local()


class _RowwiseIntoSlices(ParallelStyle):
    """A row-wise linear whose summed output is scattered over the sequence."""

    def __init__(self, slices: _SequenceSlices) -> None:
        super().__init__()
        self._slices = slices

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = RowwiseParallel(output_layouts=Partial())._apply(module, device_mesh)
        module.register_forward_hook(self._slices.reduce)
        return module


class _PackedQkv(ParallelStyle):
    """An attention whose `qkv` linear holds queries, keys and values behind each other.

    Every rank computes the rows of its own heads. The weights stay replicated, because no plain
    sharding of their rows gives a rank its heads of all three; their gradients, zero for other
    ranks' rows, are summed.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        attention: Any = module
        qkv, heads, size = attention.qkv, attention.num_heads, device_mesh.size()
        _replicate_parameters(qkv, device_mesh)

        def own_rows(parameter: DTensor) -> Tensor:
            rows = parameter.to_local(grad_placements=[Partial()]).unflatten(0, (3, heads, -1))
            return rows.chunk(size, dim=1)[device_mesh.get_local_rank()].flatten(0, 2)

        def forward(hidden: DTensor) -> Tensor:
            x = hidden.to_local(grad_placements=[Partial()])
            bias = None if qkv.bias is None else own_rows(qkv.bias)
            return functional.linear(x, own_rows(qkv.weight), bias)

        qkv.forward = forward
        attention.num_heads = heads // size
        return module


class _GatherInput(ParallelStyle):
    """Makes the first tensor argument a replicated DTensor, gathering it from slices if need be.

    Gradients of that input arrive as partial sums of the ranks' heads; the conversion's backward
    reduces (and slices) them.
    """

    def __init__(self, slices: _SequenceSlices | None) -> None:
        super().__init__()
        self._slices = slices

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(x: Tensor) -> DTensor:
            if self._slices is not None:
                return self._slices.whole(x)
            return DTensor.from_local(x, device_mesh, [Replicate()], run_check=False)

        def hook(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
            if args:
                return (gather(args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": gather(kwargs["hidden_states"])}

        module.register_forward_pre_hook(hook, with_kwargs=True)
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
        _replicate_parameters(module, device_mesh)
        rank_of_head = device_mesh.size() // self.kv_heads
        first = device_mesh.get_local_rank() // rank_of_head * self.head_dim

        def keep_head(_: nn.Module, __: tuple, output: DTensor) -> Tensor:
            whole = output.to_local(grad_placements=[Partial()])
            return whole[..., first : first + self.head_dim]

        module.register_forward_hook(keep_head)
        return module


def _replicate_parameters(module: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        replicated = distribute_tensor(parameter, mesh, [Replicate()])
        module.register_parameter(name, nn.Parameter(replicated, parameter.requires_grad))
