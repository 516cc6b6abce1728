"""What PyTorch has no tensor-parallel style for: packed linears, experts, convolutions, norms.

Linears that hold several matrices one after the other: queries, keys and values in one linear, or a
gate and what it is for: every rank computes its own rows of each. The weights stay replicated,
because no plain sharding of their rows gives a rank its part of all of them; their gradients, zero
for other ranks' rows, are summed.

Experts: each rank has some of the experts whole. All ranks see all tokens and route them alike; a
rank computes what goes to its own experts, and the results are summed like those of a row-wise
linear. No tokens are exchanged. Rejected: splitting every expert's matrices, which makes small
products smaller, and needs gate and up projection, which follow each other, cut apart.

Norms over features that are divided among ranks: OLMo 2 normalizes the queries of all heads
together. Each rank has those of its own heads; the mean of squares is summed over the ranks, one
number per position, and the rest stays local. Rejected: Hugging Face's plan, which gathers queries,
keys and values and attends with all heads on every rank.
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
from torchmm.parallel.tensor.linears import compute_locally, multiply_of
from torchmm.parallel.tensor.low_rank import OWN_ROWS
from torchmm.parallel.tensor.sequence import (
    LocalNorm,
    LocalWeights,
    OverlapStyles,
    SequenceSlices,
    distribute_parameters,
)


class _Rows(NamedTuple):
    """One of the matrices in a linear: `units` equal groups of rows that stay together."""

    units: int
    unit_size: int

    def own(self, rows: Tensor, ranks: int, rank: int) -> Tensor:
        """A rank's part; ranks share units where there are fewer of them."""
        units = rows.unflatten(0, (self.units, self.unit_size))
        if self.units < ranks:
            return units[rank * self.units // ranks]
        return units.chunk(ranks)[rank].flatten(0, 1)


def _own_rows(matrices: list[_Rows], mesh: DeviceMesh, parameter: DTensor) -> Tensor:
    """A rank's rows of a replicated parameter; other ranks' get zero as their gradient."""
    sizes = [m.units * m.unit_size for m in matrices]
    every = parameter.to_local(grad_placements=[Partial()]).split(sizes)
    at = mesh.size(), mesh.get_local_rank()
    return torch.cat([m.own(rows, *at) for m, rows in zip(matrices, every, strict=True)])


class PackedLinear(ParallelStyle):
    """A module one of whose linears holds several matrices.

    Args:
        linear: the linear's name.
        matrices: what it holds.
        overlap: Styles of linears whose communication overlaps with their products, or None.
    """

    def __init__(self, linear: str, matrices: list[_Rows], overlap: OverlapStyles | None) -> None:
        super().__init__()
        self.linear = linear
        self.matrices = matrices
        self.overlap = overlap

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear: Any = module.get_submodule(self.linear)
        distribute_parameters(linear, device_mesh)
        own_rows = partial(_own_rows, self.matrices, device_mesh)
        setattr(linear, OWN_ROWS, own_rows)
        multiply = multiply_of(linear)

        def forward(hidden: DTensor) -> Tensor:
            x = hidden.to_local(grad_placements=[Partial()])
            bias = None if linear.bias is None else own_rows(linear.bias)
            return multiply(x, own_rows(linear.weight), bias)

        if self.overlap is not None:
            forward = self.overlap.column(linear, own_rows)
        linear.forward = forward
        return module


class PackedQkv(PackedLinear):
    """An attention with queries, keys and values in one linear."""

    def __init__(self, sizes: LayerDescription, overlap: OverlapStyles | None) -> None:
        heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
        super().__init__("", [_Rows(n, sizes.head_dim) for n in heads], overlap)
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
        attention.config = copy.copy(attention.config)  # all layers share one
        attention.config.num_attention_heads = heads
        return module


class PackedGateUp(PackedLinear):
    """A feed-forward network whose gate is in the same linear as what it is for; of diffusers' only
    the part with that linear, `proj`."""

    def __init__(self, sizes: LayerDescription, overlap: OverlapStyles | None) -> None:
        super().__init__("gate_up_proj", [_Rows(sizes.ffn_size, 1)] * 2, overlap)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if hasattr(module, "proj"):
            self.linear = "proj"
        return super()._apply(module, device_mesh)


class DeltaNetHeads(ParallelStyle):
    """A gated delta net: each rank has some of the key heads, and the value heads that read them.

    The linears that hold nothing but neighbouring rows of the heads are column-wise.
    """

    def __init__(self, overlap: OverlapStyles | None) -> None:
        super().__init__()
        self.overlap = overlap

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mixer: Any = module
        key = _Rows(mixer.num_k_heads, mixer.head_k_dim)
        matrices = [key, key, _Rows(mixer.num_v_heads, mixer.head_v_dim)]
        if hasattr(mixer, "in_proj_qkv"):
            PackedLinear("in_proj_qkv", matrices, self.overlap)._apply(mixer, device_mesh)
        LocalNorm()._apply(mixer.norm, device_mesh)
        distribute_parameters(mixer.conv1d, device_mesh)
        distribute_parameters(mixer, device_mesh, A_log=Shard(0), dt_bias=Shard(0))

        def own_weights() -> DeltaWeights:
            filters = _own_rows(matrices, device_mesh, mixer.conv1d.weight)
            return DeltaWeights(
                filters.squeeze(1), mixer.A_log.to_local(), mixer.dt_bias.to_local()
            )

        mixer.own_weights = own_weights
        return module


class ConvolutionChannels(PackedLinear):
    """A short convolution between two gates: each rank has some of the channels of all three."""

    def __init__(self, sizes: LayerDescription, overlap: OverlapStyles | None) -> None:
        self.channels = _Rows(sizes.hidden_size, 1)
        super().__init__("in_proj", [self.channels] * 3, overlap)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mixer: Any = super()._apply(module, device_mesh)
        distribute_parameters(mixer.conv, device_mesh)
        own_rows = partial(_own_rows, [self.channels], device_mesh)

        def own_weights() -> Filters:
            bias = mixer.conv.bias
            own_bias_C = None if bias is None else own_rows(bias)
            return Filters(own_rows(mixer.conv.weight).squeeze(1), own_bias_C)

        mixer.own_weights = own_weights
        return module


class ExpertsOfRanks(ParallelStyle):
    """A feed-forward network with `gate` or `router`, and `experts`; others are left alone.

    Experts that all tokens go through (`shared_expert`, `shared_experts`) are divided by their
    inner features.

    Raises:
        ConfigError: the experts do not divide among the ranks, or communication is to overlap.
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
        split_experts(block.experts, device_mesh)
        for name in ("shared_expert", "shared_experts"):
            shared = getattr(block, name, None)
            if shared is None:
                continue
            for linear in (shared.gate_proj, shared.up_proj):
                compute_locally(linear, device_mesh, Shard(0))
            compute_locally(shared.down_proj, device_mesh, Shard(1))
        if hasattr(block, "shared_expert_gate"):
            # Multiplies parts of a sum, so its gradients are parts of sums.
            compute_locally(block.shared_expert_gate, device_mesh, Replicate())
        whole: Any = type(block).forward

        def forward(hidden: DTensor) -> Any:
            # Every rank adds the gradients of its own experts.
            out = whole(block, hidden.to_local(grad_placements=[Partial()]))
            if isinstance(out, tuple):  # with the router's scores, which nothing reads
                return _summed(out[0], device_mesh, self._slices), out[1]
            return _summed(out, device_mesh, self._slices)

        block.forward = forward
        return module


class ExpertsAlone(ParallelStyle):
    """Experts whose layer routes to them itself, as Gemma 4's do beside a feed-forward part.

    What they get, rows and routing weights, is replicated, or slices of the sequence, which are
    gathered: routers work on slices like norms.
    """

    def __init__(self, slices: SequenceSlices | None) -> None:
        super().__init__()
        self._slices = slices

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        experts: Any = module
        split_experts(experts, device_mesh)
        own: Any = experts.forward

        def whole(x: Tensor) -> Tensor:
            if self._slices is not None:
                replicated = self._slices.whole(x)
            else:
                replicated = DTensor.from_local(x, device_mesh, [Replicate()], run_check=False)
            # Every rank adds the gradients of its own experts.
            return replicated.to_local(grad_placements=[Partial()])

        def forward(rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            out = own(whole(rows), whole(index), whole(weights))
            return _summed(out, device_mesh, self._slices)

        experts.forward = forward
        return module


def split_experts(experts: Any, mesh: DeviceMesh) -> None:
    """Gives each rank some of the experts; its forward adds up what these compute."""
    compute = own_experts(experts, mesh, some_elsewhere=True)
    own = experts.num_experts // mesh.size()
    first = mesh.get_local_rank() * own

    def forward(rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        index = index - first
        others = (index < 0) | (index >= own)
        index = index.masked_fill(others, own)  # Hugging Face's number for "not here"
        return compute(rows, index, weights)

    experts.forward = forward


def own_experts(
    experts: Any, mesh: DeviceMesh, *, some_elsewhere: bool
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Divides experts among the ranks of a 1-D mesh; their forward with those of this rank, which
    it counts from 0.

    Args:
        some_elsewhere: whether rows come that are for experts of other ranks, too.
    """
    placements = {name: Shard(0) for name, _ in experts.named_parameters(recurse=False)}
    distribute_parameters(experts, mesh, **placements)
    settings = {k: v for k, v in vars(experts).items() if not k.startswith("_")}
    settings |= dict(experts.named_children())
    settings["num_experts"] = experts.num_experts // mesh.size()
    settings["_is_expert_parallel"] = some_elsewhere
    compute: Any = type(experts).forward

    def compute_own(rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        local = {
            name: cast(DTensor, parameter).to_local()
            for name, parameter in experts.named_parameters(recurse=False)
        }
        return compute(LocalWeights(type(experts), settings, local), rows, index, weights)

    return compute_own


def _summed(out: Tensor, mesh: DeviceMesh, slices: SequenceSlices | None) -> Tensor:
    """Sum over ranks, whole or this rank's slice of it."""
    if slices is not None:
        return slices.reduce(nn.Identity(), (), out)
    partial = DTensor.from_local(out, mesh, [Partial()], run_check=False)
    return partial.redistribute(placements=[Replicate()]).to_local()


class ShardedNorm(ParallelStyle):
    """The norm after a column-wise linear; its weight is divided like that one's rows."""

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
            own = wide.square().sum(-1, keepdim=True)
            squares = DTensor.from_local(own, device_mesh, [Partial()], run_check=False)
            whole = squares.redistribute(placements=[Replicate()])
            mean = whole.to_local(grad_placements=[Partial()]) / features
            return (weight * (wide * torch.rsqrt(mean + norm.variance_epsilon))).to(x.dtype)

        module.forward = forward
        return module


class LatentHeads(ParallelStyle):
    """An attention that computes keys, values, and perhaps queries, from few features."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        parts = {name: part for name, part in module.named_children() if part is not None}
        for name in ("q_a_proj", "kv_a_proj_with_mqa"):
            if name in parts:
                compute_locally(parts[name], device_mesh, Replicate())
        for name in ("q_a_layernorm", "kv_a_layernorm"):
            if name in parts:
                LocalNorm()._apply(parts[name], device_mesh)
        for name in ("q_proj", "q_b_proj", "kv_b_proj"):
            if name in parts:
                compute_locally(parts[name], device_mesh, Shard(0))
        return module
