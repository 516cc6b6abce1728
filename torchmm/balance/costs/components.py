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

from math import prod
from typing import ClassVar, NamedTuple

from torchmm.balance.costs.execution import Execution, Setting
from torchmm.balance.costs.operators import (
    Kind,
    Operator,
    Operators,
    activation_operators,
    norm_operators,
)
from torchmm.balance.costs.sizes import Array, TaskSizes
from torchmm.common.batch import LayerDescription

SCORE_FLOPS = 48
"""What a score's softmax takes on CPUs, in FLOPs of attention's products: measured on lengths of
100 to 512 and heads of 32 to 128. Efficiencies are measured with heads of 64."""

Linear = tuple[float, float]
"""(inputs, outputs) of a matrix product with weights."""


class Temporaries(NamedTuple):
    """What a component needs at one time beyond what is kept, bytes by task."""

    forward_N: Array | float
    backward_N: Array | float


class Component:
    """A component without weights that does nothing; kinds override what they have.

    Args:
        layer: sizes.
    """

    sublayer: ClassVar[bool] = False
    """Whether it is a branch of the residual stream, with a norm and an addition of its own."""
    reads_context: ClassVar[bool] = False
    """Whether its matrix products read a generator's context too."""
    splits_rest: ClassVar[bool] = False
    """Whether tensor-parallel ranks share the layer's parameters beyond matrix products."""

    def __init__(self, layer: LayerDescription) -> None:
        self.layer = layer

    @classmethod
    def is_in(cls, layer: LayerDescription) -> bool:
        """Whether a layer has this component."""
        return True

    def extra_readers(self) -> int:
        """Further products that read the same input as the first: backward adds their gradients."""
        return 0

    def linears(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of matrix products with weights, by what they are."""
        return {}

    def sharded_linears(self, tensor: int) -> dict[str, Linear]:
        """The same of the weights that a tensor-parallel rank has."""
        return {
            name: (inputs, outputs / tensor) for name, (inputs, outputs) in self.linears().items()
        }

    def local_linears(self, tensor: int) -> dict[str, Linear]:
        """The same of the products that a rank computes, where several may be made in one."""
        return self.sharded_linears(tensor)

    def replicated(self, tensor: int) -> tuple[str, ...]:
        """Linears whose weights every tensor-parallel rank has; their gradients are summed."""
        return ()

    def rows_N(self, name: str, sizes: TaskSizes) -> Array:
        """Positions that a linear is computed for."""
        return sizes.units_N

    def pair_flops_N(self, sizes: TaskSizes) -> Array | float:
        """Forward FLOPs of products between activations."""
        return 0.0

    def inner_norms(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """Norms inside the component."""
        return Operators.none()

    def operators(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """What is run besides norms, linears, residual additions and tensor parallelism."""
        return Operators.none()

    def kept_bytes(self, sizes: TaskSizes, setting: Setting, weights: bool) -> Array | float:
        """What is kept for backward, besides the inputs of the layer, its norms and its linears.

        Args:
            weights: whether weights are trained.
        """
        return 0.0

    def kept_results_bytes(self, sizes: TaskSizes, setting: Setting) -> Array | float:
        """What selective recomputation keeps: the results of linears and attention."""
        rows = self.local_linears(setting.execution.tensor).items()
        results_N = sum(self.rows_N(name, sizes) * outputs for name, (_, outputs) in rows)
        return setting.element_bytes * results_N

    def temporaries(self, sizes: TaskSizes, setting: Setting) -> Temporaries:
        """What is needed beyond what is kept."""
        return Temporaries(0.0, 0.0)

    def flops_N(self, sizes: TaskSizes) -> Array | float:
        """Forward FLOPs of products with weights."""
        every = self.linears().items()
        return sum(2 * prod(size) * self.rows_N(name, sizes) for name, size in every)

    def parameters(self, tensor: int) -> float:
        """Parameters of matrix products on one rank."""
        linears = self.linears()
        own = self.sharded_linears(tensor) | {n: linears[n] for n in self.replicated(tensor)}
        return sum(inputs * outputs for inputs, outputs in own.values())


class Attention(Component):
    """Attention of a layer's positions to each other, with its four projections."""

    sublayer = True

    def extra_readers(self) -> int:
        """Keys and values, unless one linear gives them with the queries."""
        return 0 if self.layer.packed_qkv else 2 - self.layer.value_is_key

    def linears(self) -> dict[str, tuple[int, int]]:
        """Projections; keys and values have fewer heads in grouped-query attention."""
        hidden = self.layer.hidden_size
        query = self.layer.heads * self.layer.head_dim
        key_value = self.layer.kv_heads * self.layer.head_dim
        value = {} if self.layer.value_is_key else {"value": (hidden, key_value)}
        return {
            "query": (hidden, query),
            "key": (hidden, key_value),
            **value,
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
        return 4 * self.layer.heads * self.layer.head_dim * sizes.pairs_N(self.layer.window)

    def operators(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """One fused kernel, for each pass."""
        layer = self.layer
        units_N = sizes.units_N
        pairs_N = sizes.pairs_N(layer.window)
        if layer.causal:
            pairs_N = sizes.causal_pairs_N(layer.window, setting.causal_block)
        if setting.segment_calls:  # work besides the products, as products of heads of 64
            each = (1 + SCORE_FLOPS / (4 * layer.head_dim)) / (1 + SCORE_FLOPS / (4 * 64))
            pairs_N = pairs_N * each
        calls_N = sizes.calls_N(layer.window) if setting.segment_calls else units_N * 0.0 + 1
        query, key = head_widths(layer, setting.execution)
        size = setting.element_bytes
        moved_N = units_N * 2 * (query + key)
        forward = _fused("attention", 4 * query * pairs_N, moved_N, calls_N, size)
        # Five products instead of two: scores are computed again, and both inputs have gradients.
        backward = _fused("attention_backward", 10 * query * pairs_N, 2 * moved_N, calls_N, size)
        return Operators([forward], [backward], [], [])

    def kept_bytes(self, sizes: TaskSizes, setting: Setting, weights: bool) -> Array | float:
        """Queries, keys, values, and what fused attention keeps."""
        query, key = head_widths(self.layer, setting.execution)
        # Who keeps a slice of packed results keeps all of them.
        values = query + 2 * key if self.layer.packed_qkv else key
        inputs_N = setting.element_bytes * sizes.units_N * (query + key + values)
        return self._result_bytes(sizes, setting) + inputs_N

    def kept_results_bytes(self, sizes: TaskSizes, setting: Setting) -> Array | float:
        """With the result of attention."""
        return super().kept_results_bytes(sizes, setting) + self._result_bytes(sizes, setting)

    def _result_bytes(self, sizes: TaskSizes, setting: Setting) -> Array | float:
        """The result of attention, and a float32 statistic for every head and position."""
        query, _ = head_widths(self.layer, setting.execution)
        statistics_N = 4 * self.layer.heads / setting.execution.tensor * sizes.units_N
        return setting.element_bytes * sizes.units_N * query + statistics_N

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
        """Queries, keys, values, the result, and the norm before it with the linears' inputs."""
        own = self.linears()
        query, key = (own[name][1] / setting.execution.tensor for name in ("query", "key"))
        kept_N = sizes.units_N * (2 * query + 3 * self.layer.hidden_size)
        return setting.element_bytes * (kept_N + sizes.contexts_N * 2 * key)

    def _result_bytes(self, sizes: TaskSizes, setting: Setting) -> Array | float:
        query, _ = head_widths(self.layer, setting.execution)
        return setting.element_bytes * sizes.units_N * query

    def temporaries(self, sizes: TaskSizes, setting: Setting) -> Temporaries:
        """Never more than those of the first attention."""
        return Temporaries(0.0, 0.0)


class Heads(Component):
    """What happens to queries and keys between their projections and attention."""

    def inner_norms(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """Of queries and keys."""
        layer = self.layer
        if not layer.qk_norm:
            return Operators.none()
        heads = (layer.heads + layer.kv_heads) * layer.head_dim / setting.execution.tensor
        return norm_operators(layer.norm, sizes.units_N * heads, 2, setting)

    def operators(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """Rotation, and copies."""
        layer = self.layer
        size = setting.element_bytes
        query, key = head_widths(layer, setting.execution)
        passes = Operators.none()
        if layer.rotary:
            # Packed projections come with vision layers, which rotate in float32.
            wide = max(size, 4) if layer.packed_qkv else size
            casts = 4 + 4 * size if wide > size else 0
            rotated_N = sizes.units_N * (query + key)
            for own, count in ((passes.forward, 10), (passes.inputs, 14)):
                moved_N = (count * wide + casts) * rotated_N
                own.append(Operator("elementwise", memory_bytes=moved_N, calls=count))
        if not layer.batched:
            # Taking the only row of a batch, in backward; packed projections are joined again.
            times = 6 if layer.packed_qkv else 4
            moved_N = times * size * (sizes.units_N * (query + 2 * key))
            passes.inputs.append(Operator("copy", memory_bytes=moved_N, calls=6))
        return passes

    def kept_bytes(self, sizes: TaskSizes, setting: Setting, weights: bool) -> Array | float:
        """Norms of queries and keys."""
        layer = self.layer
        if not layer.qk_norm:
            return 0.0
        query, key = head_widths(layer, setting.execution)
        normed_N = sizes.units_N * (query + key)
        kept_N = norm_kept_bytes(layer.norm, normed_N, normed_bytes(layer, setting), weights)
        return kept_N + 4 * norm_scales(layer.norm) * normed_N / layer.head_dim


class FeedForward(Component):
    """A feed-forward network of two linears, or three with a gate."""

    sublayer = True

    def extra_readers(self) -> int:
        """The gate."""
        return int(self.layer.gated_ffn)

    @classmethod
    def is_in(cls, layer: LayerDescription) -> bool:
        """Of layers without experts."""
        return not layer.experts

    def linears(self) -> dict[str, tuple[int, int]]:
        """Up and down, and the gate."""
        hidden = self.layer.hidden_size
        ffn = self.layer.ffn_size
        gate = {"gate": (hidden, ffn)} if self.layer.gated_ffn else {}
        return gate | {"up": (hidden, ffn), "down": (ffn, hidden)}

    def sharded_linears(self, tensor: int) -> dict[str, Linear]:
        """The inner features are divided."""
        inputs, outputs = self.linears()["down"]
        return super().sharded_linears(tensor) | {"down": (inputs / tensor, outputs)}

    def replicated(self, tensor: int) -> tuple[str, ...]:
        """What one linear gives together."""
        return ("gate", "up") if self.layer.packed_gate_up else ()

    def operators(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """The activation function, and the product with the gate."""
        inner_N = sizes.units_N * self.layer.ffn_size / setting.execution.tensor
        return activation_operators(self.layer.activation, self.layer.gated_ffn, inner_N, setting)

    def kept_bytes(self, sizes: TaskSizes, setting: Setting, weights: bool) -> Array | float:
        """Tensors of the inner size; the last one is the input of a linear."""
        inside = 2 if self.layer.activation == "quick_gelu" else 1
        tensors = inside + (2 if self.layer.gated_ffn else 0) + weights
        inner = tensors * self.layer.ffn_size / setting.execution.tensor
        return setting.element_bytes * sizes.units_N * inner

    def temporaries(self, sizes: TaskSizes, setting: Setting) -> Temporaries:
        """Of the inner size: results in forward, gradients in backward."""
        tensor = setting.execution.tensor
        inner_N = setting.element_bytes * sizes.units_N * self.layer.ffn_size / tensor
        return Temporaries((4 if self.layer.packed_gate_up else 3) * inner_N, 2 * inner_N)


class Experts(FeedForward):
    """A mixture of experts: a router, and those experts that a token goes through."""

    splits_rest = True  # the experts that a token does not go through

    @classmethod
    def is_in(cls, layer: LayerDescription) -> bool:
        """Of layers with experts."""
        return bool(layer.experts)

    def linears(self) -> dict[str, tuple[int, int]]:
        """With the router."""
        return {"router": (self.layer.hidden_size, self.layer.experts)} | super().linears()

    def sharded_linears(self, tensor: int) -> dict[str, Linear]:
        """Every rank has the whole router."""
        return super().sharded_linears(tensor) | {"router": self.linears()["router"]}


LAYER_COMPONENTS: list[type[Component]] = [Attention, CrossAttention, Heads, FeedForward, Experts]
"""All kinds of components, in the order in which their operators are listed."""


def components_of(layer: LayerDescription) -> list[Component]:
    """A layer's components."""
    return [kind(layer) for kind in LAYER_COMPONENTS if kind.is_in(layer)]


def head_widths(layer: LayerDescription, execution: Execution) -> tuple[float, float]:
    """Features of queries, and of keys, that a rank's heads have."""
    query = layer.heads * layer.head_dim / execution.tensor
    return query, max(layer.kv_heads / execution.tensor, 1) * layer.head_dim


def norm_kept_bytes(kind: str, elements: Array, element_bytes: int, weights: bool) -> Array:
    """A norm's input, and, where its weight is trained, its result before that weight."""
    if kind == "layer":
        return element_bytes * elements
    return (4 + element_bytes * weights) * elements


def norm_scales(kind: str) -> int:
    """float32 values that a norm keeps for each row: mean and deviation, or the latter."""
    return 2 if kind == "layer" else 1


def normed_bytes(layer: LayerDescription, setting: Setting) -> int:
    """Of an element that the weight of a norm multiplies."""
    return 4 if layer.norm_weight_float32 else setting.element_bytes


def _fused(kind: Kind, flops: Array, elements: Array, calls: Array, element_bytes: int) -> Operator:
    return Operator(kind, flops, memory_bytes=element_bytes * elements, calls=calls)
