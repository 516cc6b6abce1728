"""The operators of a block of a module: what really runs, call by call, in forward and backward.

Numbers of calls and bytes are those of Hugging Face's layers in eager PyTorch on one rank of a
tensor-parallel group: an RMSNorm is six element-wise calls that read or write its input seven
times. They were counted on real layers (tests compare), so efficiencies measured on single
operators apply. Unlike the FLOPs of `torchmm.balance.costs.flops`, what is not mathematics counts
too: padding, and the scores that fused attention works out again in backward; causal attention
skips the masked half.

A compiled layer runs fewer calls; that difference is left to the factors learned from steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

from torchmm.balance.costs.blocks import Block, layer_linears, local_linears
from torchmm.balance.costs.devices import Link
from torchmm.balance.costs.execution import Execution, Recompute
from torchmm.balance.costs.flops import cross_rows
from torchmm.balance.costs.operators import Kind, Operator
from torchmm.balance.costs.sizes import Array, TaskSizes
from torchmm.common.batch import LayerDescription, ModuleDescription

Amount = TypeVar("Amount", float, Array)
LOSS_CHUNK = 1024
"""Targets whose logits are float32 at a time, see `torchmm.models.layers.loss`."""

SCORE_FLOPS = 48
"""What a score's softmax takes on CPUs, in FLOPs of attention's products: measured on lengths of
100 to 512 and heads of 32 to 128. Efficiencies are measured with heads of 64."""

KEPT_KINDS: tuple[Kind, ...] = ("matmul", "attention", "tensor_linear")
"""What selective recomputation does not run again."""
TANH_GELUS = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu-approximate")


class Setting(NamedTuple):
    """What operators depend on beside sizes."""

    execution: Execution
    element_bytes: int
    """Of the compute dtype."""
    tensor_link: Link = "node"
    segment_calls: bool = True
    """Whether attention makes a call per run of equally long segments (CPU), or one for all."""

    accumulated: float = 1.0
    """Share of the backwards that add to gradients of others; a step's first one has none."""

    @property
    def causal_block(self) -> int:
        """Keys that fused attention computes together, masked or not: of torch's kernel for CPUs,
        of FlashAttention."""
        return 512 if self.segment_calls else 128


class Operators(NamedTuple):
    """Operators of one of equal blocks, by pass."""

    forward: list[Operator]
    inputs: list[Operator]
    """Backward for inputs."""
    weights: list[Operator]
    """Backward for weights."""
    again: list[Operator]
    """What backward runs again because it was not kept."""


def block_operators(
    module: ModuleDescription, block: Block, sizes: TaskSizes, setting: Setting
) -> Operators:
    """Operators of one of equal blocks, on one rank."""
    if block.layer is not None:
        return _layer(block.layer, sizes, setting)
    if block.role == "output" and module.kind == "llm":
        return _head(module, block, sizes, setting)
    if block.linear is None:
        return _table(module, sizes, setting) if module.kind == "llm" else Operators([], [], [], [])
    return _linear_block(module, block, sizes, setting)


def accumulate(parameters: float, setting: Setting, tensors: int) -> Operator:
    """Adding new gradients to the float32 sums of a step."""
    bytes_each = setting.accumulated * (8 + setting.element_bytes)
    return Operator("elementwise", memory_bytes=bytes_each * parameters, calls=tensors)


def _layer(layer: LayerDescription, sizes: TaskSizes, setting: Setting) -> Operators:
    passes = Operators([], [], [], [])
    linears = _linears(layer, sizes, setting)
    for found in (
        _norms(layer, sizes, setting),
        linears,
        _attention(layer, sizes, setting),
        _activation(layer.activation, layer.gated_ffn, _ffn(layer, sizes, setting), setting),
        _residuals(layer, sizes, setting),
        _communication(layer, sizes, setting),
    ):
        for every, own in zip(passes, found, strict=True):
            every.extend(own)
    if setting.execution.recompute != "none":
        products = list(local_linears(layer, setting.execution.tensor))
        ends = layer.norm_place == "before"  # else a norm needs the last product
        last = linears.forward[products.index("down")] if ends else None
        passes.again.extend(_again(passes.forward, last, setting.execution.recompute))
    return passes


def _again(forward: list[Operator], last: Operator | None, mode: Recompute) -> Iterator[Operator]:
    """What is run again. torch stops where the last tensor is there that backward needs: in front
    of the layer's last product, whose result is summed over ranks behind it; None: at the end."""
    for operator in forward:
        if operator is last or (mode == "selective" and operator.kind in KEPT_KINDS):
            continue
        share = 1.0
        if last is not None and operator.kind in ("all_reduce", "reduce_scatter"):
            share = 1 - 1 / float(operator.calls)
        yield operator._replace(
            network_bytes=share * operator.network_bytes, calls=share * operator.calls
        )


def _matmul(rows: Array | float, inputs: float, outputs: float, setting: Setting) -> Operator:
    moved = rows * (inputs + outputs) + inputs * outputs
    flops = 2 * rows * inputs * outputs
    return Operator("matmul", flops, memory_bytes=setting.element_bytes * moved)


def _linears(layer: LayerDescription, sizes: TaskSizes, setting: Setting) -> Operators:
    tensor = setting.execution.tensor
    products = [(sizes.units_N, *size) for size in local_linears(layer, tensor).values()]
    if layer.cross_attention:
        linears = layer_linears(layer)
        for name, rows_N in cross_rows(sizes).items():
            inputs, outputs = linears[name]
            products.append((rows_N, inputs, outputs / tensor))
    every = [_matmul(*product, setting) for product in products]
    weights = list(every)
    if layer.norm == "layer" or layer.packed_qkv:  # these families have biases
        summed = sum(rows_N * outputs for rows_N, _, outputs in products)
        bias_bytes = setting.element_bytes * summed
        weights.append(Operator("elementwise", memory_bytes=bias_bytes, calls=len(products)))
    parameters = sum(inputs * outputs for _, inputs, outputs in products)
    weights.append(accumulate(parameters, setting, len(products)))
    return Operators(every, list(every), weights, [])


def _norms(layer: LayerDescription, sizes: TaskSizes, setting: Setting) -> Operators:
    rows_N = sizes.units_N * setting.execution.residual_share
    count = 3 if layer.cross_attention else 2
    count *= 2 if layer.norm_place == "around" else 1
    passes = norm_operators(layer.norm, count * rows_N * layer.hidden_size, count, setting)
    if layer.qk_norm:
        heads = (layer.heads + layer.kv_heads) * layer.head_dim / setting.execution.tensor
        own = norm_operators(layer.norm, sizes.units_N * heads, 2, setting)
        passes = Operators(*(a + b for a, b in zip(passes, own, strict=True)))
    return passes


def norm_operators(kind: str, elements: Array | float, calls: int, setting: Setting) -> Operators:
    """Norms of `elements` values in all; RMSNorms compute in float32, call by call."""
    size, casts = setting.element_bytes, setting.element_bytes < 4
    if kind == "layer":
        forward, inputs, weights = 2 * size, 3 * size, 2 * size
        counts = (1, 1, 0)
    else:
        forward = 20 + 2 * size + (2 * (4 + size) if casts else 0)
        weights = 4 * size
        inputs = 92 - weights
        counts = (8 if casts else 6, 14 if casts else 12, 2)
    each = zip((forward, inputs, weights), counts, strict=True)
    first, second, third = (
        Operator("norm", memory_bytes=bytes_each * elements, calls=calls * count)
        for bytes_each, count in each
    )
    return Operators([first], [second], [third], [])


def _attention(layer: LayerDescription, sizes: TaskSizes, setting: Setting) -> Operators:
    tensor, size = setting.execution.tensor, setting.element_bytes
    query = layer.heads * layer.head_dim / tensor
    key = max(layer.kv_heads / tensor, 1) * layer.head_dim
    units_N, pairs_N = sizes.units_N, sizes.pairs_N(layer.window)
    if layer.causal:
        pairs_N = sizes.causal_pairs_N(layer.window, setting.causal_block)
    if setting.segment_calls:  # work beside the products, as products of heads of 64
        each = (1 + SCORE_FLOPS / (4 * layer.head_dim)) / (1 + SCORE_FLOPS / (4 * 64))
        pairs_N = pairs_N * each
    calls_N = sizes.calls_N(layer.window) if setting.segment_calls else units_N * 0.0 + 1
    forward = [_fused("attention", 4 * query * pairs_N, units_N * 2 * (query + key), calls_N, size)]
    # Five products instead of two: scores are worked out again, and both inputs have gradients.
    inputs = [
        _fused(
            "attention_backward", 10 * query * pairs_N, units_N * 4 * (query + key), calls_N, size
        )
    ]
    if layer.cross_attention:
        pairs_N = sizes.cross_pairs_N
        moved_N = 2 * query * (units_N + sizes.contexts_N)
        calls_N = sizes.images_N if setting.segment_calls else units_N * 0.0 + 1
        forward.append(_fused("attention", 4 * query * pairs_N, moved_N, calls_N, size))
        inputs.append(
            _fused("attention_backward", 10 * query * pairs_N, 2 * moved_N, calls_N, size)
        )
    if layer.rotary:
        # Packed projections come with vision layers, which rotate in float32.
        wide = max(size, 4) if layer.packed_qkv else size
        casts = 4 + 4 * size if wide > size else 0
        rotated_N = units_N * (query + key)
        forward.append(
            Operator("elementwise", memory_bytes=(10 * wide + casts) * rotated_N, calls=10)
        )
        inputs.append(
            Operator("elementwise", memory_bytes=(14 * wide + casts) * rotated_N, calls=14)
        )
    if not layer.batched:
        # Taking the only row of a batch, in backward; packed projections are put together again.
        passes = 6 if layer.packed_qkv else 4
        moved_N = units_N * (query + 2 * key)
        inputs.append(Operator("copy", memory_bytes=passes * size * moved_N, calls=6))
    return Operators(forward, inputs, [], [])


def _fused(kind: Kind, flops: Array, elements: Array, calls: Array, element_bytes: int) -> Operator:
    return Operator(kind, flops, memory_bytes=element_bytes * elements, calls=calls)


def _ffn(layer: LayerDescription, sizes: TaskSizes, setting: Setting) -> Array:
    return sizes.units_N * layer.ffn_size / setting.execution.tensor


def _activation(name: str, gated: bool, elements: Array, setting: Setting) -> Operators:
    """The function inside a feed-forward part, and the product with the gate."""
    size = setting.element_bytes

    def operator(kind: Kind, passes: int, calls: int) -> Operator:
        return Operator(kind, memory_bytes=passes * size * elements, calls=calls)

    kinds: tuple[Kind, Kind] = ("activation", "activation")
    if name in TANH_GELUS:
        kinds = ("gelu_tanh", "gelu_tanh_backward")
    forward, inputs = [operator(kinds[0], 2, 1)], [operator(kinds[1], 3, 1)]
    if name == "quick_gelu":  # x * sigmoid(1.702 x)
        forward.append(operator("elementwise", 5, 2))
        inputs.append(operator("elementwise", 11, 4))
    if gated:
        forward.append(operator("elementwise", 3, 1))
        inputs.append(operator("elementwise", 6, 2))
    return Operators(forward, inputs, [], [])


def _residuals(layer: LayerDescription, sizes: TaskSizes, setting: Setting) -> Operators:
    """Adding to the residual stream; in backward, gradients of what several products read."""
    size, share = setting.element_bytes, setting.execution.residual_share
    elements = sizes.units_N * layer.hidden_size
    adds = 3 if layer.cross_attention else 2
    forward = Operator("elementwise", memory_bytes=3 * adds * size * share * elements, calls=adds)
    readers = (0 if layer.packed_qkv else 2) + int(layer.gated_ffn)
    inputs = [
        forward,
        Operator("elementwise", memory_bytes=3 * readers * size * elements, calls=readers),
    ]
    return Operators([forward], inputs if readers else inputs[:1], [], [])


def _communication(layer: LayerDescription, sizes: TaskSizes, setting: Setting) -> Operators:
    """Of tensor parallelism: sums behind attention and feed-forward, and of gradients before."""
    execution, link = setting.execution, setting.tensor_link
    tensor = execution.tensor
    if tensor == 1:
        return Operators([], [], [], [])
    regions = 3 if layer.cross_attention else 2
    whole = regions * setting.element_bytes * sizes.units_N * layer.hidden_size
    forward = list(_reduction(whole, regions, setting))
    forward.append(Operator("tensor_linear", calls=len(layer_linears(layer))))
    weights = []
    if execution.async_tensor:  # gathered inputs are not kept
        again = whole * (tensor - 1) / tensor
        weights.append(Operator("all_gather", network_bytes=again, calls=regions, link=link))
    replicated = 0
    if layer.packed_qkv:
        replicated = layer.hidden_size * (layer.heads + 2 * layer.kv_heads) * layer.head_dim
    elif layer.kv_heads < tensor:
        replicated = 2 * layer.hidden_size * layer.kv_heads * layer.head_dim
    if layer.packed_gate_up:
        replicated += 2 * layer.hidden_size * layer.ffn_size
    if replicated:
        sent = all_reduce_bytes(setting.element_bytes * replicated, tensor)
        weights.append(Operator("all_reduce", network_bytes=sent, link=link))
    return Operators(forward, list(forward), weights, [])


def _reduction(whole: Array, calls: int, setting: Setting) -> Iterator[Operator]:
    """Sums over the ranks, in one piece or as scatter and gather."""
    execution, link = setting.execution, setting.tensor_link
    size = execution.tensor
    if not execution.sequence_parallel:
        sent = all_reduce_bytes(whole, size)
        yield Operator("all_reduce", network_bytes=sent, calls=calls, link=link)
        return
    sent = whole * (size - 1) / size
    yield Operator("reduce_scatter", network_bytes=sent, calls=calls, link=link)
    yield Operator("all_gather", network_bytes=sent, calls=calls, link=link)
    if execution.async_tensor:
        return
    yield Operator("sequence_exchange", calls=2 * calls)
    if setting.segment_calls:
        # DTensors put the ranks' slices behind each other before they are scattered and behind
        # their being gathered. Counted on CPUs only, where it was measured.
        yield Operator("copy", memory_bytes=4 * whole, calls=2 * calls)


def all_reduce_bytes(whole: Amount, ranks: int) -> Amount:
    """What each rank sends to add up `whole` bytes in a ring."""
    return 2 * whole * (ranks - 1) / ranks


def _table(module: ModuleDescription, sizes: TaskSizes, setting: Setting) -> Operators:
    """The LLM's embedding, in which encoder outputs replace placeholders."""
    hidden, size, tensor = (
        module.layers[0].hidden_size,
        setting.element_bytes,
        setting.execution.tensor,
    )
    row_bytes = size * sizes.inputs_N * hidden
    placed = Operator("copy", memory_bytes=2 * row_bytes, calls=1)
    forward = [placed, placed]
    if tensor > 1:
        sent = all_reduce_bytes(row_bytes, tensor)
        forward.append(Operator("all_reduce", network_bytes=sent, link=setting.tensor_link))
    table = module.pre_parameters / tensor
    # The gradient of a table is as large as the table: zeros, sums into rows, accumulation.
    weights = [
        Operator("copy", memory_bytes=size * table + 2 * row_bytes, calls=2),
        accumulate(table, setting, 1),
    ]
    return Operators(forward, [placed], weights, [])


def _linear_block(
    module: ModuleDescription, block: Block, sizes: TaskSizes, setting: Setting
) -> Operators:
    """A patch embedding, or a linear of a connector with what stands behind it."""
    assert block.linear is not None
    tensor, size, link = setting.execution.tensor, setting.element_bytes, setting.tensor_link
    rows_N = {"embedding": sizes.inputs_N, "context": sizes.contexts_N, "output": sizes.outputs_N}
    own_N, (inputs, outputs) = rows_N[block.role], block.linear
    split = tensor if block.role == "output" and module.kind == "encoder" else 1
    product = _matmul(own_N, inputs, outputs / split, setting)
    passes = Operators(
        [product], [product], [product, accumulate(inputs * outputs / split, setting, 1)], []
    )
    if block.role == "embedding":  # positions are added
        passes.forward.append(Operator("elementwise", memory_bytes=3 * size * own_N * outputs))
    elif not block.first:
        act = _activation("gelu", False, own_N * inputs / split, setting)
        passes.forward.extend(act.forward)
        passes.inputs.extend(act.inputs)
    if split > 1:
        width = outputs if block.last else inputs
        sent = all_reduce_bytes(size * own_N * width, tensor)
        operator = Operator("all_reduce", network_bytes=sent, link=link)
        (passes.forward if block.last else passes.inputs).append(operator)
    return passes


def _head(module: ModuleDescription, block: Block, sizes: TaskSizes, setting: Setting) -> Operators:
    """Final norm of all positions, logits of those with a target, cross entropy."""
    assert block.linear is not None
    tensor, size, link = setting.execution.tensor, setting.element_bytes, setting.tensor_link
    hidden, vocabulary = block.linear
    norm = norm_operators(module.layers[-1].norm, sizes.units_N * hidden, 1, setting)
    product = _matmul(sizes.outputs_N, hidden, vocabulary / tensor, setting)
    logits_N, picked_N = sizes.outputs_N * vocabulary, sizes.outputs_N * hidden
    casts = 4 + size if size < 4 else 0
    loss = Operator("activation", memory_bytes=(8 + casts) * logits_N, calls=2 + (casts > 0))
    pick = Operator("copy", memory_bytes=2 * size * picked_N)
    unpick = Operator("copy", memory_bytes=size * (2 * sizes.units_N * hidden + picked_N), calls=2)
    # Gradient of the picked log-probabilities: zeros, then softmax times their sum.
    back = Operator("activation", memory_bytes=(16 + casts) * logits_N, calls=3 + (casts > 0))
    forward = [*norm.forward, pick, product, loss]
    inputs = [*norm.inputs, unpick, product, back]
    weights = [*norm.weights, product, accumulate(hidden * vocabulary / tensor, setting, 1)]
    if tensor > 1:
        gathered = size * logits_N * (tensor - 1) / tensor
        forward.append(Operator("all_gather", network_bytes=gathered, link=link))
        sent = all_reduce_bytes(size * picked_N, tensor)
        inputs.append(Operator("all_reduce", network_bytes=sent, link=link))
    again = []
    if size < 4:  # chunks of logits are cast again
        many_N = (sizes.outputs_N > LOSS_CHUNK).astype(float)
        again.append(
            loss._replace(memory_bytes=loss.memory_bytes * many_N, calls=loss.calls * many_N)
        )
    return Operators(forward, inputs, weights, again)
