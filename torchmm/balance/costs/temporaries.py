"""Memory that a task needs while it runs, beyond what it keeps.

Gradients of a layer's results, of its weights before they are added to those of other microbatches,
results of a layer that is going to run again, float32 copies in norms and rotary embeddings, logits
and their gradients. Bounds, not sums: what is listed for a layer is the largest of what its
attention, its feed-forward part and its norms have at one time. They were found by following every
allocation of real layers of each family, with weights, in each mode of recomputation; tests do.

Left out: buffers inside of one operator, such as a kernel's scratch space.
"""

from __future__ import annotations

import numpy as np

from torchmm.balance.costs.execution import Execution, layer_parameters, local_linears
from torchmm.balance.costs.layer_operators import LOSS_CHUNK
from torchmm.balance.costs.parts import Part
from torchmm.balance.costs.sizes import Array, TaskSizes
from torchmm.common.batch import LayerDescription, ModuleDescription


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


def head_temporary_bytes(part: Part, sizes: TaskSizes, element_bytes: int) -> Array:
    """Logits and their gradients, by task; of long rows in half precision chunk by chunk."""
    assert part.linear is not None
    hidden, vocabulary = part.linear
    rows_N = sizes.outputs_N
    found_N = 2 * element_bytes * rows_N * vocabulary
    if element_bytes < 4:
        found_N = found_N + 8 * np.minimum(rows_N, LOSS_CHUNK) * vocabulary
    return found_N + part.trained * element_bytes * hidden * vocabulary


def part_temporary_bytes(
    module: ModuleDescription, part: Part, sizes: TaskSizes, element_bytes: int
) -> Array:
    """The most that what stands around the layers needs, by task."""
    if part.role == "output" and module.kind == "llm":
        return head_temporary_bytes(part, sizes, element_bytes)
    if part.linear is None:  # the LLM's table
        return sizes.units_N * 0.0 + part.trained * element_bytes * module.pre_parameters
    inputs, outputs = part.linear
    rows = {"embedding": sizes.inputs_N, "context": sizes.contexts_N, "output": sizes.outputs_N}
    gradient = part.trained * element_bytes * inputs * outputs
    return 2 * element_bytes * rows[part.role] * max(inputs, outputs) + gradient


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
