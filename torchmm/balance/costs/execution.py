"""How a module is run: over how many ranks, with what kept; and what of it a rank then has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

from torchmm.balance.costs.parts import layer_linears
from torchmm.common.batch import LayerDescription, ModuleDescription

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Execution:
    """How one module runs.

    Attributes:
        tensor: tensor-parallel ranks.
        sequence_parallel: whether activations between tensor-parallel regions are split too.
        async_tensor: whether communication of linears overlaps with their matrix products.
        shard, replicate: data-parallel ranks that share parameters, and copies of those groups.
        recompute: activation checkpointing.
    """

    tensor: int = 1
    sequence_parallel: bool = False
    async_tensor: bool = False
    shard: int = 1
    replicate: int = 1
    recompute: Recompute = "none"

    @property
    def residual_share(self) -> float:
        """What share of the positions a rank has between tensor-parallel regions."""
        return 1 / self.tensor if self.sequence_parallel else 1.0


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
