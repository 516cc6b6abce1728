"""Low-rank adapters (LoRA): a product of two small matrices, added to a frozen linear.

    y = x W^T + b + scale * (x A^T) B^T        A: (rank, inputs), B: (outputs, rank)

B is zero at first, so training starts from the linear as it was. The matrices are a child of the
linear, "lora", so they belong to the layer that they are in: to its FSDP2 unit, its pipeline stage,
its recomputation. A hook adds the product to what the linear returns, whatever its forward is by
then; the linear's own names do not change. Rejected: a wrapper around the linear, as PEFT has it,
which renames every weight and which tensor-parallel styles would not know; adding the product to
the weight in every forward, which takes a matrix as large as the weight.

DoRA trains the norm of each of the weight's rows, the magnitude m, apart from its direction:

    y = m / |W + scale * B A| * (x W^T + scale * (x A^T) B^T) + b        m: (outputs)

The norms |.| of rows are computed in every forward and taken for constants in backward, as PEFT
does it. They follow from products with A and B (`Lora.squares`), so that no matrix as large as the
weight is made. Rejected: keeping them from one step to the next, a state that FSDP2's gathered
weights, recomputation and compilation would all have to know of.

A tensor-parallel rank computes with its part of the matrices (`Part`,
`torchmm.parallel.tensor.low_rank`).

Shape legend: R rank, I inputs, O outputs.
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
"""Name of the matrices' module in the linear."""


@dataclass(frozen=True)
class LoraSpec:
    """What an adapter adds to a linear."""

    adapter: str
    """Its name in the recipe."""
    rank: int
    alpha: float
    method: Literal["lora", "rslora", "dora"] = "lora"

    @property
    def scale(self) -> float:
        """Factor of the product."""
        return self.alpha / (sqrt(self.rank) if self.method == "rslora" else self.rank)


class Part(NamedTuple):
    """How a rank's share is taken, of what a linear gets and of its parameters."""

    of_input: Callable[[Tensor], Tensor]
    of_down: Callable[[Tensor], Tensor]
    of_rows: Callable[[Tensor], Tensor]
    """Of what has a row for each of the linear's outputs: B, magnitudes, W and b."""
    summed: Callable[[Tensor], Tensor]
    """Squares of rows, of what a rank has of each: those of whole rows."""
    biased: bool
    """Whether the linear's output has its bias by now; what ranks sum gets it afterwards."""


def _itself(x: Tensor) -> Tensor:
    return x


WHOLE = Part(_itself, _itself, _itself, _itself, biased=True)


class Lora(nn.Module):
    """The parameters of one linear's adapter.

    Attributes:
        down, up: A (R, I) and B (O, R).
        magnitude: m (O), of DoRA.
        part: what this rank computes with.
    """

    def __init__(self, linear: nn.Linear, spec: LoraSpec) -> None:
        super().__init__()
        weight = linear.weight
        self.spec = spec
        self.part = WHOLE
        self.down = nn.Parameter(weight.new_empty(spec.rank, linear.in_features))
        self.up = nn.Parameter(weight.new_empty(linear.out_features, spec.rank))
        self.magnitude: nn.Parameter | None = None
        if spec.method == "dora":
            self.magnitude = nn.Parameter(weight.new_empty(linear.out_features))

    def forward(self, x: Tensor, output: Tensor, linear: nn.Linear) -> Tensor:
        """The linear's output for `x` with the product added, and scaled by row with DoRA."""
        part = self.part
        down_RI, up_OR = part.of_down(self.down), part.of_rows(self.up)
        few = functional.linear(part.of_input(x), down_RI) * self.spec.scale
        product = functional.linear(few, up_OR)
        if self.magnitude is None:
            return output + product
        squares_O = self.squares(linear, down_RI.detach(), up_OR.detach())
        ratio_O = part.of_rows(self.magnitude) / squares_O.sqrt().to(self.magnitude.dtype)
        if linear.bias is None or not part.biased:
            return ratio_O * (output + product)
        bias_O = part.of_rows(linear.bias).detach()
        return ratio_O * (output - bias_O + product) + bias_O

    def squares(self, linear: nn.Linear, down_RI: Tensor, up_OR: Tensor) -> Tensor:
        """(O) float32: of each row of the weight with the product added, the sum of squares.

        |W + P A|^2 = |W|^2 + 2 P (A W^T) + P (A A^T) P^T, row by row, where P is scale * B; parts
        of rows make parts of these sums.
        """
        weight_OI = self.part.of_rows(linear.weight).detach()
        up_OR = self.spec.scale * up_OR.float()
        own_O = torch.linalg.vector_norm(weight_OI, dim=1, dtype=torch.float32).square()
        crossed_OR = 2 * (weight_OI @ down_RI.T) + up_OR @ (down_RI @ down_RI.T).float()
        return self.part.summed(own_O + (crossed_OR * up_OR).sum(1))


def add_lora(linear: nn.Linear, spec: LoraSpec) -> None:
    """Adds an adapter, without values, to a linear, in place."""
    linear.add_module(CHILD, Lora(linear, spec))
    linear.register_forward_hook(_add)


def _add(linear: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return linear.lora(inputs[0], output, linear)


def merged(weight: Tensor, factors: Mapping[str, Tensor], spec: LoraSpec) -> Tensor:
    """The weight (O, I) of a linear that computes the same without an adapter.

    Args:
        factors: the adapter's parameters by their names in `Lora`.
    """
    whole = weight + spec.scale * factors["up"] @ factors["down"]
    if spec.method != "dora":
        return whole
    ratio = factors["magnitude"] / torch.linalg.vector_norm(whole, dim=1)
    return ratio[:, None] * whole


def of_adapter(name: str) -> bool:
    """Whether a parameter of this name is one of an adapter's."""
    return f".{CHILD}." in name


def adapted_linears(module: nn.Module) -> Iterator[tuple[str, nn.Linear, Lora]]:
    """(name, linear, its matrices) of all linears in a module that have an adapter."""
    for name, part in module.named_modules():
        lora = getattr(part, CHILD, None)
        if isinstance(part, nn.Linear) and isinstance(lora, Lora):
            yield name, part, lora


@contextmanager
def without_lora(module: nn.Module) -> Iterator[None]:
    """Takes all matrices out of their linears for a while, whose parameters are then their own."""
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
    """Initial values (R, I), float32 on the CPU: PEFT's, uniform up to 1 / sqrt(I)."""
    bound = 1 / sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
