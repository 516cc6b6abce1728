"""Tensor and sequence parallelism of a layered module, from its Hugging Face plan strings.

A plan maps submodule name patterns to the style strings Hugging Face configs use; this file
gives each string its DTensor meaning. Inside an attention or MLP ("scope") the input is
converted to a DTensor once, by a hook, so that the parallel linears that share it (q, k, v;
gate, up) also share one collective in backward instead of one each.

Without sequence parallelism every tensor between scopes is a plain replicated tensor. With it,
what lies between scopes, and travels between stages, are slices of the sequence
(`torchmm.parallel.tensor.sequence`): scopes gather on entry and reduce-scatter on exit. With
`OverlapStyles`, this communication overlaps with matrix products. Plans and parameters are the same
then, only the forwards of linears and scopes differ.

Extensions add implementations of `OverlapStyles` with entries of the table "parallel_styles"
(`torchmm.common.extensions`). The argument of `is_used` is the section `[parallel]`. Targets are
functions with the parameters of `choose_overlap`; their result is equal on all ranks of the mesh.

Rejected: Hugging Face's own tensor-parallel layers, rewritten between 5.17 and 5.23; DTensor
activations everywhere, which HF forwards mix with plain tensors.
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
from torchmm.parallel.tensor.collectives import Exchange, Hook, replicated, shared
from torchmm.parallel.tensor.linears import LocalColumn, LocalRow, compute_locally
from torchmm.parallel.tensor.low_rank import split_lora
from torchmm.parallel.tensor.sequence import (
    LocalNorm,
    MeshRows,
    OverlapStyles,
    SequenceSlices,
    change_input,
    distribute_parameters,
)
from torchmm.parallel.tensor.styles import (
    ConvolutionChannels,
    DeltaNetHeads,
    ExpertsAlone,
    ExpertsOfRanks,
    LatentHeads,
    PackedGateUp,
    PackedQkv,
    ShardedNorm,
)
from torchmm.recipe.parallel_section import ParallelConfig

_CONTEXT = "encoder_hidden_states"
"""What diffusers calls it."""


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
        if module.overlaps and entry.is_used(parallel):
            overlap: OverlapStyles = entry.load()(module, mesh, parallel, dtype, tokens)
            return overlap
    return None


def apply_tensor_parallel(
    module: LayeredModule,
    mesh: DeviceMesh,
    sequence_parallel: bool = False,
    overlap: OverlapStyles | None = None,
    meanwhile: Hook | None = None,
) -> None:
    """Splits `module` over the 1-D `mesh`, in place; parameters may be on the meta device.

    Args:
        overlap: styles of linears of layers with sequence parallelism; None: communication is
            before and after their products.
        meanwhile: called between the begin of each collective of a layer and the wait for it; None:
            layers wait at once. Not with an `overlap`.

    Raises:
        ConfigError: heads or experts do not divide among the ranks, or a style is unknown.
    """
    size = mesh.size()
    if size == 1:
        return
    if problems := tensor_problems(module, size, overlap is not None):
        raise ConfigError(problems)
    plan = module.tensor_parallel_plan()
    trainable = {name: p.requires_grad for name, p in module.named_parameters()}
    has_slices = sequence_parallel and module.keeps_slices
    exchange = None if meanwhile is None else Exchange(mesh.get_group(), meanwhile)
    slices = SequenceSlices(mesh, overlap, exchange) if has_slices else None
    if sequence_parallel:
        module.rows = MeshRows(mesh)
    with without_lora(module):  # styles know nothing of parameters beside a linear's own
        _apply_styles(module, mesh, plan, slices, exchange)
    for _, linear, lora in adapted_linears(module):
        split_lora(linear, lora, mesh)
    for pattern in module.tensor_parallel_scopes():
        in_layers = pattern.startswith(f"{module.layers_fqn}.")
        inside = (slices, exchange) if in_layers else (None, None)
        for part in module.matching(pattern):
            parallelize_module(part, mesh, _scope(*inside))
    if slices is not None:
        slices.attach(module)
    module.tie_parameters()
    for name, parameter in module.named_parameters():  # some styles make trainable copies
        parameter.requires_grad_(trainable[name])


def _apply_styles(
    module: LayeredModule,
    mesh: DeviceMesh,
    plan: Mapping[str, str],
    slices: SequenceSlices | None,
    exchange: Exchange | None,
) -> None:
    every = module.layer_sizes()
    sizes = {part: every[i] for i, layer in module.indexed_layers() for part in layer.modules()}
    for pattern, name in plan.items():
        in_layers = pattern.startswith(f"{module.layers_fqn}.")
        inside = (slices, exchange) if in_layers else (None, None)
        for part in module.matching(pattern):
            own = sizes.get(part, every[0])
            style = _style(f"{module.name}.{pattern}", name, own, mesh.size(), *inside)
            if style is not None:
                parallelize_module(part, mesh, style)


def tensor_problems(module: LayeredModule, size: int, overlaps: bool = False) -> list[str]:
    """Why a module cannot be split over `size` ranks; needs no process group.

    Args:
        overlaps: whether communication is to go on below the products of its layers.
    """
    if size == 1:
        return []
    name = module.name
    if not module.splits:
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
    exchange: Exchange | None,
) -> ParallelStyle | None:
    """Return the parallel style of a part of a layer, or None if the part stays as it is.

    Args:
        pattern: Pattern of the part's name, with the name of the module before it.
        name: Style in the plan.
        sizes: Sizes of the layer.
        size: Number of tensor-parallel ranks.
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
        "experts": ExpertsOfRanks(slices),
        "delta_net": DeltaNetHeads(overlap),
        "short_convolution": ConvolutionChannels(sizes, overlap),
        "experts_alone": ExpertsAlone(slices),
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


def _scope(slices: SequenceSlices | None, exchange: Exchange | None) -> ParallelStyle:
    """Return the style of a submodule whose input is gathered once for all linears inside."""
    if slices is None or slices.overlap is None:
        return _GatherInput(slices, exchange)
    return slices.overlap.scope(slices)


class _Embedding(ParallelStyle):
    """A table whose rows are divided among the ranks.

    Its output is copied: torch.compile drops the gradient of an input that is still on its way
    (`AsyncCollectiveTensor`, 2.13).
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        style = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        module = style._apply(module, device_mesh)
        module.register_forward_hook(lambda _, __, output: output.clone())
        return module


class _LocalHeads(ParallelStyle):
    """An attention that reshapes by its number of heads (`heads` in diffusers), and by its width if
    it keeps that as `embed_dim`: those of a rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in ("num_heads", "heads", "embed_dim"):
            if hasattr(module, name):
                setattr(module, name, getattr(module, name) // device_mesh.size())
        return module


class _HeadScores(ParallelStyle):
    """An attention with a sink for each head: a rank has those of its heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_parameters(module, device_mesh, sinks=Shard(0))
        return module


class _GatherInput(ParallelStyle):
    """Makes the first tensor argument a replicated DTensor, gathering it from slices if need be.

    Gradients of that input arrive as partial sums of the ranks' heads; the conversion's backward
    reduces (and slices) them. So it is with a cross attention's context, which is never sliced.
    """

    def __init__(self, slices: SequenceSlices | None, exchange: Exchange | None) -> None:
        super().__init__()
        self._slices = slices
        self._exchange = exchange

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(x: Tensor) -> DTensor:
            if self._slices is not None:
                return self._slices.for_scope(x)
            if self._exchange is not None:
                return replicated(shared(x, self._exchange), device_mesh)
            return DTensor.from_local(x, device_mesh, [Replicate()], run_check=False)

        def gather_context(
            _: nn.Module, args: tuple, kwargs: dict[str, Any]
        ) -> tuple[tuple, dict] | None:
            context = kwargs.get(_CONTEXT)
            if context is None:
                return None
            whole = DTensor.from_local(context, device_mesh, [Replicate()], run_check=False)
            return args, {**kwargs, _CONTEXT: whole}

        # In front of a linear's own hook, where the scope is a linear.
        change_input(module, gather, prepend=True)
        module.register_forward_pre_hook(gather_context, with_kwargs=True)
        return module


class _ReplicatedKeyValue(ParallelStyle):
    """Key or value projection with fewer heads than ranks: computed whole, one head kept.

    Ranks that share a head hold equal weights; each contributes the gradient of its own query
    heads, and the partial gradients are summed. With overlap, the kept head alone is computed.
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

        def own_rows(parameter: DTensor) -> Tensor:
            rows = parameter.to_local(grad_placements=[Partial()])
            return rows[first : first + self.head_dim]

        def keep_head(_: nn.Module, __: tuple, whole: Tensor) -> Tensor:
            return whole[..., first : first + self.head_dim]

        if self.overlap is not None:
            module.forward = self.overlap.column(module, own_rows)
        else:
            module.register_forward_hook(keep_head)
        return module
