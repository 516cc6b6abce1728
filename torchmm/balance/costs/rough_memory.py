"""Estimate of one rank's memory before anything is allocated, for the start table and dry runs.

Weights, gradients and optimizer state are exact under FSDP2 (as `States` says; gradients are not
sharded between the microbatches of a step). Activations are those of
`torchmm.balance.costs.layers`: with flash-style attention no (tokens x tokens) matrix is
kept. What is left
out: temporary buffers, fragmentation and the framework itself.

A pipeline is taken to be cut evenly: a rank has its share of every layer list and keeps the
activations of as many microbatches as it has peers, as in 1F1B. Its weights stay gathered, and its
gradients whole, for the length of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torchmm.balance.costs.execution import FLOAT32, Execution, Recompute, Setting, States
from torchmm.balance.costs.layers import Parameters, layer_kept_bytes, learns, trained_parameters
from torchmm.balance.costs.sizes import llm_sizes
from torchmm.common.batch import MicrobatchMeta, SampleMeta
from torchmm.common.layers import LayerDescription, ModuleDescription


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank, by what they hold."""

    weight_bytes: int
    """Sharded weights, plus what FSDP2 gathers in compute dtype: a layer and the next, or,
    in a pipeline, all of the rank's."""
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return (
            self.weight_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes
        )


class OwnSizes(NamedTuple):
    """Ranks of a module where they are not all modules'."""

    pipeline: int
    shard: int


def estimate_memory(  # noqa: PLR0913 - what memory depends on
    modules: Sequence[ModuleDescription],
    tokens: dict[str, int],
    *,
    shard: int,
    tensor: int,
    compute_bytes: int,
    microbatches: int,
    recompute: Mapping[str, Recompute],
    pipeline: int = 1,
    sequence_parallel: bool = False,
    own: Mapping[str, OwnSizes] | None = None,
    in_flight: int | None = None,
    states: States = FLOAT32,
    reduces_each: bool = False,
) -> MemoryEstimate:
    """Return the estimated peak bytes of one rank.

    Args:
        modules: what the model consists of.
        tokens: tokens (LLM) or patches (encoder) per microbatch, by module name.
        shard: ranks FSDP2 shards over.
        tensor: tensor-parallel ranks.
        compute_bytes: bytes per element of the compute dtype.
        microbatches: per step; with several, gradients stay whole until the last.
        recompute: activation checkpointing mode by module name.
        pipeline: ranks among which the layers are divided.
        sequence_parallel: whether activations between tensor-parallel regions are split too.
        own: by module with a shorter pipeline on the same ranks. Such pipelines divide the
            microbatches, so a rank keeps as much of them as it would in a whole pipeline.
        in_flight: microbatches whose activations a module's first rank keeps, where modules have
            ranks of their own, which gather weights once per step; None: as many as pipeline ranks.
        states: of parameters.
        reduces_each: whether every backward reduces gradients into their shards.
    """
    once_per_step = pipeline > 1 or in_flight is not None
    weights = gradients = optimizer = 0.0
    activations = 0
    for module in modules:
        ranks, shards = (own or {}).get(module.name, OwnSizes(pipeline, shard))
        parameters = module.parameters // (tensor * ranks)
        of_layers = [trained_parameters(module, layer, tensor) / ranks for layer in module.layers]
        adapted = zip(module.layers, of_layers, strict=True)
        of_adapters = sum(count for layer, count in adapted if layer.adapters)
        own_parameters = parameters - sum(module.given_parameters) // ranks
        trained = own_parameters * module.trainable + of_adapters
        state = Parameters(parameters, trained, min(trained, sum(of_layers)), states)
        gathered = parameters if once_per_step else 2 * parameters // max(1, len(module.layers))
        weights += state.weight_bytes // shards + (gathered * compute_bytes if shards > 1 else 0)
        held_by = shards if (microbatches == 1 or reduces_each) and not once_per_step else 1
        gradients += state.gradient_bytes // held_by
        optimizer += state.optimizer_bytes // shards
        execution = Execution(
            tensor=tensor,
            sequence_parallel=sequence_parallel and tensor > 1,
            recompute=recompute.get(module.name, "none"),
        )
        found = _activation_bytes(module, tokens.get(module.name, 0), execution, compute_bytes)
        kept = min(in_flight or pipeline, microbatches)
        activations += found.every_layer * kept // pipeline + found.recomputed
    return MemoryEstimate(round(weights), round(gradients), round(optimizer), activations)


class _Activations(NamedTuple):
    """Bytes for one microbatch."""

    every_layer: int
    recomputed: int
    """Of the one layer whose activations are there again, in its backward."""


def _activation_bytes(
    module: ModuleDescription, tokens: int, execution: Execution, compute_bytes: int
) -> _Activations:
    row = MicrobatchMeta((SampleMeta("", 0, tokens),), tokens)
    sizes = llm_sizes([row], [tokens], padding=False)

    def kept(layer: LayerDescription, recompute: Recompute) -> float:
        setting = Setting(replace(execution, recompute=recompute), compute_bytes)
        found_N = layer_kept_bytes(layer, sizes, setting, weights=learns(module))
        return float(found_N[0])

    mode = execution.recompute
    total = sum(n * kept(layer, mode) for layer, n in Counter(module.layers).items())
    if module.kind == "encoder" and not learns(module):
        total = 0.0  # nothing before its layers is trained, so they have no backward
    again = 0.0
    if mode != "none" and total:
        again = max(kept(layer, "none") for layer in set(module.layers))
    return _Activations(round(total), round(again))
