"""Estimate of one rank's memory before anything is allocated, for the start table and dry runs.

Weights, gradients and optimizer state are exact under FSDP2 (float32 master weights, AdamW with
two moments, gradients not sharded between the microbatches of a step). Activations are counted
per layer from the tensors that backward needs: with flash-style attention no (tokens x tokens)
matrix is kept. What is left out: temporary buffers, fragmentation and the framework itself.

A pipeline is taken to be cut evenly: a rank has its share of every layer list and keeps the
activations of as many microbatches as it has peers, as in 1F1B. Its weights stay gathered, and its
gradients whole, for the length of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchmm.batch import LayerDescription, ModuleDescription


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank, by what they hold."""

    weight_bytes: int
    """Sharded float32 weights, plus what FSDP2 gathers in compute dtype: a layer and the next, or,
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


def estimate_memory(
    modules: Sequence[ModuleDescription],
    tokens: dict[str, int],
    *,
    shard: int,
    tensor: int,
    compute_bytes: int,
    microbatches: int,
    recompute: dict[str, str],
    pipeline: int = 1,
) -> MemoryEstimate:
    """Peak bytes of one rank.

    Args:
        modules: what the model consists of.
        tokens: tokens (LLM) or patches (encoder) per microbatch, by module name.
        shard: ranks FSDP2 shards over.
        tensor: tensor-parallel ranks.
        compute_bytes: bytes per element of the compute dtype.
        microbatches: per step; with several, gradients stay whole until the last.
        recompute: activation checkpointing mode by module name.
        pipeline: ranks among which the layers are divided.
    """
    weights = gradients = optimizer = activations = 0
    for module in modules:
        parameters = module.parameters // (tensor * pipeline)
        gathered = 2 * parameters // max(1, len(module.layers)) if pipeline == 1 else parameters
        weights += 4 * parameters // shard + (gathered * compute_bytes if shard > 1 else 0)
        if module.trainable:
            held_by = shard if microbatches == pipeline == 1 else 1
            gradients += 4 * parameters // held_by
            optimizer += 8 * parameters // shard
        mode = recompute.get(module.name, "none")
        per_token = sum(_activation_elements(sizes, mode) for sizes in module.layers)
        per_token = per_token * min(pipeline, microbatches) // pipeline
        if mode == "full" and module.layers:  # one layer at a time is recomputed whole
            per_token += _activation_elements(module.layers[0], "none")
        activations += tokens.get(module.name, 0) * per_token * compute_bytes // tensor
    return MemoryEstimate(weights, gradients, optimizer, activations)


def _activation_elements(sizes: LayerDescription, mode: str) -> int:
    """Elements per token that one layer keeps for backward."""
    if mode == "full":
        return sizes.hidden_size
    query_key_value = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
    attention_output = sizes.heads * sizes.head_dim
    ffn = (3 if sizes.gated_ffn else 2) * sizes.ffn_size
    products = query_key_value + attention_output + 2 * sizes.hidden_size
    if mode == "selective":  # results of matrix products only
        return products + (2 if sizes.gated_ffn else 1) * sizes.ffn_size
    # Besides: both norm inputs and outputs, and queries and keys before their rotation.
    return products + ffn + 4 * sizes.hidden_size + query_key_value
