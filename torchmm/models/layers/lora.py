"""Low-rank adapters (LoRA): a product of two small matrices, added to a frozen linear.

    y = x W^T + b + scale * (x A^T) B^T        A: (rank, inputs), B: (outputs, rank)

B is zero at first, so training starts from the linear as it was. The matrices are a child of the
linear, "lora", so they belong to the layer that they are in: to its FSDP2 unit, its pipeline stage,
its recomputation. A hook adds the product to what the linear returns, whatever its forward is by
then; the linear's own names do not change. Rejected: a wrapper around the linear, as PEFT has it,
which renames every weight and which tensor-parallel styles would not know; adding the product to
the weight in every forward, which takes a matrix as large as the weight.

A tensor-parallel rank computes with its part of both matrices (`Part`,
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
    method: Literal["lora", "rslora"] = "lora"

    @property
    def scale(self) -> float:
        """Factor of the product."""
        return self.alpha / (sqrt(self.rank) if self.method == "rslora" else self.rank)


class Part(NamedTuple):
    """How a rank's share is taken, of what a linear gets and of both matrices, and added."""

    of_input: Callable[[Tensor], Tensor]
    of_down: Callable[[Tensor], Tensor]
    of_up: Callable[[Tensor], Tensor]
    added: Callable[[Tensor, Tensor], Tensor]
    """The linear's output, and the product that is to be added to it: their sum."""


def _itself(x: Tensor) -> Tensor:
    return x


WHOLE = Part(_itself, _itself, _itself, torch.add)


class Lora(nn.Module):
    """The two matrices of one linear.

    Attributes:
        down, up: A (R, I) and B (O, R).
        part: what this rank computes with.
    """

    def __init__(self, linear: nn.Linear, spec: LoraSpec) -> None:
        super().__init__()
        weight = linear.weight
        self.spec = spec
        self.part = WHOLE
        self.down = nn.Parameter(weight.new_empty(spec.rank, linear.in_features))
        self.up = nn.Parameter(weight.new_empty(linear.out_features, spec.rank))

    def forward(self, x: Tensor, output: Tensor) -> Tensor:
        """The linear's output for `x` with the product added."""
        part = self.part
        few = functional.linear(part.of_input(x), part.of_down(self.down)) * self.spec.scale
        return part.added(output, functional.linear(few, part.of_up(self.up)))


def add_lora(linear: nn.Linear, spec: LoraSpec) -> None:
    """Adds the matrices, without values, to a linear, in place."""
    linear.add_module(CHILD, Lora(linear, spec))
    linear.register_forward_hook(_add)


def _add(linear: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return linear.lora(inputs[0], output)


def merged(weight: Tensor, factors: Mapping[str, Tensor], spec: LoraSpec) -> Tensor:
    """The weight (O, I) of a linear that computes the same without an adapter.

    Args:
        factors: the adapter's parameters by their names in `Lora`.
    """
    return weight + spec.scale * factors["up"] @ factors["down"]


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
