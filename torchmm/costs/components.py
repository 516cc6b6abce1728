"""The components of a transformer layer: everything that is known of what each of them costs.

A layer is a row of components, in the order of `LAYER_COMPONENTS`. What a component has of its own
(weights, FLOPs, operators, bytes) is said here and nowhere else; `layers.py` adds it up, together
with what every sublayer has: a norm, matrix products, an addition to the residual stream, a sum
over tensor-parallel ranks. A new kind of layer is one more class, and one more entry of the table:

    LayerDescription            sizes, as `describe_layer` of a model family gives them
      |  is_in
    Attention, FeedForward, ... one object for each component that the layer has
      |  linears, flops, operators, kept_bytes, ...
    layers.py                   sums: what a layer costs

Shape suffix N: tasks.
"""

from __future__ import annotations

from torchmm.common.layers import LayerDescription, ModuleDescription
from torchmm.costs.component import (
    Component,
    Experts,
    FeedForward,
    Linear,
    SharedExpert,
    Temporaries,
    exchange_of_heads,
)
from torchmm.costs.execution import Execution, Setting
from torchmm.costs.mixers import Adapters, DeltaNet, ShortConvolution
from torchmm.costs.operators import (
    Kind,
    Operator,
    Operators,
    all_reduce_bytes,
    norm_operators,
)
from torchmm.costs.sizes import Array, TaskSizes

TIME_WIDTH = 7
"""Features of an image's embedded time in a generator, by features of its layers: a shift, a scale
and a gate for both parts of a layer, and one for the output."""
MODULATIONS = 8
"""The same of what a layer keeps of them: the first six, and both scales once more."""
SCORE_FLOPS = 48
"""What a score's softmax takes on CPUs, in FLOPs of attention's products: measured on lengths of
100 to 512 and heads of 32 to 128. Efficiencies are measured with heads of 64."""


class Attention(Component):
    """Attention of a layer's positions to each other, with its four projections."""

    sublayer = True

    @classmethod
    def is_in(cls, layer: LayerDescription) -> bool:
        """Of layers without something else in its place."""
        return layer.mixer is None and not layer.output_gate and not layer.key_value_rank

    def extra_readers(self) -> int:
        """Keys and values, unless one linear gives them with the queries."""
        return 0 if self.layer.packed_qkv else 2 - self.layer.value_is_key

    def linears(self) -> dict[str, tuple[int, int]]:
        """Projections; keys and values may have fewer heads; all others (gates) count as one."""
        hidden = self.layer.hidden_size
        query = self.layer.heads * self.layer.head_dim
        key_value = self.layer.kv_heads * self.layer.head_dim
        others = self.layer.other_weights // hidden
        value = {} if self.layer.value_is_key else {"value": (hidden, key_value)}
        return {
            "query": (hidden, query),
            "key": (hidden, key_value),
            **value,
            **({"other": (hidden, others)} if others else {}),
            "attention_output": (query, hidden),
        }

    def sharded_linears(self, tensor: int) -> dict[str, Linear]:
        """Heads are divided; keys and values of too few heads are whole, and one head is used."""
        linears = self.linears()
        inputs, outputs = linears["attention_output"]
        own = super().sharded_linears(tensor) | {"attention_output": (inputs / tensor, outputs)}
        if self.layer.kv_heads < tensor:
            own |= {name: linears[name] for name in ("key", "value") if name in linears}
        return own

    def local_linears(self, tensor: int) -> dict[str, Linear]:
        """Packed projections are one product."""
        own = self.sharded_linears(tensor)
        if self.layer.packed_qkv:
            query, key, value = (own.pop(name) for name in ("query", "key", "value"))
            own = {"qkv": (query[0], query[1] + key[1] + value[1])} | own
        return own

    def replicated(self, tensor: int) -> tuple[str, ...]:
        """Packed projections, or keys and values of too few heads."""
        if self.layer.packed_qkv:
            return "query", "key", "value"
        if self.layer.kv_heads >= tensor:
            return ()
        return ("key",) if self.layer.value_is_key else ("key", "value")

    def pair_flops_N(self, sizes: TaskSizes) -> Array | float:
        """Scores, and the sums of values."""
        layer = self.layer
        widths = layer.head_dim + (layer.value_dim or layer.head_dim)
        return 2 * layer.heads * widths * sizes.pairs_N(layer.window, apart=not layer.causal)

    def operators(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """One fused kernel, for each pass."""
        layer = self.layer
        units_N = sizes.units_N
        pairs_N = sizes.pairs_N(layer.window, apart=not layer.causal)
        if layer.causal:
            pairs_N = sizes.causal_pairs_N(layer.window, setting.causal_block)
        if setting.segment_calls:  # work besides the products, as products of heads of 64
            each = (1 + SCORE_FLOPS / (4 * layer.head_dim)) / (1 + SCORE_FLOPS / (4 * 64))
            pairs_N = pairs_N * each
        calls_N = sizes.calls_N(layer.window) if setting.segment_calls else units_N * 0.0 + 1
        query, key = attended_widths(layer, setting.execution)
        size = setting.element_bytes
        moved_N = units_N * 2 * (query + key)
        forward = _fused("attention", 4 * query * pairs_N, moved_N, calls_N, size)
        # Five products instead of two: scores are computed again, and both inputs have gradients.
        backward = _fused("attention_backward", 10 * query * pairs_N, 2 * moved_N, calls_N, size)
        return Operators([forward], [backward], [], [])

    def kept_bytes(self, sizes: TaskSizes, setting: Setting, weights: bool) -> Array | float:
        """Queries, keys, values, and what fused attention keeps."""
        shares = setting.execution.context > 1
        query, key = attended_widths(self.layer, setting.execution)
        # Who keeps a slice of packed results keeps all of them.
        values = query + 2 * key if self.layer.packed_qkv and not shares else key
        inputs_N = setting.element_bytes * sizes.units_N * (query + key + values)
        if self.layer.plain_scores and not weights:  # nor does a linear keep the result
            return inputs_N
        if shares and (weights or self.layer.output_gate) and not self.layer.plain_scores:
            # A linear or gate keeps its own tokens of it, attention its heads.
            inputs_N = inputs_N + setting.element_bytes * sizes.units_N * query
        return self._result_bytes(sizes, setting) + inputs_N

    def kept_results_bytes(self, sizes: TaskSizes, setting: Setting) -> Array | float:
        """With the result of attention."""
        return super().kept_results_bytes(sizes, setting) + self._result_bytes(sizes, setting)

    def _result_bytes(self, sizes: TaskSizes, setting: Setting) -> Array | float:
        """The result of attention, and a float32 statistic for every head and position."""
        query, _ = head_widths(self.layer, setting.execution)
        result_N = setting.element_bytes * sizes.units_N * query
        if self.layer.plain_scores:  # computed again from queries, keys and values
            return result_N
        return result_N + 4 * self.layer.heads / setting.execution.tensor * sizes.units_N

    def temporaries(self, sizes: TaskSizes, setting: Setting) -> Temporaries:
        """Projections and their gradients."""
        units_N = sizes.units_N
        size = setting.element_bytes
        query, key = head_widths(self.layer, setting.execution)
        # Some towers rotate queries and keys in float32: copies, products and their sums.
        projected_N = size * units_N * (query + 2 * key + self.layer.hidden_size)
        return Temporaries(
            projected_N + 20 * units_N * query, 2 * size * units_N * (query + 2 * key)
        )

    def exchange(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """Queries, keys and values, and the result."""
        layer = self.layer
        query, key = attended_widths(layer, setting.execution)
        values = (layer.value_dim or layer.head_dim) / layer.head_dim
        return exchange_of_heads((query, key, values * key), values * query, sizes, setting)


class GatedAttention(Attention):
    """Attention whose result is multiplied by a gate, which the queries' linear gives too."""

    @classmethod
    def is_in(cls, layer: LayerDescription) -> bool:
        """As the description says."""
        return layer.output_gate and layer.mixer is None

    def linears(self) -> dict[str, tuple[int, int]]:
        """Twice as many rows for queries."""
        linears = super().linears()
        hidden, query = linears["query"]
        return linears | {"query": (hidden, 2 * query)}

    def operators(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """With the gate: sigmoid and product; in backward two products more, and both joined."""
        passes = super().operators(sizes, setting)
        query, _ = head_widths(self.layer, setting.execution)
        moved_N = setting.element_bytes * sizes.units_N * query
        fused = setting.execution.compiled
        # Fused, result and gate make one tensor, and in backward, with its gradient, two.
        for own, passed, calls in (
            (passes.forward, *((3, 1) if fused else (6, 3))),
            (passes.inputs, *((5, 1) if fused else (14, 6))),
        ):
            own.append(Operator("elementwise", memory_bytes=passed * moved_N, calls=calls))
        return passes

    def kept_bytes(self, sizes: TaskSizes, setting: Setting, weights: bool) -> Array | float:
        """The gate, before and after its sigmoid, and the gated result, which a linear reads."""
        query, _ = head_widths(self.layer, setting.execution)
        # In float32 the norm of queries keeps all of what their linear gave, gate and all.
        tensors = 1 + weights + (setting.element_bytes == 4)
        gates_N = setting.element_bytes * sizes.units_N * query * tensors
        return super().kept_bytes(sizes, setting, weights) + gates_N


class LatentAttention(Attention):
    """Attention whose keys and values are products of few features (DeepSeek's MLA).

    A part of each key, with its position, is the same for all heads. Values are padded to the width
    of keys for the kernels, which this takes time and memory for.
    """

    @classmethod
    def is_in(cls, layer: LayerDescription) -> bool:
        """As the description says."""
        return bool(layer.key_value_rank)

    def extra_readers(self) -> int:
        """The product that gives the few features reads what queries do."""
        return 1

    def linears(self) -> dict[str, tuple[int, int]]:
        """Down to few features and up to all heads, for queries only in some models."""
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
        """Heads are divided; every rank has the few features."""
        whole = {name: self.linears()[name] for name in self.replicated(tensor)}
        return super().sharded_linears(tensor) | whole

    def inner_norms(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """Of the few features."""
        ranks = self._ranks()
        return norm_operators(self.layer.norm, sizes.units_N * sum(ranks), len(ranks), setting)

    def kept_bytes(self, sizes: TaskSizes, setting: Setting, weights: bool) -> Array | float:
        """Queries, keys, what keys and values come from, the result; few features, before and
        behind their norms."""
        layer = self.layer
        size = setting.element_bytes
        tensor = setting.execution.tensor
        _, up = self.linears()["key_value"]
        wide = layer.heads * (2 * layer.head_dim + layer.value_dim) + up
        ranks = self._ranks()
        few_N = sizes.units_N * sum(ranks)
        normed_N = normed_kept_bytes(layer, few_N, setting, weights)
        scales_N = 4 * norm_scales(layer.norm) * len(ranks) * sizes.units_N
        statistics_N = 4 * layer.heads / tensor * sizes.units_N
        kept_N = size * (sizes.units_N * wide / tensor + weights * few_N)
        return kept_N + normed_N + scales_N + statistics_N

    def _ranks(self) -> list[int]:
        """Numbers of few features: of keys and values, and of queries where they have some."""
        return [rank for rank in (self.layer.key_value_rank, self.layer.query_rank) if rank]

    def replicated(self, tensor: int) -> tuple[str, ...]:
        """Those down to few features."""
        down = ("query_down", "key_value_down")
        return tuple(name for name in down if name in self.linears())


class CrossAttention(Attention):
    """A second attention of the same sizes that reads the context (generators)."""

    reads_context = True

    def extra_readers(self) -> int:
        """Keys and values read the context, which is not the layer's own."""
        return 0

    @classmethod
    def is_in(cls, layer: LayerDescription) -> bool:
        """As the description says."""
        return layer.cross_attention

    def rows_N(self, name: str, sizes: TaskSizes) -> Array:
        """Keys and values are those of the context."""
        return sizes.contexts_N if name in ("key", "value") else sizes.units_N

    def pair_flops_N(self, sizes: TaskSizes) -> Array | float:
        """Scores, and the sums of values."""
        return 4 * self.layer.heads * self.layer.head_dim * sizes.cross_pairs_N

    def operators(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """One fused kernel for each pass."""
        units_N = sizes.units_N
        pairs_N = sizes.cross_pairs_N
        size = setting.element_bytes
        query, _ = head_widths(self.layer, setting.execution)
        moved_N = 2 * query * (units_N + sizes.contexts_N)
        calls_N = sizes.images_N if setting.segment_calls else units_N * 0.0 + 1
        forward = _fused("attention", 4 * query * pairs_N, moved_N, calls_N, size)
        backward = _fused("attention_backward", 10 * query * pairs_N, 2 * moved_N, calls_N, size)
        return Operators([forward], [backward], [], [])

    def kept_bytes(self, sizes: TaskSizes, setting: Setting, weights: bool) -> Array | float:
        """Queries, keys, values, the result and its statistic. Where weights are trained, also what
        a linear reads here, and what the time scales: results of both norms, and of attention and
        feed-forward part. For each image, the shifts, scales and gates of the time. For every head,
        masks, which there are if images differ."""
        own = self.linears()
        tensor = setting.execution.tensor
        query, key = (own[name][1] / tensor for name in ("query", "key"))
        read = weights * (1 + 4 * setting.execution.residual_share)
        kept_N = sizes.units_N * (2 * query + read * self.layer.hidden_size)
        kept_N = kept_N + MODULATIONS * sizes.images_N * self.layer.hidden_size
        kept_N = setting.element_bytes * (kept_N + sizes.contexts_N * 2 * key)
        masks_N = setting.element_bytes * (sizes.units_N + sizes.contexts_N)
        return kept_N + self.layer.heads / tensor * (4 * sizes.units_N + masks_N)

    def temporaries(self, sizes: TaskSizes, setting: Setting) -> Temporaries:
        """Never more than those of the first attention."""
        return Temporaries(0.0, 0.0)

    def exchange(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """Each tensor-parallel rank has a part of the context's gradient: of its heads."""
        passes = Operators.none()
        if setting.execution.tensor > 1:
            whole_N = setting.element_bytes * sizes.contexts_N * self.layer.hidden_size
            sent_N = all_reduce_bytes(whole_N, setting.execution.tensor)
            link = setting.tensor_link
            passes.inputs.append(Operator("all_reduce", network_bytes=sent_N, link=link))
        return passes


class Heads(Component):
    """What happens to queries and keys between their projections and attention."""

    @classmethod
    def is_in(cls, layer: LayerDescription) -> bool:
        """Of layers with attention."""
        return layer.mixer is None

    def inner_norms(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """Of queries, keys and values."""
        layer = self.layer
        if not layer.qk_norm:
            return Operators.none()
        heads = layer.heads + (2 if layer.value_norm else 1) * layer.kv_heads
        width = heads * layer.head_dim / setting.execution.tensor
        calls = 3 if layer.value_norm else 2
        elements_N = sizes.units_N * width
        return norm_operators(layer.norm, elements_N, calls, setting, layer.norm_weight_float32)

    def operators(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """Rotation, and copies."""
        layer = self.layer
        size = setting.element_bytes
        query, key = head_widths(layer, setting.execution)
        passes = Operators.none()
        if layer.rotary and setting.execution.compiled:
            # With norms before it, forward reads once more what their sums have read.
            for own, passed in ((passes.forward, 1 if layer.qk_norm else 2), (passes.inputs, 2)):
                moved_N = passed * size * sizes.units_N * (query + key)
                own.append(Operator("elementwise", memory_bytes=moved_N, calls=2))
        elif layer.rotary:
            wide = max(size, 4) if layer.rotary_float32 else size
            casts = 4 + 4 * size if wide > size else 0
            rotated_N = sizes.units_N * (query + key)
            for own, count in ((passes.forward, 10), (passes.inputs, 14)):
                moved_N = (count * wide + casts) * rotated_N
                own.append(Operator("elementwise", memory_bytes=moved_N, calls=count))
        if setting.execution.compiled:
            # Gradients of values become contiguous; those of packed projections are joined.
            joined = 2 * (query + 2 * key) if layer.packed_qkv else 2 * key
            moved_N = size * sizes.units_N * joined
            passes.inputs.append(Operator("copy", memory_bytes=moved_N, calls=1))
        elif not layer.batched:
            # Taking the only row of a batch, in backward; packed projections are joined again, in
            # LLMs as a sum of slices.
            times, calls = 4, 6
            if layer.packed_qkv:
                times, calls = (15, 14) if layer.causal else (6, 6)
            moved_N = times * size * (sizes.units_N * (query + 2 * key))
            passes.inputs.append(Operator("copy", memory_bytes=moved_N, calls=calls))
        return passes

    def kept_bytes(self, sizes: TaskSizes, setting: Setting, weights: bool) -> Array | float:
        """Norms of queries, keys and values."""
        layer = self.layer
        if not layer.qk_norm:
            return 0.0
        query, key = head_widths(layer, setting.execution)
        normed_N = sizes.units_N * (query + key)
        norm_weights = weights and not layer.adapters
        kept_N = normed_kept_bytes(layer, normed_N, setting, norm_weights)
        if layer.value_norm:
            kept_N = kept_N + normed_kept_bytes(layer, sizes.units_N * key, setting, weights=False)
            normed_N = normed_N + sizes.units_N * key
        return kept_N + 4 * norm_scales(layer.norm) * normed_N / layer.head_dim


LAYER_COMPONENTS: list[type[Component]] = [
    Attention,
    GatedAttention,
    LatentAttention,
    DeltaNet,
    ShortConvolution,
    CrossAttention,
    Heads,
    FeedForward,
    Experts,
    SharedExpert,
    Adapters,
]
"""All kinds of components, in the order in which their operators are listed."""


def components_of(layer: LayerDescription) -> list[Component]:
    """A layer's components."""
    return [kind(layer) for kind in LAYER_COMPONENTS if kind.is_in(layer)]


def around_generator_bytes(
    module: ModuleDescription, start: int, stop: int, sizes: TaskSizes, setting: Setting
) -> Array:
    """What the stage with layers [start, stop) of a generator keeps beside its layers and linears,
    by task: the context that all layers read, unless it is the message that was received; masks;
    where it ends, both sides of the last norm, and errors in float32."""
    hidden = module.layers[0].hidden_size
    size = setting.element_bytes
    copied_N = (start == 0) | (sizes.contexts_N > sizes.given_N)
    kept_N = size * (copied_N * sizes.contexts_N * hidden + sizes.units_N + sizes.contexts_N)
    if start == 0:
        kept_N = kept_N + size * TIME_WIDTH * hidden * sizes.images_N
    if stop == len(module.layers):
        values = module.post_linears[-1][1] if module.post_linears else 0
        norm_N = (1 + module.trainable) * sizes.units_N + 2 * sizes.images_N
        kept_N = kept_N + size * hidden * norm_N + (8 + 4 * values) * sizes.units_N
    return kept_N


def head_widths(layer: LayerDescription, execution: Execution) -> tuple[float, float]:
    """Features of queries, and of keys, that a rank's heads have."""
    query = layer.heads * layer.head_dim / execution.tensor
    return query, max(layer.kv_heads / execution.tensor, 1) * layer.head_dim


def attended_widths(layer: LayerDescription, execution: Execution) -> tuple[float, float]:
    """The same of what attention is computed with, for a rank's tokens. Ranks that share a row get
    a whole head of keys at least, though others may have the same one."""
    query, key = head_widths(layer, execution)
    return query, max(key, execution.context * layer.head_dim)


def norm_kept_bytes(kind: str, elements: Array, element_bytes: int, weights: bool) -> Array:
    """A norm's input (or two float32 differences from its mean), and, where its weight is trained,
    its result before that weight."""
    if kind == "layer":
        return element_bytes * elements
    if kind == "centred":
        return (8 + element_bytes * weights) * elements
    return (4 + element_bytes * weights) * elements


def normed_kept_bytes(
    layer: LayerDescription, elements: Array, setting: Setting, weights: bool
) -> Array:
    """Return the bytes that a norm of a layer keeps; a compiled one keeps its input alone."""
    if setting.execution.compiled:
        return setting.element_bytes * elements
    return norm_kept_bytes(layer.norm, elements, normed_bytes(layer, setting), weights)


def norm_scales(kind: str) -> int:
    """float32 values that a norm keeps for each row: mean and deviation, or the latter."""
    return 2 if kind == "layer" else 1


def normed_bytes(layer: LayerDescription, setting: Setting) -> int:
    """Of an element that the weight of a norm multiplies."""
    return 4 if layer.norm_weight_float32 else setting.element_bytes


def _fused(kind: Kind, flops: Array, elements: Array, calls: Array, element_bytes: int) -> Operator:
    return Operator(kind, flops, memory_bytes=element_bytes * elements, calls=calls)
