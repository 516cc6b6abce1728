"""A module as a chain of parts, and which gradients each of them needs.

Costs, FLOPs and memory all walk the same chain: what stands before the layers, the layers, what
stands behind them. A part needs weight gradients if it is trained, and input gradients if anything
before it in the chain is trained or a gradient is to go back to the stage before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import sqrt
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from torchmm.common.batch import LayerDescription, ModuleDescription

Role = Literal["embedding", "context", "layer", "output"]
Flag = bool | NDArray[np.bool_]
Linear = tuple[float, float]
"""(inputs, outputs) of a matrix product with weights."""


@dataclass(frozen=True)
class Part:
    """Consecutive equal pieces of a module.

    Attributes:
        role: embedding: patches to features, or the LLM's table. context: a linear of a generator's
            connector. layer. output: a linear behind the layers.
        trained: whether its weights are.
        count: how many equal ones stand behind each other.
        layer: sizes, of layers.
        linear: sizes, of the other parts; None where they have no matrix product.
        leaf: its input never needs a gradient: pixels.
        first, last: whether it is the first or last part of its role in the module.
    """

    role: Role
    trained: bool
    count: int = 1
    layer: LayerDescription | None = None
    linear: Linear | None = None
    leaf: bool = False
    first: bool = False
    last: bool = False


def stage_parts(module: ModuleDescription, start: int, stop: int) -> list[Part]:
    """The chain of the stage with layers [start, stop) of a whole module."""
    parts: list[Part] = []
    if start == 0:
        parts += _before(module)
    parts += (
        Part("layer", module.trainable, len(list(equal)), layer)
        for layer, equal in groupby(module.layers[start:stop])
    )
    if stop == len(module.layers):
        parts += _behind(module)
    return parts


def gradients(parts: Sequence[Part], arrives: Flag) -> Iterator[tuple[Part, Flag, bool]]:
    """(part, whether it needs input gradients, whether weight gradients).

    Args:
        arrives: whether a gradient goes back to the stage before; an array: by task.
    """
    needed = arrives
    for part in parts:
        # Inside a trained layer gradients pass from product to product, whatever is before it.
        inputs = needed | (part.role == "layer" and part.trained)
        yield part, inputs & (not part.leaf), part.trained
        needed = needed | part.trained


def layer_linears(layer: LayerDescription) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of a layer's matrix products with weights, by what they are."""
    hidden, ffn = layer.hidden_size, layer.ffn_size
    query, key_value = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    found = {"query": (hidden, query), "key": (hidden, key_value), "value": (hidden, key_value)}
    found |= {"attention_output": (query, hidden)}
    if layer.experts:
        found["router"] = (hidden, layer.experts)
    if layer.gated_ffn:
        found["gate"] = (hidden, ffn)
    return found | {"up": (hidden, ffn), "down": (ffn, hidden)}


def _before(module: ModuleDescription) -> list[Part]:
    parts = []
    if module.kind == "generator" and module.context_flops_per_unit:
        size = sqrt(module.context_flops_per_unit / 4)  # two linears, taken as equally large
        parts += [
            Part("context", module.connector_trainable, linear=(size, size), first=i == 0)
            for i in range(2)
        ]
    linears: Sequence[Linear | None] = module.pre_linears or [None]
    if module.pre_flops_per_unit and not module.pre_linears:
        linears = [_square(module.pre_flops_per_unit)]
    for index, linear in enumerate(linears):
        leaf = module.kind != "llm" and index == 0
        parts.append(Part("embedding", module.trainable, linear=linear, leaf=leaf))
    return parts


def _behind(module: ModuleDescription) -> list[Part]:
    linears: Sequence[Linear] = module.post_linears
    if not linears and module.post_flops_per_unit:
        # A connector has two linears, taken as equally large.
        halves = 2 if module.kind == "encoder" else 1
        linears = [_square(module.post_flops_per_unit / halves)] * halves
    found = []
    for index, linear in enumerate(linears):
        of_connector = module.kind == "encoder" and index >= len(linears) - 2
        trained = module.connector_trainable if of_connector else module.trainable
        first, last = index == 0, index == len(linears) - 1
        found.append(Part("output", trained, linear=linear, first=first, last=last))
    return found


def _square(flops: float) -> Linear:
    size = sqrt(flops / 2)
    return size, size
