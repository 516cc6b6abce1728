"""Tensor-parallel styles that torch does not have: packed linears, experts, convolutions, norms.

Packed linears contain several matrices, such as queries, keys and values, or gate and up
projection. Each rank computes its local rows of each matrix:

    packed_qkv, 2 ranks     weight rows    q0 q1 q2 q3 | k0 k1 | v0 v1
                            rank 0         q0 q1       | k0    | v0
                            rank 1               q2 q3 |    k1 |    v1

Weights are replicated, because no sharding of the rows assigns a rank its part of each matrix.
Gradients are zero for the rows of other ranks, and are summed.

Experts: each rank has some complete experts. All ranks have all tokens and the same routing. A rank
computes the tokens of its local experts, and the results are reduced as in a row-wise linear. No
tokens are exchanged. Sharding the matrices of each expert would make small matmuls smaller, and
would need packed gate and up projections to be split.

Norms over sharded features: OLMo 2 normalizes the queries of all heads together. Each rank has the
queries of its local heads. The mean of squares is summed over the ranks, one number per position.
The Hugging Face plan all-gathers queries, keys and values instead, and computes all heads on every
rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from torchmm.common.layers import LayerDescription
from torchmm.models.layers.delta_net import DeltaWeights
from torchmm.models.layers.short_conv import Filters
from torchmm.parallel.tensor.linears import compute_locally, find_multiply
from torchmm.parallel.tensor.low_rank import LOCAL_ROWS
from torchmm.parallel.tensor.sequence import (
    LocalNorm,
    LocalWeights,
    OverlapStyles,
    SequenceSlices,
    distribute_parameters,
)


class _PackedMatrix(NamedTuple):
    """Matrix of a packed linear: `units` groups of `unit_size` rows that are not split."""

    units: int
    unit_size: int

    def local_rows(self, rows: Tensor, ranks: int, rank: int) -> Tensor:
        """Return the rows of a rank. Ranks share units if there are fewer units than ranks."""
        units = rows.unflatten(0, (self.units, self.unit_size))
        if self.units < ranks:
            return units[rank * self.units // ranks]
        return units.chunk(ranks)[rank].flatten(0, 1)


def _local_rows(matrices: list[_PackedMatrix], mesh: DeviceMesh, parameter: DTensor) -> Tensor:
    """Return the local rows of a replicated parameter. Other rows have zero gradients."""
    sizes = [m.units * m.unit_size for m in matrices]
    matrices_rows = parameter.to_local(grad_placements=[Partial()]).split(sizes)
    at = mesh.size(), mesh.get_local_rank()
    return torch.cat(
        [m.local_rows(rows, *at) for m, rows in zip(matrices, matrices_rows, strict=True)]
    )


class PackedLinear(ParallelStyle):
    """Module with a packed linear.

    Args:
        linear: Name of the linear.
        matrices: Matrices of the linear.
        overlap: Styles of linears whose communication overlaps with their matmuls, or None.
    """

    def __init__(
        self, linear: str, matrices: list[_PackedMatrix], overlap: OverlapStyles | None
    ) -> None:
        super().__init__()
        self.linear = linear
        self.matrices = matrices
        self.overlap = overlap

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear: Any = module.get_submodule(self.linear)
        distribute_parameters(linear, device_mesh)
        local_rows = partial(_local_rows, self.matrices, device_mesh)
        setattr(linear, LOCAL_ROWS, local_rows)
        multiply = find_multiply(linear)

        def forward(hidden: DTensor) -> Tensor:
            x = hidden.to_local(grad_placements=[Partial()])
            bias = None if linear.bias is None else local_rows(linear.bias)
            return multiply(x, local_rows(linear.weight), bias)

        if self.overlap is not None:
            forward = self.overlap.column(linear, local_rows)
        linear.forward = forward
        return module


class PackedQkv(PackedLinear):
    """Attention with queries, keys and values in one linear."""

    def __init__(self, sizes: LayerDescription, overlap: OverlapStyles | None) -> None:
        heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
        super().__init__("", [_PackedMatrix(n, sizes.head_dim) for n in heads], overlap)
        self.sizes = sizes

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        attention: Any = module
        self.linear = "qkv" if hasattr(module, "qkv") else "qkv_proj"
        super()._apply(module, device_mesh)
        ranks = device_mesh.size()
        heads = self.sizes.heads // ranks
        if hasattr(module, "num_heads"):
            attention.num_heads = heads
            return module
        attention.num_key_value_heads = max(1, self.sizes.kv_heads // ranks)
        attention.config = copy.copy(attention.config)  # all layers share the config
        attention.config.num_attention_heads = heads
        return module


class PackedGateUp(PackedLinear):
    """MLP with gate and up projection in one linear. In diffusers, the submodule with `proj`."""

    def __init__(self, sizes: LayerDescription, overlap: OverlapStyles | None) -> None:
        super().__init__("gate_up_proj", [_PackedMatrix(sizes.ffn_size, 1)] * 2, overlap)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if hasattr(module, "proj"):
            self.linear = "proj"
        return super()._apply(module, device_mesh)


class DeltaNetHeads(ParallelStyle):
    """Gated delta net: each rank has some key heads, and the value heads that read them.

    Linears that contain only adjacent rows of the heads are column-wise.
    """

    def __init__(self, overlap: OverlapStyles | None) -> None:
        super().__init__()
        self.overlap = overlap

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mixer: Any = module
        key = _PackedMatrix(mixer.num_k_heads, mixer.head_k_dim)
        matrices = [key, key, _PackedMatrix(mixer.num_v_heads, mixer.head_v_dim)]
        if hasattr(mixer, "in_proj_qkv"):
            PackedLinear("in_proj_qkv", matrices, self.overlap)._apply(mixer, device_mesh)
        LocalNorm()._apply(mixer.norm, device_mesh)
        distribute_parameters(mixer.conv1d, device_mesh)
        distribute_parameters(mixer, device_mesh, A_log=Shard(0), dt_bias=Shard(0))

        def local_weights() -> DeltaWeights:
            filters = _local_rows(matrices, device_mesh, mixer.conv1d.weight)
            return DeltaWeights(
                filters.squeeze(1), mixer.A_log.to_local(), mixer.dt_bias.to_local()
            )

        mixer.local_weights = local_weights
        return module


class ConvolutionChannels(PackedLinear):
    """Short convolution between two gates: each rank has some channels of all three."""

    def __init__(self, sizes: LayerDescription, overlap: OverlapStyles | None) -> None:
        self.channels = _PackedMatrix(sizes.hidden_size, 1)
        super().__init__("in_proj", [self.channels] * 3, overlap)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mixer: Any = super()._apply(module, device_mesh)
        distribute_parameters(mixer.conv, device_mesh)
        local_rows = partial(_local_rows, [self.channels], device_mesh)

        def local_weights() -> Filters:
            bias = mixer.conv.bias
            own_bias_C = None if bias is None else local_rows(bias)
            return Filters(local_rows(mixer.conv.weight).squeeze(1), own_bias_C)

        mixer.local_weights = local_weights
        return module


class ShardedExperts(ParallelStyle):
    """MLP with `gate` or `router`, and `experts`. MLPs without experts do not change.

    Shared experts (`shared_expert`, `shared_experts`) are sharded by their inner features.
    `tensor_problems` checks the number of experts.
    """

    def __init__(self, slices: SequenceSlices | None) -> None:
        super().__init__()
        self._slices = slices

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not hasattr(module, "experts"):
            return module
        block: Any = module
        router = block.gate if hasattr(block, "gate") else block.router
        LocalNorm()._apply(router, device_mesh)
        router.balance_share = 1 / device_mesh.size()
        apply_local_experts(block.experts, device_mesh)
        for name in ("shared_expert", "shared_experts"):
            shared = getattr(block, name, None)
            if shared is None:
                continue
            for linear in (shared.gate_proj, shared.up_proj):
                compute_locally(linear, device_mesh, Shard(0))
            compute_locally(shared.down_proj, device_mesh, Shard(1))
        if hasattr(block, "shared_expert_gate"):
            # Multiplied with partial sums, so its gradients are partial sums.
            compute_locally(block.shared_expert_gate, device_mesh, Replicate())
        forward_all: Any = type(block).forward

        def forward(hidden: DTensor) -> Any:
            # Each rank adds the gradients of its local experts.
            out = forward_all(block, hidden.to_local(grad_placements=[Partial()]))
            if isinstance(out, tuple):  # with router scores, which are not used
                return _summed(out[0], device_mesh, self._slices), out[1]
            return _summed(out, device_mesh, self._slices)

        block.forward = forward
        return module


class ShardedExpertsOnly(ParallelStyle):
    """Experts whose layer has the router, such as in Gemma 4.

    Rows and routing weights are replicated, or slices of the sequence, which are all-gathered,
    because routers process slices like norms.
    """

    def __init__(self, slices: SequenceSlices | None) -> None:
        super().__init__()
        self._slices = slices

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        experts: Any = module
        apply_local_experts(experts, device_mesh)
        local_forward: Any = experts.forward

        def gather(x: Tensor) -> Tensor:
            if self._slices is not None:
                replicated = self._slices.gather_replicated(x)
            else:
                replicated = DTensor.from_local(x, device_mesh, [Replicate()], run_check=False)
            # Each rank adds the gradients of its local experts.
            return replicated.to_local(grad_placements=[Partial()])

        def forward(rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            out = local_forward(gather(rows), gather(index), gather(weights))
            return _summed(out, device_mesh, self._slices)

        experts.forward = forward
        return module


def apply_local_experts(experts: Any, mesh: DeviceMesh) -> None:
    """Assign some experts to each rank. Their forward returns partial sums."""
    compute = shard_experts(experts, mesh, has_remote_rows=True)
    local_experts = experts.num_experts // mesh.size()
    first = mesh.get_local_rank() * local_experts

    def forward(rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        index = index - first
        is_remote = (index < 0) | (index >= local_experts)
        index = index.masked_fill(
            is_remote, local_experts
        )  # number of non-local experts in Hugging Face
        return compute(rows, index, weights)

    experts.forward = forward


def shard_experts(
    experts: Any, mesh: DeviceMesh, *, has_remote_rows: bool
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Shard experts over a 1-D mesh, and return a forward for the local experts, numbered from 0.

    Args:
        experts: Module of experts.
        mesh: Mesh of the ranks among which experts are divided.
        has_remote_rows: Whether inputs contain rows for experts of other ranks.
    """
    placements = {name: Shard(0) for name, _ in experts.named_parameters(recurse=False)}
    distribute_parameters(experts, mesh, **placements)
    settings = {k: v for k, v in vars(experts).items() if not k.startswith("_")}
    settings |= dict(experts.named_children())
    settings["num_experts"] = experts.num_experts // mesh.size()
    settings["_is_expert_parallel"] = has_remote_rows
    compute: Any = type(experts).forward

    def compute_local(rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        local = {
            name: cast(DTensor, parameter).to_local()
            for name, parameter in experts.named_parameters(recurse=False)
        }
        return compute(LocalWeights(type(experts), settings, local), rows, index, weights)

    return compute_local


def _summed(out: Tensor, mesh: DeviceMesh, slices: SequenceSlices | None) -> Tensor:
    """Return the sum over ranks, or the local slice of it."""
    if slices is not None:
        return slices.reduce(nn.Identity(), (), out)
    partial = DTensor.from_local(out, mesh, [Partial()], run_check=False)
    return partial.redistribute(placements=[Replicate()]).to_local()


class ShardedNorm(ParallelStyle):
    """Norm after a column-wise linear. Its weight is sharded like the rows of the linear."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        norm: Any = module
        features = norm.weight.numel()
        distribute_parameters(module, device_mesh, weight=Shard(0))

        def forward(x: Tensor) -> Tensor:
            weight = cast(DTensor, norm.weight).to_local()
            assert x.shape[-1] == weight.shape[-1], (
                "not supported; tensor_problems should have rejected this"
            )
            wide = x.float()
            local_squares = wide.square().sum(-1, keepdim=True)
            squares = DTensor.from_local(local_squares, device_mesh, [Partial()], run_check=False)
            total = squares.redistribute(placements=[Replicate()])
            mean = total.to_local(grad_placements=[Partial()]) / features
            return (weight * (wide * torch.rsqrt(mean + norm.variance_epsilon))).to(x.dtype)

        module.forward = forward
        return module


class LatentHeads(ParallelStyle):
    """Latent attention: keys, values and optionally queries are computed from few features."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        submodules = {name: part for name, part in module.named_children() if part is not None}
        for name in ("q_a_proj", "kv_a_proj_with_mqa"):
            if name in submodules:
                compute_locally(submodules[name], device_mesh, Replicate())
        for name in ("q_a_layernorm", "kv_a_layernorm"):
            if name in submodules:
                LocalNorm()._apply(submodules[name], device_mesh)
        for name in ("q_proj", "q_b_proj", "kv_b_proj"):
            if name in submodules:
                compute_locally(submodules[name], device_mesh, Shard(0))
        return module
