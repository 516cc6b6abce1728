"""Bytes of activations: what tasks keep between forward and backward, what they need meanwhile.

Listed are the tensors that autograd saves in Hugging Face's layers, each once: inputs of trained
linears, both sides of norms, what attention and activation functions need. RMSNorms keep float32
copies of their input. With activation checkpointing a layer keeps its input ("full"), or that and
the results of matrix products and attention ("selective").

Between the two halves of a split backward (I and W) torch keeps the whole graph, and the gradients
of all results of linears and norms beside it: more than before, not less.

Layers share rotary tables, which `shared_bytes` has. Left out: temporary buffers inside of one
operator, and states of random generators (5 KB on the host for each layer that is run again).

While a task runs it needs more than it keeps: gradients of a layer's results, of its weights before
they are added to those of other microbatches, results of a layer that is going to run again,
float32 copies in norms and rotary embeddings, logits and their gradients. Bounds, not sums: what is
listed for a layer is the largest of what its attention, its feed-forward part and its norms have at
one time. They were found by following every allocation of real layers of each family, with weights,
in each mode of recomputation; tests do.

Left out: buffers inside of one operator, such as a kernel's scratch space.
"""

from __future__ import annotations

import numpy as np

from torchmm.balance.costs.blocks import (
    Block,
    Flag,
    layer_linears,
    layer_parameters,
    local_linears,
)
from torchmm.balance.costs.execution import Execution
from torchmm.balance.costs.layer_operators import LOSS_CHUNK
from torchmm.balance.costs.sizes import Array, TaskSizes
from torchmm.common.batch import LayerDescription, ModuleDescription


def kept_bytes(
    module: ModuleDescription,
    block: Block,
    sizes: TaskSizes,
    execution: Execution,
    element_bytes: int,
    inputs: Flag,
    weights: bool,
) -> Array:
    """What a block keeps from its forward to its backward, on one rank, by task.

    Args:
        element_bytes: of the compute dtype.
        inputs, weights: which gradients it needs; none: nothing is kept.
    """
    has_backward = np.asarray(inputs) | weights
    if block.layer is not None:
        found = block.count * layer_kept_bytes(
            block.layer, sizes, execution, element_bytes, weights=weights
        )
    elif block.role == "output" and module.kind == "llm":
        found = _head(module, block, sizes, execution, element_bytes, weights)
    else:
        found = _linear(module, block, sizes, execution, element_bytes, weights)
    return found * has_backward


def layer_kept_bytes(
    layer: LayerDescription,
    sizes: TaskSizes,
    execution: Execution,
    element_bytes: int,
    *,
    weights: bool,
) -> Array:
    """What one layer keeps, by task.

    Args:
        weights: whether its weights are trained.
    """
    input_N = sizes.units_N * layer.hidden_size * execution.residual_share
    if execution.recompute == "full":
        return element_bytes * input_N
    query = layer.heads * layer.head_dim / execution.tensor
    key = max(layer.kv_heads / execution.tensor, 1) * layer.head_dim
    statistics_N = 4 * layer.heads / execution.tensor * sizes.units_N
    attention_N = element_bytes * sizes.units_N * query + statistics_N
    if execution.recompute == "selective":
        results_N = sum(outputs for _, outputs in local_linears(layer, execution.tensor).values())
        kept_N = element_bytes * (input_N + sizes.units_N * results_N) + attention_N
        return kept_N + _cross(layer, sizes, execution, element_bytes, results=True)
    norms = 4 if layer.norm_place == "around" else 2
    normed_bytes = 4 if layer.norm_weight_float32 else element_bytes
    norms_N = norms * _norm(layer.norm, input_N, normed_bytes, weights)
    scales = 2 if layer.norm == "layer" else 1  # float32: mean and deviation, or the latter
    norms_N += 4 * norms * scales * sizes.units_N * execution.residual_share
    gathered = execution.residual_share if execution.async_tensor else 1.0
    inputs_N = gathered * sizes.units_N * layer.hidden_size
    norms_N += 2 * weights * element_bytes * inputs_N  # linears' inputs
    if layer.qk_norm:
        normed_N = sizes.units_N * (query + key)
        norms_N = norms_N + _norm(layer.norm, normed_N, normed_bytes, weights)
        norms_N += 4 * scales * sizes.units_N * (query + key) / layer.head_dim
    # A part of packed results keeps all of them.
    values = query + 2 * key if layer.packed_qkv else key
    attention_N = attention_N + element_bytes * sizes.units_N * (query + key + values)
    ffn = _ffn_tensors(layer, weights) * layer.ffn_size / execution.tensor
    kept_N = norms_N + attention_N + element_bytes * sizes.units_N * ffn
    return kept_N + _cross(layer, sizes, execution, element_bytes, results=False)


def shared_bytes(module: ModuleDescription, sizes: TaskSizes, element_bytes: int) -> Array:
    """What the layers of a stage keep together: cosines and sines of positions."""
    layer = module.layers[0]
    if module.kind != "llm" and layer.norm != "rms":
        return sizes.units_N * 0.0  # towers with layer norms add positions instead
    size = element_bytes if module.kind == "llm" else 4
    return 2 * size * sizes.units_N * layer.head_dim


def gradients_kept_bytes(
    block: Block, sizes: TaskSizes, execution: Execution, element_bytes: int
) -> Array:
    """Gradients of results that wait for W after I, beside what was kept, by task."""
    if block.layer is None:
        outputs = block.linear[1] if block.linear else 0.0
        rows_N = sizes.outputs_N if block.role == "output" else sizes.inputs_N
        return element_bytes * rows_N * outputs
    linears = local_linears(block.layer, execution.tensor).values()
    normed = 2 * block.layer.hidden_size * execution.residual_share
    results = sum(outputs for _, outputs in linears) + normed
    return block.count * element_bytes * sizes.units_N * results


def _norm(kind: str, elements: Array, element_bytes: int, weights: bool) -> Array:
    """A norm's input, and, where its weight is trained, its result before that weight."""
    if kind == "layer":
        return element_bytes * elements
    return (4 + element_bytes * weights) * elements


def _ffn_tensors(layer: LayerDescription, weights: bool) -> int:
    """Tensors of the feed-forward part's inner size: the last one only feeds a linear."""
    inside = 2 if layer.activation == "quick_gelu" else 1
    return inside + (2 if layer.gated_ffn else 0) + weights


def _cross(
    layer: LayerDescription,
    sizes: TaskSizes,
    execution: Execution,
    element_bytes: int,
    *,
    results: bool,
) -> Array:
    """Attention to the context: queries, keys, values, its result and the norm before it."""
    if not layer.cross_attention:
        return sizes.units_N * 0.0
    linears = layer_linears(layer)
    query, key = linears["query"][1] / execution.tensor, linears["key"][1] / execution.tensor
    own = 2 * query + (layer.hidden_size if results else 3 * layer.hidden_size)
    return element_bytes * (sizes.units_N * own + sizes.contexts_N * 2 * key)


def _head(
    module: ModuleDescription,
    block: Block,
    sizes: TaskSizes,
    execution: Execution,
    element_bytes: int,
    weights: bool,
) -> Array:
    """Final norm, picked positions, float32 log-probabilities; of long rows the logits instead."""
    assert block.linear is not None
    hidden, vocabulary = block.linear
    kept_N = _norm(module.layers[-1].norm, sizes.units_N * hidden, element_bytes, weights)
    kept_N = kept_N + weights * element_bytes * sizes.outputs_N * hidden
    chunked_N = (sizes.outputs_N > LOSS_CHUNK) & (element_bytes < 4)
    return kept_N + np.where(chunked_N, element_bytes, 4) * sizes.outputs_N * vocabulary


def _linear(
    module: ModuleDescription,
    block: Block,
    sizes: TaskSizes,
    execution: Execution,
    element_bytes: int,
    weights: bool,
) -> Array:
    """Input of a linear, and of the activation function before it; token ids. Of encoders also the
    inputs of norms that may stand before the layers and behind them."""
    if block.linear is None:
        return 8 * sizes.inputs_N
    beside_N = sizes.units_N * 0.0
    if module.kind == "encoder":
        norm, values_N = module.layers[0].norm, sizes.units_N * module.layers[0].hidden_size
        before = block.leaf and norm == "layer"
        if before or (block.role == "output" and block.first):
            beside_N = _norm(norm, values_N, element_bytes, weights) + 8 * sizes.units_N
    rows_N = {"embedding": sizes.inputs_N, "context": sizes.contexts_N, "output": sizes.outputs_N}
    split = execution.tensor if block.role == "output" and block.last else 1
    tensors = weights + (block.role != "embedding" and not block.first)
    return beside_N + element_bytes * tensors * rows_N[block.role] * block.linear[0] / split


def layer_temporary_bytes(
    layer: LayerDescription,
    sizes: TaskSizes,
    execution: Execution,
    element_bytes: int,
    *,
    weights: bool,
) -> Array:
    """The most that one layer needs beyond what is kept of it, by task, in forward or backward.

    Of a backward that runs the layer again, its activations come on top.

    Args:
        weights: whether they are trained.
    """
    units_N, hidden, tensor = sizes.units_N, layer.hidden_size, execution.tensor
    residual_N = element_bytes * units_N * hidden
    query = layer.heads * layer.head_dim / tensor
    key = max(layer.kv_heads / tensor, 1) * layer.head_dim
    inner_N = element_bytes * units_N * layer.ffn_size / tensor
    # Queries and keys are turned in float32 by some towers: copies, products and their sums.
    attention_N = element_bytes * units_N * (query + 2 * key + hidden) + 20 * units_N * query
    forward_N = (4 if layer.packed_gate_up else 3) * inner_N
    norms_N = (16 if layer.norm == "rms" else 0) * units_N * hidden
    gradients_N = 2 * element_bytes * units_N * (query + 2 * key)
    backward_N = np.max([2 * inner_N, gradients_N, norms_N], axis=0)
    if weights:
        backward_N = backward_N + _weight_gradient_bytes(layer, execution, element_bytes)
    return residual_N + np.max([forward_N, attention_N, backward_N], axis=0)


def head_temporary_bytes(block: Block, sizes: TaskSizes, element_bytes: int) -> Array:
    """Logits and their gradients, by task; of long rows in half precision chunk by chunk."""
    assert block.linear is not None
    hidden, vocabulary = block.linear
    rows_N = sizes.outputs_N
    found_N = 2 * element_bytes * rows_N * vocabulary
    if element_bytes < 4:
        found_N = found_N + 8 * np.minimum(rows_N, LOSS_CHUNK) * vocabulary
    return found_N + block.trained * element_bytes * hidden * vocabulary


def block_temporary_bytes(
    module: ModuleDescription, block: Block, sizes: TaskSizes, element_bytes: int
) -> Array:
    """The most that what stands around the layers needs, by task."""
    if block.role == "output" and module.kind == "llm":
        return head_temporary_bytes(block, sizes, element_bytes)
    if block.linear is None:  # the LLM's table
        return sizes.units_N * 0.0 + block.trained * element_bytes * module.pre_parameters
    inputs, outputs = block.linear
    rows = {"embedding": sizes.inputs_N, "context": sizes.contexts_N, "output": sizes.outputs_N}
    gradient = block.trained * element_bytes * inputs * outputs
    return 2 * element_bytes * rows[block.role] * max(inputs, outputs) + gradient


def _weight_gradient_bytes(
    layer: LayerDescription, execution: Execution, element_bytes: int
) -> float:
    """Gradients of one microbatch before they are added to those of others.

    FSDP adds those of a layer together, behind its backward, and casts one after the other.
    """
    largest = max(a * b for a, b in local_linears(layer, execution.tensor).values())
    if execution.shard * execution.replicate == 1 and element_bytes == 4:
        return element_bytes * largest
    return element_bytes * layer_parameters(layer, execution.tensor) + 4 * largest
