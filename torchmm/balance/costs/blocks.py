"""A module as a chain of blocks, and which gradients each of them needs.

Costs, FLOPs and memory all walk the same chain: what stands before the layers, the layers, what
stands behind them. A block needs weight gradients if it is trained, and input gradients if anything
before it in the chain is trained or a gradient is to go back to the stage before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from math import sqrt
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchmm.common.batch import LayerDescription, ModuleDescription

Role = Literal["embedding", "context", "layer", "output"]
Flag = bool | NDArray[np.bool_]
Linear = tuple[float, float]
"""(inputs, outputs) of a matrix product with weights."""


@dataclass(frozen=True)
class Block:
    """Consecutive equal blocks of a module: layers, or a linear around them.

    Attributes:
        role: embedding: patches to features, or the LLM's table. context: a linear of a generator's
            connector. layer. output: a linear behind the layers.
        trained: whether its weights are.
        count: how many equal ones stand behind each other.
        layer: sizes, of layers.
        linear: sizes, of the other blocks; None where they have no matrix product.
        leaf: its input never needs a gradient: pixels.
        first, last: whether it is the first or last block of its role in the module.
    """

    role: Role
    trained: bool
    count: int = 1
    layer: LayerDescription | None = None
    linear: Linear | None = None
    leaf: bool = False
    first: bool = False
    last: bool = False


def stage_blocks(module: ModuleDescription, start: int, stop: int) -> list[Block]:
    """The chain of the stage with layers [start, stop) of a whole module."""
    blocks: list[Block] = []
    if start == 0:
        blocks += _before(module)
    blocks += (
        Block("layer", module.trainable, len(list(equal)), layer)
        for layer, equal in groupby(module.layers[start:stop])
    )
    if stop == len(module.layers):
        blocks += _behind(module)
    return blocks


def gradients(blocks: Sequence[Block], arrives: Flag) -> Iterator[tuple[Block, Flag, bool]]:
    """(block, whether it needs input gradients, whether weight gradients).

    Args:
        arrives: whether a gradient goes back to the stage before; an array: by task.
    """
    needed = arrives
    for block in blocks:
        # Inside a trained layer gradients pass from product to product, whatever is before it.
        inputs = needed | (block.role == "layer" and block.trained)
        yield block, inputs & (not block.leaf), block.trained
        needed = needed | block.trained


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


def _before(module: ModuleDescription) -> list[Block]:
    blocks = []
    if module.kind == "generator" and module.context_flops_per_unit:
        size = sqrt(module.context_flops_per_unit / 4)  # two linears, taken as equally large
        blocks += [
            Block("context", module.connector_trainable, linear=(size, size), first=i == 0)
            for i in range(2)
        ]
    linears: Sequence[Linear | None] = module.pre_linears or [None]
    if module.pre_flops_per_unit and not module.pre_linears:
        linears = [_square(module.pre_flops_per_unit)]
    for index, linear in enumerate(linears):
        leaf = module.kind != "llm" and index == 0
        blocks.append(Block("embedding", module.trainable, linear=linear, leaf=leaf))
    return blocks


def _behind(module: ModuleDescription) -> list[Block]:
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
        found.append(Block("output", trained, linear=linear, first=first, last=last))
    return found


def _square(flops: float) -> Linear:
    size = sqrt(flops / 2)
    return size, size


def local_linears(layer: LayerDescription, tensor: int) -> dict[str, tuple[float, float]]:
    """(inputs, outputs) of the matrix products a rank does for a layer's own positions."""
    found = {}
    for name, (inputs, outputs) in layer_linears(layer).items():
        if name in ("attention_output", "down"):
            found[name] = (inputs / tensor, float(outputs))
        elif name == "router" or (name in ("key", "value") and layer.kv_heads < tensor):
            found[name] = (float(inputs), float(outputs))  # computed whole; of heads one is kept
        else:
            found[name] = (float(inputs), outputs / tensor)
    if layer.packed_qkv:
        query, key, value = (found.pop(name) for name in ("query", "key", "value"))
        found = {"qkv": (query[0], query[1] + key[1] + value[1])} | found
    return found


class Parameters(NamedTuple):
    """Numbers of parameters."""

    all: float
    trained: float


def stage_parameters(
    module: ModuleDescription, start: int, stop: int, tensor: int = 1
) -> Parameters:
    """Parameters of the stage with layers [start, stop) of a whole module, on one rank.

    Where a description does not say how many stand before and behind the layers, the rest of the
    module's is taken to stand before them.

    Args:
        tensor: tensor-parallel ranks; biases, norms and packed projections are whole on each.
    """
    first, last = start == 0, stop == len(module.layers)
    whole = sum(layer_parameters(layer) for layer in module.layers)
    before, behind = float(module.pre_parameters), float(module.post_parameters)
    if not before and not behind:
        before = max(0.0, module.parameters - whole)
    if module.tied and first and last:
        before = max(0.0, module.parameters - whole - behind)  # the table is the head
    draws, sees = module.kind == "generator", module.kind == "encoder"
    counts = [
        (before / tensor * first, module.trainable or (draws and module.connector_trainable)),
        (behind / tensor * last, module.trainable or (sees and module.connector_trainable)),
        *((layer_parameters(n, tensor), module.trainable) for n in module.layers[start:stop]),
    ]
    return Parameters(sum(n for n, _ in counts), sum(n for n, trained in counts if trained))


@cache
def layer_parameters(layer: LayerDescription, tensor: int = 1) -> float:
    """Parameters of a layer on one rank; no biases and norms where the description has none."""
    linears = layer_linears(layer)
    own = local_linears(replace(layer, packed_qkv=False), tensor)
    if layer.packed_qkv:  # replicated
        own |= {name: linears[name] for name in ("query", "key", "value")}
    if layer.packed_gate_up:
        own |= {name: linears[name] for name in ("gate", "up")}
    cross = ("query", "key", "value", "attention_output") if layer.cross_attention else ()
    names = (*linears, *cross)
    products = sum(linears[name][0] * linears[name][1] for name in names)
    rest: float = max(0, layer.parameters - products)
    if layer.experts:  # those that a token does not go through; ranks share them
        rest /= tensor
    return sum(own[name][0] * own[name][1] for name in names) + rest
