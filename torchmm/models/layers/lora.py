"""Low-rank adapters (LoRA, arXiv 2106.09685, and DoRA, arXiv 2402.09353) of linear layers.

LoRA adds the product of two small matrices to a frozen linear layer:

    y = x W^T + b + scale * (x A^T) B^T        A: (rank, inputs), B: (outputs, rank)

B is zero initially, so that training starts from the pretrained layer. The matrices are in a child
module of the linear layer, "lora". They are therefore in the same FSDP unit, pipeline stage and
recomputed region as the layer. A forward hook adds the product to the output, so that it works with
any forward and does not change the names of the weights. A wrapper as in PEFT would rename all
weights. Adding the product to the weight would allocate a matrix as large as the weight.

DoRA trains the norm of each weight row, the magnitude m, separately from the direction:

    y = m / |W + scale * B A| * (x W^T + scale * (x A^T) B^T) + b        m: (outputs)

The norms |.| of rows are computed in each forward pass and are constants in the backward pass, as
in PEFT. `Lora.squares` computes them from matmuls with A and B, without a matrix as large as the
weight.

A tensor-parallel rank computes with its shard of the matrices (`LoraSharding`,
`torchmm.parallel.tensor.low_rank`).

Shape legend: R rank, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

CHILD = "lora"
"""Name of the child module with the matrices in the linear layer."""


@dataclass(frozen=True)
class LoraSpec:
    """Settings of an adapter for a linear layer."""

    adapter: str
    """Name of the adapter in the recipe."""
    rank: int
    alpha: float
    method: Literal["lora", "rslora", "dora"] = "lora"

    @property
    def scale(self) -> float:
        """Factor of the low-rank product."""
        return self.alpha / (sqrt(self.rank) if self.method == "rslora" else self.rank)


class LoraSharding(NamedTuple):
    """Functions that select the shard of a rank from inputs and parameters of a linear layer."""

    shard_input: Callable[[Tensor], Tensor]
    """Prepare the input of the linear layer (..., I) for the matmul with A."""
    shard_down: Callable[[Tensor], Tensor]
    """Select the local shard of A (R, I)."""
    shard_rows: Callable[[Tensor], Tensor]
    """Select rows of tensors with one row per output feature: B, magnitudes, W and b."""
    sum_squares: Callable[[Tensor], Tensor]
    """Sum the squares of row shards over ranks to those of complete rows."""
    adds_bias: bool
    """Whether the output includes the bias. Row-wise sharded layers add it after the reduction."""


def _identity(x: Tensor) -> Tensor:
    return x


UNSHARDED = LoraSharding(_identity, _identity, _identity, _identity, adds_bias=True)
"""Selection for linear layers without tensor parallelism."""


class Lora(nn.Module):
    """The adapter parameters of one linear layer.

    Attributes:
        spec: Settings of the adapter.
        down: Matrix A (R, I).
        up: Matrix B (O, R).
        magnitude: Magnitudes m (O,) of DoRA, or None.
        sharding: Selection of the shard of this rank.
    """

    def __init__(self, linear: nn.Linear, spec: LoraSpec) -> None:
        super().__init__()
        weight = linear.weight
        self.spec = spec
        self.sharding = UNSHARDED
        self.down = nn.Parameter(weight.new_empty(spec.rank, linear.in_features))
        self.up = nn.Parameter(weight.new_empty(linear.out_features, spec.rank))
        self.magnitude: nn.Parameter | None = None
        if spec.method == "dora":
            self.magnitude = nn.Parameter(weight.new_empty(linear.out_features))

    def forward(self, x: Tensor, output: Tensor, linear: nn.Linear) -> Tensor:
        """Return the output of the linear layer with the adapter.

        Args:
            x: (..., I), input of the linear layer.
            output: (..., O), output of the linear layer.
            linear: Linear layer that contains this module.
        """
        sharding = self.sharding
        down_RI, up_OR = sharding.shard_down(self.down), sharding.shard_rows(self.up)
        reduced = functional.linear(sharding.shard_input(x), down_RI) * self.spec.scale
        product = functional.linear(reduced, up_OR)
        if self.magnitude is None:
            return output + product
        squares_O = self.squares(linear, down_RI.detach(), up_OR.detach())
        ratio_O = sharding.shard_rows(self.magnitude) / squares_O.sqrt().to(self.magnitude.dtype)
        if linear.bias is None or not sharding.adds_bias:
            return ratio_O * (output + product)
        bias_O = sharding.shard_rows(linear.bias).detach()
        return ratio_O * (output - bias_O + product) + bias_O

    def squares(self, linear: nn.Linear, down_RI: Tensor, up_OR: Tensor) -> Tensor:
        """Return the squared norms of the rows of W + P A, (O,), float32, with P = scale * B.

        For each row, |W + P A|^2 = |W|^2 + 2 P (A W^T) + P (A A^T) P^T. Shards of rows contribute
        partial sums.

        Args:
            linear: Linear layer that contains this module.
            down_RI: (R, I), local shard of A.
            up_OR: (O, R), local shard of B.
        """
        weight_OI = self.sharding.shard_rows(linear.weight).detach()
        up_OR = self.spec.scale * up_OR.float()
        base_O = torch.linalg.vector_norm(weight_OI, dim=1, dtype=torch.float32).square()
        crossed_OR = 2 * (weight_OI @ down_RI.T) + up_OR @ (down_RI @ down_RI.T).float()
        return self.sharding.sum_squares(base_O + (crossed_OR * up_OR).sum(1))


def add_lora(linear: nn.Linear, spec: LoraSpec) -> None:
    """Add an uninitialized adapter to a linear layer, in place."""
    linear.add_module(CHILD, Lora(linear, spec))
    linear.register_forward_hook(_add)


def _add(linear: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return linear.lora(inputs[0], output, linear)


def merge_lora(weight: Tensor, factors: Mapping[str, Tensor], spec: LoraSpec) -> Tensor:
    """Return the weight (O, I) of an equivalent linear layer without an adapter.

    Args:
        weight: (O, I), weight of the linear layer.
        factors: Parameters of the adapter by names in `Lora`.
        spec: Settings of the adapter.
    """
    total = weight + spec.scale * factors["up"] @ factors["down"]
    if spec.method != "dora":
        return total
    ratio = factors["magnitude"] / torch.linalg.vector_norm(total, dim=1)
    return ratio[:, None] * total


def is_adapter_parameter(name: str) -> bool:
    """Return True if a parameter with this name belongs to an adapter."""
    return f".{CHILD}." in name


def adapted_linears(module: nn.Module) -> Iterator[tuple[str, nn.Linear, Lora]]:
    """Yield (name, linear layer, adapter) of all linear layers in a module with an adapter."""
    for name, part in module.named_modules():
        lora = getattr(part, CHILD, None)
        if isinstance(part, nn.Linear) and isinstance(lora, Lora):
            yield name, part, lora


@contextmanager
def without_lora(module: nn.Module) -> Iterator[None]:
    """Remove all adapters from the linear layers of a module within the context."""
    adapted = list(adapted_linears(module))
    for _, linear, _ in adapted:
        delattr(linear, CHILD)
    try:
        yield
    finally:
        for _, linear, lora in adapted:
            linear.add_module(CHILD, lora)


@torch.no_grad()
def initial_down(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Return initial values (R, I), float32, on the CPU: uniform within 1 / sqrt(I), as in PEFT."""
    bound = 1 / sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
