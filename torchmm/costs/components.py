"""Components of a transformer layer and their costs.

A layer is a list of components, in the order of `LAYER_COMPONENTS`. A component class defines its
weights, FLOPs, operators and bytes. `layers.py` adds them up, together with the operators of every
sublayer: norm, matmuls, residual addition and tensor-parallel reduction. A new layer type is one
more class and one more entry of the list:

    LayerDescription              sizes, from `describe_layer` of a model family
      |  applies_to
    Attention, FeedForward, ...   one object per component of the layer
      |  linears, flops_N, operators, saved_bytes, ...
    layers.py                     sums: costs of the layer

The shape suffix N means tasks.
"""

from __future__ import annotations

from torchmm.common.layers import LayerDescription, ModuleDescription
from torchmm.costs.component import (
    Experts,
    FeedForward,
    LayerComponent,
    Linear,
    SharedExpert,
    TemporaryBytes,
    head_exchange_operators,
)
from torchmm.costs.execution import CostSetting, Execution
from torchmm.costs.mixers import AdapterComponent, DeltaNet, ShortConvolution
from torchmm.costs.operators import (
    Operator,
    OperatorKind,
    PassOperators,
    all_reduce_bytes,
    norm_operators,
)
from torchmm.costs.sizes import Array, TaskSizes

TIME_WIDTH = 7
"""Width of the time embedding of a generated image, in multiples of the hidden size.

It has shift, scale and gate for attention and MLP (6), and one value for the output."""
MODULATIONS = 8
"""Width of the modulations that a layer saves, in multiples of the hidden size.

These are shift, scale and gate for attention and MLP (6), and both scales again."""
SCORE_FLOPS = 48
"""Time of the softmax of an attention score on CPUs, in FLOPs of attention matmuls.

It was measured on lengths of 100 to 512 and head sizes of 32 to 128. Attention efficiencies are
measured with a head size of 64."""


class Attention(LayerComponent):
    """Self-attention with its four projections."""

    is_residual_branch = True

    @classmethod
    def applies_to(cls, layer: LayerDescription) -> bool:
        """Return True for layers with standard self-attention."""
        return layer.mixer is None and not layer.output_gate and not layer.key_value_rank

    def extra_input_readers(self) -> int:
        """Return the number of key and value projections that are separate from the queries."""
        return 0 if self.layer.packed_qkv else 2 - self.layer.value_is_key

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return the projections. Other weights, such as gates, are one linear layer."""
        hidden = self.layer.hidden_size
        query = self.layer.heads * self.layer.head_dim
        key_value = self.layer.kv_heads * self.layer.head_dim
        others = self.layer.extra_matmul_weights // hidden
        value = {} if self.layer.value_is_key else {"value": (hidden, key_value)}
        return {
            "query": (hidden, query),
            "key": (hidden, key_value),
            **value,
            **({"other": (hidden, others)} if others else {}),
            "attention_output": (query, hidden),
        }

    def sharded_linears(self, tensor: int) -> dict[str, Linear]:
        """Return the shards. KV heads are replicated if there are fewer of them than ranks."""
        linears = self.linears()
        inputs, outputs = linears["attention_output"]
        shards = super().sharded_linears(tensor) | {"attention_output": (inputs / tensor, outputs)}
        if self.layer.kv_heads < tensor:
            shards |= {name: linears[name] for name in ("key", "value") if name in linears}
        return shards

    def local_linears(self, tensor: int) -> dict[str, Linear]:
        """Return the matmuls of a rank. Packed projections are one matmul."""
        local = self.sharded_linears(tensor)
        if self.layer.packed_qkv:
            query, key, value = (local.pop(name) for name in ("query", "key", "value"))
            local = {"qkv": (query[0], query[1] + key[1] + value[1])} | local
        return local

    def replicated_linears(self, tensor: int) -> tuple[str, ...]:
        """Return packed projections, or keys and values with fewer heads than ranks."""
        if self.layer.packed_qkv:
            return "query", "key", "value"
        if self.layer.kv_heads >= tensor:
            return ()
        return ("key",) if self.layer.value_is_key else ("key", "value")

    def pair_flops_N(self, sizes: TaskSizes) -> Array | float:
        """Return the FLOPs of scores and of weighted sums of values."""
        layer = self.layer
        widths = layer.head_dim + (layer.value_dim or layer.head_dim)
        return 2 * layer.heads * widths * sizes.pairs_N(layer.window, in_blocks=not layer.causal)

    def operators(self, sizes: TaskSizes, setting: CostSetting) -> PassOperators:
        """Return one fused kernel per pass."""
        layer = self.layer
        units_N = sizes.units_N
        pairs_N = sizes.pairs_N(layer.window, in_blocks=not layer.causal)
        if layer.causal:
            pairs_N = sizes.causal_pairs_N(layer.window, setting.causal_block)
        if setting.calls_per_segment:  # softmax, relative to a head size of 64
            each = (1 + SCORE_FLOPS / (4 * layer.head_dim)) / (1 + SCORE_FLOPS / (4 * 64))
            pairs_N = pairs_N * each
        calls_N = sizes.calls_N(layer.window) if setting.calls_per_segment else units_N * 0.0 + 1
        query, key = attended_widths(layer, setting.execution)
        size = setting.element_bytes
        moved_N = units_N * 2 * (query + key)
        forward = _attention_operator("attention", 4 * query * pairs_N, moved_N, calls_N, size)
        # Five matmuls instead of two: recomputed scores, and gradients of both inputs of both
        # matmuls.
        backward = _attention_operator(
            "attention_backward", 10 * query * pairs_N, 2 * moved_N, calls_N, size
        )
        return PassOperators([forward], [backward], [], [])

    def saved_bytes(self, sizes: TaskSizes, setting: CostSetting, weights: bool) -> Array | float:
        """Return the bytes of queries, keys, values, and the result of fused attention."""
        shares = setting.execution.context > 1
        query, key = attended_widths(self.layer, setting.execution)
        # Saving a slice of a packed result saves the full tensor.
        values = query + 2 * key if self.layer.packed_qkv and not shares else key
        inputs_N = setting.element_bytes * sizes.units_N * (query + key + values)
        if self.layer.has_eager_scores and not weights:  # no linear layer saves the result
            return inputs_N
        if shares and (weights or self.layer.output_gate) and not self.layer.has_eager_scores:
            # The result is saved twice: by tokens for the linear layer or gate, and by heads for
            # attention.
            inputs_N = inputs_N + setting.element_bytes * sizes.units_N * query
        return self._result_bytes(sizes, setting) + inputs_N

    def saved_results_bytes(self, sizes: TaskSizes, setting: CostSetting) -> Array | float:
        """Return the bytes of results of linear layers and of attention."""
        return super().saved_results_bytes(sizes, setting) + self._result_bytes(sizes, setting)

    def _result_bytes(self, sizes: TaskSizes, setting: CostSetting) -> Array | float:
        """Return the bytes of the attention result, and of log-sum-exp per head and position."""
        query, _ = head_widths(self.layer, setting.execution)
        result_N = setting.element_bytes * sizes.units_N * query
        if self.layer.has_eager_scores:  # recomputed from queries, keys and values
            return result_N
        return result_N + 4 * self.layer.heads / setting.execution.tensor * sizes.units_N

    def temporaries(self, sizes: TaskSizes, setting: CostSetting) -> TemporaryBytes:
        """Return the bytes of projections and their gradients."""
        units_N = sizes.units_N
        size = setting.element_bytes
        query, key = head_widths(self.layer, setting.execution)
        # Some encoders apply rotary embeddings in float32: copies, products and their sums.
        projected_N = size * units_N * (query + 2 * key + self.layer.hidden_size)
        return TemporaryBytes(
            projected_N + 20 * units_N * query, 2 * size * units_N * (query + 2 * key)
        )

    def communication(self, sizes: TaskSizes, setting: CostSetting) -> PassOperators:
        """Return the all-to-all of queries, keys and values, and of the result."""
        layer = self.layer
        query, key = attended_widths(layer, setting.execution)
        values = (layer.value_dim or layer.head_dim) / layer.head_dim
        return head_exchange_operators((query, key, values * key), values * query, sizes, setting)


class GatedAttention(Attention):
    """Self-attention with an output gate, which the query projection computes."""

    @classmethod
    def applies_to(cls, layer: LayerDescription) -> bool:
        """Return True for attention layers with an output gate."""
        return layer.output_gate and layer.mixer is None

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return the projections. The query projection has twice the outputs."""
        linears = super().linears()
        hidden, query = linears["query"]
        return linears | {"query": (hidden, 2 * query)}

    def operators(self, sizes: TaskSizes, setting: CostSetting) -> PassOperators:
        """Return attention and the gate.

        The gate is a sigmoid and a multiplication. The backward pass has two more multiplications,
        and concatenates the gradients of queries and gate.
        """
        passes = super().operators(sizes, setting)
        query, _ = head_widths(self.layer, setting.execution)
        moved_N = setting.element_bytes * sizes.units_N * query
        fused = setting.execution.compiled
        # If fused, the forward pass reads result and gate and writes one tensor. The backward pass
        # also reads a gradient, and writes two.
        for of_pass, passed, calls in (
            (passes.forward, *((3, 1) if fused else (6, 3))),
            (passes.inputs, *((5, 1) if fused else (14, 6))),
        ):
            of_pass.append(Operator("elementwise", memory_bytes=passed * moved_N, calls=calls))
        return passes

    def saved_bytes(self, sizes: TaskSizes, setting: CostSetting, weights: bool) -> Array | float:
        """Return the bytes of attention, of the gate and its sigmoid, and of the gated result."""
        query, _ = head_widths(self.layer, setting.execution)
        # In float32, the query norm saves the full result of the query projection with the gate.
        tensors = 1 + weights + (setting.element_bytes == 4)
        gates_N = setting.element_bytes * sizes.units_N * query * tensors
        return super().saved_bytes(sizes, setting, weights) + gates_N


class LatentAttention(Attention):
    """Multi-head latent attention (MLA, DeepSeek).

    Keys and values are projections of a low-rank latent vector. The rotary part of keys is shared
    by all heads. Values are padded to the width of keys for the kernels, which is included in time
    and memory.
    """

    @classmethod
    def applies_to(cls, layer: LayerDescription) -> bool:
        """Return True for layers with latent keys and values."""
        return bool(layer.key_value_rank)

    def extra_input_readers(self) -> int:
        """Return 1, because the latent projection reads the input of the query projection."""
        return 1

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return down and up projections. Only some models have latent queries."""
        layer = self.layer
        hidden = layer.hidden_size
        queries = layer.heads * layer.head_dim
        rank = layer.key_value_rank
        up = layer.heads * (layer.head_dim - layer.shared_key_dim + layer.value_dim)
        query = {"query": (hidden, queries)}
        if layer.query_rank:
            query = {
                "query_down": (hidden, layer.query_rank),
                "query": (layer.query_rank, queries),
            }
        return query | {
            "key_value_down": (hidden, rank + layer.shared_key_dim),
            "key_value": (rank, up),
            "attention_output": (layer.heads * layer.value_dim, hidden),
        }

    def sharded_linears(self, tensor: int) -> dict[str, Linear]:
        """Return the shards. Heads are sharded, latent projections are replicated."""
        whole = {name: self.linears()[name] for name in self.replicated_linears(tensor)}
        return super().sharded_linears(tensor) | whole

    def inner_norms(self, sizes: TaskSizes, setting: CostSetting) -> PassOperators:
        """Return the norms of latent vectors."""
        ranks = self._ranks()
        return norm_operators(self.layer.norm, sizes.units_N * sum(ranks), len(ranks), setting)

    def saved_bytes(self, sizes: TaskSizes, setting: CostSetting, weights: bool) -> Array | float:
        """Return the saved bytes.

        They are queries, keys, the up projection of keys and values, the result, and latent
        vectors before and after their norms.
        """
        layer = self.layer
        size = setting.element_bytes
        tensor = setting.execution.tensor
        _, up = self.linears()["key_value"]
        wide = layer.heads * (2 * layer.head_dim + layer.value_dim) + up
        ranks = self._ranks()
        few_N = sizes.units_N * sum(ranks)
        normed_N = norm_input_saved_bytes(layer, few_N, setting, weights)
        scales_N = 4 * norm_scales(layer.norm) * len(ranks) * sizes.units_N
        statistics_N = 4 * layer.heads / tensor * sizes.units_N
        kept_N = size * (sizes.units_N * wide / tensor + weights * few_N)
        return kept_N + normed_N + scales_N + statistics_N

    def _ranks(self) -> list[int]:
        """Return the latent sizes of keys and values and, if latent, of queries."""
        return [rank for rank in (self.layer.key_value_rank, self.layer.query_rank) if rank]

    def replicated_linears(self, tensor: int) -> tuple[str, ...]:
        """Return the latent projections."""
        down = ("query_down", "key_value_down")
        return tuple(name for name in down if name in self.linears())


class CrossAttention(Attention):
    """Cross-attention of generators to their context, with the sizes of self-attention."""

    reads_context = True

    def extra_input_readers(self) -> int:
        """Return 0, because keys and values read the context."""
        return 0

    @classmethod
    def applies_to(cls, layer: LayerDescription) -> bool:
        """Return True for layers with cross-attention."""
        return layer.cross_attention

    def rows_N(self, name: str, sizes: TaskSizes) -> Array:
        """Return context tokens for keys and values, otherwise positions."""
        return sizes.contexts_N if name in ("key", "value") else sizes.units_N

    def pair_flops_N(self, sizes: TaskSizes) -> Array | float:
        """Return the FLOPs of scores and of weighted sums of values."""
        return 4 * self.layer.heads * self.layer.head_dim * sizes.cross_pairs_N

    def operators(self, sizes: TaskSizes, setting: CostSetting) -> PassOperators:
        """Return one fused kernel per pass."""
        units_N = sizes.units_N
        pairs_N = sizes.cross_pairs_N
        size = setting.element_bytes
        query, _ = head_widths(self.layer, setting.execution)
        moved_N = 2 * query * (units_N + sizes.contexts_N)
        calls_N = sizes.images_N if setting.calls_per_segment else units_N * 0.0 + 1
        forward = _attention_operator("attention", 4 * query * pairs_N, moved_N, calls_N, size)
        backward = _attention_operator(
            "attention_backward", 10 * query * pairs_N, 2 * moved_N, calls_N, size
        )
        return PassOperators([forward], [backward], [], [])

    def saved_bytes(self, sizes: TaskSizes, setting: CostSetting, weights: bool) -> Array | float:
        """Return the saved bytes.

        - Queries, keys, values, the result and its log-sum-exp.
        - If weights are trained, the input of a linear layer, and the tensors that the time
          embedding scales: the results of both norms, of attention and of the MLP.
        - Shifts, scales and gates of the time embedding per image.
        - Masks per head, which images of different sizes require.
        """
        linears = self.linears()
        tensor = setting.execution.tensor
        query, key = (linears[name][1] / tensor for name in ("query", "key"))
        read = weights * (1 + 4 * setting.execution.residual_fraction)
        kept_N = sizes.units_N * (2 * query + read * self.layer.hidden_size)
        kept_N = kept_N + MODULATIONS * sizes.images_N * self.layer.hidden_size
        kept_N = setting.element_bytes * (kept_N + sizes.contexts_N * 2 * key)
        masks_N = setting.element_bytes * (sizes.units_N + sizes.contexts_N)
        return kept_N + self.layer.heads / tensor * (4 * sizes.units_N + masks_N)

    def temporaries(self, sizes: TaskSizes, setting: CostSetting) -> TemporaryBytes:
        """Return 0, because self-attention has at least the same temporaries."""
        return TemporaryBytes(0.0, 0.0)

    def communication(self, sizes: TaskSizes, setting: CostSetting) -> PassOperators:
        """Return the all-reduce of the context gradient over tensor-parallel ranks.

        Each rank computes the gradient of its heads.
        """
        passes = PassOperators.empty()
        if setting.execution.tensor > 1:
            whole_N = setting.element_bytes * sizes.contexts_N * self.layer.hidden_size
            sent_N = all_reduce_bytes(whole_N, setting.execution.tensor)
            link = setting.tensor_link
            passes.inputs.append(Operator("all_reduce", network_bytes=sent_N, link=link))
        return passes


class HeadTransforms(LayerComponent):
    """Norms, rotary embeddings and copies of queries and keys between projection and attention."""

    @classmethod
    def applies_to(cls, layer: LayerDescription) -> bool:
        """Return True for layers with attention."""
        return layer.mixer is None

    def inner_norms(self, sizes: TaskSizes, setting: CostSetting) -> PassOperators:
        """Return the norms of queries, keys and values."""
        layer = self.layer
        if not layer.qk_norm:
            return PassOperators.empty()
        heads = layer.heads + (2 if layer.value_norm else 1) * layer.kv_heads
        width = heads * layer.head_dim / setting.execution.tensor
        calls = 3 if layer.value_norm else 2
        elements_N = sizes.units_N * width
        return norm_operators(layer.norm, elements_N, calls, setting, layer.norm_weight_float32)

    def operators(self, sizes: TaskSizes, setting: CostSetting) -> PassOperators:
        """Return rotary embeddings and copies."""
        layer = self.layer
        size = setting.element_bytes
        query, key = head_widths(layer, setting.execution)
        passes = PassOperators.empty()
        if layer.rotary and setting.execution.compiled:
            # After norms, the forward pass reads the tensor again that their sums have read.
            for of_pass, passed in (
                (passes.forward, 1 if layer.qk_norm else 2),
                (passes.inputs, 2),
            ):
                moved_N = passed * size * sizes.units_N * (query + key)
                of_pass.append(Operator("elementwise", memory_bytes=moved_N, calls=2))
        elif layer.rotary:
            wide = max(size, 4) if layer.rotary_float32 else size
            casts = 4 + 4 * size if wide > size else 0
            rotated_N = sizes.units_N * (query + key)
            for of_pass, count in ((passes.forward, 10), (passes.inputs, 14)):
                moved_N = (count * wide + casts) * rotated_N
                of_pass.append(Operator("elementwise", memory_bytes=moved_N, calls=count))
        if setting.execution.compiled:
            # Gradients of values are made contiguous. Those of packed projections are concatenated.
            joined = 2 * (query + 2 * key) if layer.packed_qkv else 2 * key
            moved_N = size * sizes.units_N * joined
            passes.inputs.append(Operator("copy", memory_bytes=moved_N, calls=1))
        elif not layer.batched:
            # Backward pass of selecting the only sequence of a batch. Gradients of packed
            # projections are also concatenated, in LLMs as a sum of slices.
            times, calls = 4, 6
            if layer.packed_qkv:
                times, calls = (15, 14) if layer.causal else (6, 6)
            moved_N = times * size * (sizes.units_N * (query + 2 * key))
            passes.inputs.append(Operator("copy", memory_bytes=moved_N, calls=calls))
        return passes

    def saved_bytes(self, sizes: TaskSizes, setting: CostSetting, weights: bool) -> Array | float:
        """Return the bytes that norms of queries, keys and values save."""
        layer = self.layer
        if not layer.qk_norm:
            return 0.0
        query, key = head_widths(layer, setting.execution)
        normed_N = sizes.units_N * (query + key)
        norm_weights = weights and not layer.adapters
        kept_N = norm_input_saved_bytes(layer, normed_N, setting, norm_weights)
        if layer.value_norm:
            kept_N = kept_N + norm_input_saved_bytes(
                layer, sizes.units_N * key, setting, weights=False
            )
            normed_N = normed_N + sizes.units_N * key
        return kept_N + 4 * norm_scales(layer.norm) * normed_N / layer.head_dim


LAYER_COMPONENTS: list[type[LayerComponent]] = [
    Attention,
    GatedAttention,
    LatentAttention,
    DeltaNet,
    ShortConvolution,
    CrossAttention,
    HeadTransforms,
    FeedForward,
    Experts,
    SharedExpert,
    AdapterComponent,
]
"""Component classes, in the order of their operators."""


def layer_components(layer: LayerDescription) -> list[LayerComponent]:
    """Return the components of a layer."""
    return [kind(layer) for kind in LAYER_COMPONENTS if kind.applies_to(layer)]


def generator_outside_bytes(
    module: ModuleDescription, start: int, stop: int, sizes: TaskSizes, setting: CostSetting
) -> Array:
    """Return the bytes that a generator stage saves outside of layers and linear layers, by task.

    They are the context that all layers read (unless it is the received message), and masks. The
    first stage also saves time embeddings. The last stage also saves input and output of the last
    norm, and float32 errors of the loss.

    Args:
        module: Complete module.
        start: First layer.
        stop: Layer after the last layer.
        sizes: Sizes of the tasks.
        setting: Execution of the module.
    """
    hidden = module.layers[0].hidden_size
    size = setting.element_bytes
    copied_N = (start == 0) | (sizes.contexts_N > sizes.context_inputs_N)
    kept_N = size * (copied_N * sizes.contexts_N * hidden + sizes.units_N + sizes.contexts_N)
    if start == 0:
        kept_N = kept_N + size * TIME_WIDTH * hidden * sizes.images_N
    if stop == len(module.layers):
        values = module.head_linears[-1][1] if module.head_linears else 0
        norm_N = (1 + module.trainable) * sizes.units_N + 2 * sizes.images_N
        kept_N = kept_N + size * hidden * norm_N + (8 + 4 * values) * sizes.units_N
    return kept_N


def head_widths(layer: LayerDescription, execution: Execution) -> tuple[float, float]:
    """Return the number of query features and of key features of a tensor-parallel rank."""
    query = layer.heads * layer.head_dim / execution.tensor
    return query, max(layer.kv_heads / execution.tensor, 1) * layer.head_dim


def attended_widths(layer: LayerDescription, execution: Execution) -> tuple[float, float]:
    """Return the number of query and key features per token in attention.

    A context-parallel rank has at least one full key head, which other ranks can also have.
    """
    query, key = head_widths(layer, execution)
    return query, max(key, execution.context * layer.head_dim)


def norm_saved_bytes(kind: str, elements: Array, element_bytes: int, weights: bool) -> Array:
    """Return the bytes that a norm saves.

    They are its input, or two float32 differences from the mean. If the weight is trained, the
    result before the weight is also saved.

    Args:
        kind: Norm type: "layer", "rms" or "centered".
        elements: Number of values, by task.
        element_bytes: Bytes of an element.
        weights: Whether the weight of the norm is trained.
    """
    if kind == "layer":
        return element_bytes * elements
    if kind == "centered":
        return (8 + element_bytes * weights) * elements
    return (4 + element_bytes * weights) * elements


def norm_input_saved_bytes(
    layer: LayerDescription, elements: Array, setting: CostSetting, weights: bool
) -> Array:
    """Return the bytes that a norm of a layer saves. A compiled norm saves only its input."""
    if setting.execution.compiled:
        return setting.element_bytes * elements
    return norm_saved_bytes(layer.norm, elements, norm_element_bytes(layer, setting), weights)


def norm_scales(kind: str) -> int:
    """Return the number of float32 statistics that a norm saves per position."""
    return 2 if kind == "layer" else 1


def norm_element_bytes(layer: LayerDescription, setting: CostSetting) -> int:
    """Return the bytes of an element that is multiplied by the weight of a norm."""
    return 4 if layer.norm_weight_float32 else setting.element_bytes


def _attention_operator(
    kind: OperatorKind, flops: Array, elements: Array, calls: Array, element_bytes: int
) -> Operator:
    return Operator(kind, flops, memory_bytes=element_bytes * elements, calls=calls)
