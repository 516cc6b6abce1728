"""Tensor and sequence parallelism of a layered module, from Hugging Face plan strings.

A plan maps patterns of submodule names to style strings of Hugging Face configs. This module maps
each string to a DTensor style. The input of an attention or MLP (*scope*) becomes a DTensor once,
in a hook. The linears that share the input (q, k, v or gate, up) then share one collective in
backward.

    tensor parallel      residual (all tokens)  -> scope -> all-reduce
    + sequence parallel  residual (slice)       -> all-gather -> scope -> reduce-scatter

Without sequence parallelism, tensors between scopes are plain replicated tensors. With sequence
parallelism, tensors between scopes and between stages are slices of the sequence
(`torchmm.parallel.tensor.sequence`). With `OverlapStyles`, communication overlaps with matmuls.
Plans and parameters do not change, only the forward functions of linears and scopes.

Extensions add implementations of `OverlapStyles` with entries of the table "parallel_styles"
(`torchmm.common.extensions`). The argument of `is_used` is the section `[parallel]`. Targets are
functions with the parameters of `choose_overlap`. Their results are equal on all ranks of the mesh.

Tensor-parallel layers of Hugging Face are not used, because they were rewritten between 5.17 and
5.23. DTensor activations everywhere are not possible, because forward functions mix them with plain
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from torchmm.common.errors import ConfigError
from torchmm.common.extensions import find_entries
from torchmm.common.layers import DeltaSizes, LayerDescription
from torchmm.models.layered import LayeredModule
from torchmm.models.layers.lora import adapted_linears, without_lora
from torchmm.parallel.tensor.collectives import (
    Hook,
    HookedCollectives,
    as_replicated,
    sum_gradients,
)
from torchmm.parallel.tensor.linears import LocalColumn, LocalRow, compute_locally
from torchmm.parallel.tensor.low_rank import shard_lora
from torchmm.parallel.tensor.sequence import (
    LocalNorm,
    OverlapStyles,
    SequenceSlices,
    TensorParallelRows,
    convert_input,
    distribute_parameters,
)
from torchmm.parallel.tensor.styles import (
    ConvolutionChannels,
    DeltaNetHeads,
    LatentHeads,
    PackedGateUp,
    PackedQkv,
    ShardedExperts,
    ShardedExpertsOnly,
    ShardedNorm,
)
from torchmm.recipe.parallel_section import ParallelConfig

_CONTEXT = "encoder_hidden_states"
"""Argument name of the cross-attention context in diffusers."""


def choose_overlap(
    module: LayeredModule,
    mesh: DeviceMesh,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    tokens: int,
) -> OverlapStyles | None:
    """Return the styles with overlap that the recipe uses for a module, or None; collective.

    Args:
        module: Module with sequence parallelism.
        mesh: 1-D mesh of the tensor-parallel ranks.
        parallel: Parallelism of the recipe.
        dtype: Dtype of activations.
        tokens: Tokens of every microbatch, or 0 if the number changes.

    Raises:
        ConfigError: The recipe requires communication that does not work on these devices.
    """
    for entry in find_entries("parallel_styles"):
        if module.supports_comm_overlap and entry.is_used(parallel):
            overlap: OverlapStyles = entry.load()(module, mesh, parallel, dtype, tokens)
            return overlap
    return None


def apply_tensor_parallel(
    module: LayeredModule,
    mesh: DeviceMesh,
    sequence_parallel: bool = False,
    overlap: OverlapStyles | None = None,
    overlap_hook: Hook | None = None,
) -> None:
    """Shard `module` over the 1-D `mesh`, in place. Parameters can be on the meta device.

    Args:
        module: Stage to shard.
        mesh: Mesh of the tensor-parallel ranks.
        sequence_parallel: Whether to use sequence parallelism.
        overlap: Styles of linears in layers with sequence parallelism. If None, communication runs
            before and after matmuls.
        overlap_hook: Hook between the start of each collective of a layer and the wait for it. If
            None, layers wait immediately. Not supported with `overlap`.

    Raises:
        ConfigError: Heads or experts are not divisible by the ranks, or a style is unknown.
    """
    size = mesh.size()
    if size == 1:
        return
    if problems := tensor_problems(module, size, overlap is not None):
        raise ConfigError(problems)
    plan = module.tensor_parallel_plan()
    trainable = {name: p.requires_grad for name, p in module.named_parameters()}
    has_slices = sequence_parallel and module.is_sequence_sharded
    exchange = None if overlap_hook is None else HookedCollectives(mesh.get_group(), overlap_hook)
    slices = SequenceSlices(mesh, overlap, exchange) if has_slices else None
    if sequence_parallel:
        module.rows = TensorParallelRows(mesh)
    with without_lora(module):  # styles support only the parameters of the linear itself
        _apply_styles(module, mesh, plan, slices, exchange)
    for _, linear, lora in adapted_linears(module):
        shard_lora(linear, lora, mesh)
    for pattern in module.tensor_parallel_scopes():
        in_layers = pattern.startswith(f"{module.layers_fqn}.")
        inside = (slices, exchange) if in_layers else (None, None)
        for part in module.matching_submodules(pattern):
            parallelize_module(part, mesh, _scope(*inside))
    if slices is not None:
        slices.attach(module)
    module.tie_parameters()
    for name, parameter in module.named_parameters():  # styles of torch make them trainable
        parameter.requires_grad_(trainable[name])


def _apply_styles(
    module: LayeredModule,
    mesh: DeviceMesh,
    plan: Mapping[str, str],
    slices: SequenceSlices | None,
    exchange: HookedCollectives | None,
) -> None:
    all_sizes = module.layer_sizes()
    sizes = {part: all_sizes[i] for i, layer in module.indexed_layers() for part in layer.modules()}
    for pattern, name in plan.items():
        in_layers = pattern.startswith(f"{module.layers_fqn}.")
        inside = (slices, exchange) if in_layers else (None, None)
        for part in module.matching_submodules(pattern):
            layer_sizes = sizes.get(part, all_sizes[0])
            style = _style(f"{module.name}.{pattern}", name, layer_sizes, mesh.size(), *inside)
            if style is not None:
                parallelize_module(part, mesh, style)


def tensor_problems(module: LayeredModule, size: int, overlaps: bool = False) -> list[str]:
    """Return why a module cannot be sharded over `size` ranks. Needs no process group.

    Args:
        module: Module on the meta device.
        size: Number of tensor-parallel ranks.
        overlaps: Whether communication overlaps with the matmuls of its layers.
    """
    if size == 1:
        return []
    name = module.name
    if not module.supports_tensor_parallel:
        return [
            f"[parallel] tensor = {size}: {name!r} is not a registered model type "
            "(docs/reference/models.md), for which only pipeline parallelism and sharding "
            "are verified; set tensor = 1"
        ]
    styles = module.tensor_parallel_plan().values()
    problems = []
    for sizes in dict.fromkeys(module.layer_sizes()):
        shared = sizes.kv_heads % size and size % sizes.kv_heads
        if sizes.heads % size or shared:
            problems.append(
                f"[parallel] tensor = {size} must divide the attention heads of {name!r} "
                f"(heads={sizes.heads}, kv_heads={sizes.kv_heads}); use a common divisor"
            )
        elif "sharded_norm" in styles and sizes.kv_heads < size:
            problems.append(
                f"[parallel] tensor = {size} is above the {sizes.kv_heads} key and value "
                f"heads of {name!r}, which are normalized together; use a smaller number"
            )
        if isinstance(sizes.mixer, DeltaSizes) and sizes.mixer.key_heads % size:
            problems.append(
                f"[parallel] tensor = {size} must divide the {sizes.mixer.key_heads} key "
                f"heads of the delta nets of {name!r}; use a divisor"
            )
        if sizes.experts % size:
            problems.append(
                f"[parallel] tensor = {size} must divide the {sizes.experts} experts of a "
                f"layer of {name!r}; use a divisor"
            )
        if sizes.experts and overlaps:
            problems.append(
                "[parallel] async_tensor_parallel is not supported for the experts of "
                f"{name!r}; set it to false"
            )
    return list(dict.fromkeys(problems))


def _style(
    pattern: str,
    name: str,
    sizes: LayerDescription,
    size: int,
    slices: SequenceSlices | None,
    exchange: HookedCollectives | None,
) -> ParallelStyle | None:
    """Return the parallel style of a submodule of a layer, or None if it does not change.

    Args:
        pattern: Pattern of the submodule name, prefixed with the module name.
        name: Style in the plan.
        sizes: Sizes of the layer.
        size: Number of tensor-parallel ranks.
        slices: Sequence slices of the module, or None without sequence parallelism.
        exchange: Collectives with a hook, or None.
    """
    overlap = None if slices is None else slices.overlap
    rowwise: ParallelStyle = LocalRow(slices, exchange)
    if slices is not None and slices.overlap is not None:
        rowwise = slices.overlap.row(slices)
    if pattern.endswith(("k_proj", "v_proj")) and sizes.kv_heads < size:
        return _ReplicatedKeyValue(sizes.kv_heads, sizes.head_dim, overlap)
    styles: dict[str, ParallelStyle | None] = {
        "colwise": LocalColumn(overlap),
        "rowwise": rowwise,
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "replicated_with_grad_allreduce": LocalNorm(),
        "embedding": _Embedding(),
        "packed_qkv": PackedQkv(sizes, overlap),
        "packed_gate_up": PackedGateUp(sizes, overlap),
        "sharded_norm": ShardedNorm(),
        "experts": ShardedExperts(slices),
        "delta_net": DeltaNetHeads(overlap),
        "short_convolution": ConvolutionChannels(sizes, overlap),
        "experts_alone": ShardedExpertsOnly(slices),
        "local_heads": _LocalHeads(),
        "head_scores": _HeadScores(),
        "latent_heads": LatentHeads(),
        "sequence": None if slices is None else LocalNorm(),
    }
    if name not in styles:
        module_name, _, pattern = pattern.partition(".")
        raise ConfigError(
            f"tensor parallelism of {module_name!r}: style {name!r} of {pattern!r} is not "
            "supported; set [parallel] tensor = 1"
        )
    return styles[name]


def _scope(slices: SequenceSlices | None, exchange: HookedCollectives | None) -> ParallelStyle:
    """Return the style of a submodule whose input is all-gathered once for its linears."""
    if slices is None or slices.overlap is None:
        return _GatherInput(slices, exchange)
    return slices.overlap.scope(slices)


class _Embedding(ParallelStyle):
    """Embedding whose rows are sharded over the ranks.

    The output is copied, because torch.compile drops the gradient of an input whose collective is
    pending (`AsyncCollectiveTensor`, 2.13).
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        style = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        module = style._apply(module, device_mesh)
        module.register_forward_hook(lambda _, __, output: output.clone())
        return module


class _LocalHeads(ParallelStyle):
    """Attention that reshapes by its number of heads, which becomes the local number of heads.

    The attribute is `num_heads` or, in diffusers, `heads`. `embed_dim` is divided, too, if present.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in ("num_heads", "heads", "embed_dim"):
            if hasattr(module, name):
                setattr(module, name, getattr(module, name) // device_mesh.size())
        return module


class _HeadScores(ParallelStyle):
    """Attention with one sink per head. A rank has the sinks of its heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_parameters(module, device_mesh, sinks=Shard(0))
        return module


class _GatherInput(ParallelStyle):
    """Conversion of the first tensor argument to a replicated DTensor. Slices are all-gathered.

    The gradients of the input are partial sums over the heads of each rank. The backward pass of
    the conversion reduces (and slices) them. The context of a cross attention is converted, too,
    but is never sliced.
    """

    def __init__(self, slices: SequenceSlices | None, exchange: HookedCollectives | None) -> None:
        super().__init__()
        self._slices = slices
        self._exchange = exchange

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(x: Tensor) -> DTensor:
            if self._slices is not None:
                return self._slices.gather_for_scope(x)
            if self._exchange is not None:
                return as_replicated(sum_gradients(x, self._exchange), device_mesh)
            return DTensor.from_local(x, device_mesh, [Replicate()], run_check=False)

        def gather_context(
            _: nn.Module, args: tuple, kwargs: dict[str, Any]
        ) -> tuple[tuple, dict] | None:
            context = kwargs.get(_CONTEXT)
            if context is None:
                return None
            replicated_context = DTensor.from_local(
                context, device_mesh, [Replicate()], run_check=False
            )
            return args, {**kwargs, _CONTEXT: replicated_context}

        # Before the hook of a linear, if the scope is a linear.
        convert_input(module, gather, prepend=True)
        module.register_forward_pre_hook(gather_context, with_kwargs=True)
        return module


class _ReplicatedKeyValue(ParallelStyle):
    """Key or value projection with fewer heads than ranks: fully computed, one head is used.

    Ranks that share a head have equal weights. Each adds the gradient of its local query heads, and
    the partial gradients are summed. With overlap, only the used head is computed.
    """

    def __init__(self, kv_heads: int, head_dim: int, overlap: OverlapStyles | None) -> None:
        super().__init__()
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.overlap = overlap

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        compute_locally(module, device_mesh, Replicate())
        rank_of_head = device_mesh.size() // self.kv_heads
        first = device_mesh.get_local_rank() // rank_of_head * self.head_dim

        def local_rows(parameter: DTensor) -> Tensor:
            rows = parameter.to_local(grad_placements=[Partial()])
            return rows[first : first + self.head_dim]

        def select_head(_: nn.Module, __: tuple, output: Tensor) -> Tensor:
            return output[..., first : first + self.head_dim]

        if self.overlap is not None:
            module.forward = self.overlap.column(module, local_rows)
        else:
            module.register_forward_hook(select_head)
        return module
