"""Interface of layer components, and the MLP components: dense, experts and shared expert.

Other components are in `components.py` and `mixers.py`.

A token is routed to `experts_per_token` experts, and each of them has a row for the token. Costs
that depend on tokens are multiplied by this number. Costs that depend on weights include all
experts of a rank, because every microbatch reads all expert weights and computes their gradients.

The shape suffix N means tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import ClassVar, NamedTuple

import numpy as np

from torchmm.common.layers import Float8Linears, LayerDescription
from torchmm.costs.execution import CostSetting, Matrices
from torchmm.costs.operators import (
    CLAMPED_SILU,
    Operator,
    PassOperators,
    activation_operators,
    float8_matmul,
    matmul_operator,
    norm_operators,
)
from torchmm.costs.sizes import Array, TaskSizes

Linear = tuple[float, float]
"""(inputs, outputs) of a linear layer."""


class TemporaryBytes(NamedTuple):
    """Maximum bytes of temporaries of a component, by task."""

    forward_N: Array | float
    """Bytes in the forward pass."""
    backward_N: Array | float
    """Bytes in the backward pass."""


class LayerComponent:
    """Base class of layer components, without weights and costs. Subclasses override methods.

    Args:
        layer: Description of the layer.
    """

    is_residual_branch: ClassVar[bool] = False
    """Whether it is a branch of the residual stream, with a separate norm and addition."""
    reads_context: ClassVar[bool] = False
    """Whether its matmuls also read the context of a generator."""
    shards_other_parameters: ClassVar[bool] = False
    """Whether tensor-parallel ranks shard the parameters of the layer outside of linear layers."""

    def __init__(self, layer: LayerDescription) -> None:
        self.layer = layer

    @classmethod
    def applies_to(cls, layer: LayerDescription) -> bool:
        """Return True if a layer has this component."""
        return True

    def extra_input_readers(self) -> int:
        """Return the number of further matmuls that read the input of the first matmul.

        The backward pass adds their input gradients.
        """
        return 0

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return (inputs, outputs) of the linear layers, by name."""
        return {}

    def sharded_linears(self, tensor: int) -> dict[str, Linear]:
        """Return (inputs, outputs) of the weight shards of a tensor-parallel rank, by name."""
        return {
            name: (inputs, outputs / tensor) for name, (inputs, outputs) in self.linears().items()
        }

    def local_linears(self, tensor: int) -> dict[str, Linear]:
        """Return (inputs, outputs) of the matmuls of a rank. Packed weights are one matmul."""
        return self.sharded_linears(tensor)

    def matmuls(self, sizes: TaskSizes, setting: CostSetting) -> list[Operator]:
        """Return the matmuls with weights, in the order of `local_linears`."""
        local = self.local_linears(setting.execution.tensor).items()
        return [matmul_operator(self.rows_N(name, sizes), *size, setting) for name, size in local]

    def matrices(self) -> list[Matrices]:
        """Return the unsharded matrices that Muon updates."""
        return [Matrices(inputs, outputs) for inputs, outputs in self.local_linears(1).values()]

    def gradients(self, setting: CostSetting) -> float:
        """Return the number of weight gradients that a rank computes and accumulates."""
        return sum(a * b for a, b in self.local_linears(setting.execution.tensor).values())

    def largest_gradient(self, setting: CostSetting) -> float:
        """Return the number of gradients of the largest weight of a rank."""
        return max(
            (a * b for a, b in self.local_linears(setting.execution.tensor).values()), default=0
        )

    def replicated_linears(self, tensor: int) -> tuple[str, ...]:
        """Return the linear layers that are replicated on all tensor-parallel ranks.

        Their gradients are all-reduced.
        """
        return ()

    def rows_N(self, name: str, sizes: TaskSizes) -> Array:
        """Return the number of rows of the matmul of a linear layer, by task."""
        return sizes.units_N

    def pair_flops_N(self, sizes: TaskSizes) -> Array | float:
        """Return the forward FLOPs of matmuls between activations."""
        return 0.0

    def inner_norms(self, sizes: TaskSizes, setting: CostSetting) -> PassOperators:
        """Return the operators of norms inside the component."""
        return PassOperators.empty()

    def operators(self, sizes: TaskSizes, setting: CostSetting) -> PassOperators:
        """Return operators other than norms, linear layers, residuals and tensor parallelism."""
        return PassOperators.empty()

    def saved_bytes(self, sizes: TaskSizes, setting: CostSetting, weights: bool) -> Array | float:
        """Return the bytes saved for the backward pass, without inputs of layer, norms and linears.

        Args:
            sizes: Sizes of the tasks.
            setting: Execution of the layer.
            weights: Whether weights are trained.
        """
        return 0.0

    def saved_results_bytes(self, sizes: TaskSizes, setting: CostSetting) -> Array | float:
        """Return the bytes that selective recomputation saves: results of linears and attention."""
        return setting.element_bytes * self.result_elements_N(sizes, setting)

    def result_elements_N(self, sizes: TaskSizes, setting: CostSetting) -> Array | float:
        """Return the number of elements of the results of linear layers, by task."""
        rows = self.local_linears(setting.execution.tensor).items()
        return sum(self.rows_N(name, sizes) * outputs for name, (_, outputs) in rows)

    def temporaries(self, sizes: TaskSizes, setting: CostSetting) -> TemporaryBytes:
        """Return the maximum bytes of temporaries."""
        return TemporaryBytes(0.0, 0.0)

    def flops_N(self, sizes: TaskSizes) -> Array | float:
        """Return the forward FLOPs of matmuls with weights."""
        every = self.linears().items()
        return sum(2 * prod(size) * self.rows_N(name, sizes) for name, size in every)

    def communication(self, sizes: TaskSizes, setting: CostSetting) -> PassOperators:
        """Return the communication of expert parallelism or context parallelism."""
        return PassOperators.empty()

    def parameters(self, tensor: int) -> float:
        """Return the number of parameters of linear layers on one rank."""
        linears = self.linears()
        local = self.sharded_linears(tensor) | {
            n: linears[n] for n in self.replicated_linears(tensor)
        }
        return sum(inputs * outputs for inputs, outputs in local.values())


def head_exchange_operators(
    sent: Sequence[float], returned: float, sizes: TaskSizes, setting: CostSetting
) -> PassOperators:
    """Return the all-to-all operators of context parallelism.

    The first all-to-all exchanges tokens for heads before attention (or its replacement). The
    second one restores tokens after it. The backward pass has the same exchanges in reverse order.
    They have class "p2p", because every profile has rates for messages.

    Args:
        sent: Features per token, for all ranks, of each tensor that is split by heads.
        returned: Features per token of the result.
        sizes: Sizes of the tasks.
        setting: Execution of the layer.
    """
    ranks = setting.execution.context
    if ranks == 1:
        return PassOperators.empty()
    token_bytes = setting.element_bytes * sizes.units_N
    sent_N = token_bytes * (sum(sent) + returned) * (ranks - 1) / ranks
    messages = Operator("p2p", network_bytes=sent_N, calls=2, link=setting.context_link)
    # Sent tensors are packed twice and then joined. The result is only joined.
    copied_N = 2 * token_bytes * (3 * sum(sent) + returned)
    copies = Operator("copy", memory_bytes=copied_N, calls=3 * len(sent) + 2)
    return PassOperators([messages, copies], [messages, copies], [], [])


class FeedForward(LayerComponent):
    """MLP with two linear layers, or three if gated."""

    is_residual_branch = True

    def extra_input_readers(self) -> int:
        """Return 1 for a separate gate projection, otherwise 0."""
        return int(self.layer.gated_ffn and not self.layer.packed_gate_up)

    @classmethod
    def applies_to(cls, layer: LayerDescription) -> bool:
        """Return True for layers without experts."""
        return not layer.experts

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return up and down projection, and the gate projection."""
        hidden = self.layer.hidden_size
        ffn = self.layer.ffn_size
        gate = {"gate": (hidden, ffn)} if self.layer.gated_ffn else {}
        return gate | {"up": (hidden, ffn), "down": (ffn, hidden)}

    def sharded_linears(self, tensor: int) -> dict[str, Linear]:
        """Return the shards. Intermediate features are sharded."""
        inputs, outputs = self.linears()["down"]
        return super().sharded_linears(tensor) | {"down": (inputs / tensor, outputs)}

    def local_linears(self, tensor: int) -> dict[str, Linear]:
        """Return the matmuls of a rank. Packed gate and up projections are one matmul."""
        local = self.sharded_linears(tensor)
        if not self.layer.packed_gate_up:
            return local
        inputs, inner = local["up"]
        return {"gate_up": (inputs, 2 * inner), "down": local["down"]}

    def replicated_linears(self, tensor: int) -> tuple[str, ...]:
        """Return packed gate and up projections."""
        return ("gate", "up") if self.layer.packed_gate_up else ()

    def operators(self, sizes: TaskSizes, setting: CostSetting) -> PassOperators:
        """Return the activation function, and the multiplication by the gate."""
        layer = self.layer
        inner_N = sizes.units_N * layer.ffn_size / setting.execution.tensor
        passes = activation_operators(layer.activation, layer.gated_ffn, inner_N, setting)
        if layer.packed_gate_up:  # their gradients are concatenated
            moved_N = 4 * setting.element_bytes * inner_N
            passes.inputs.append(Operator("copy", memory_bytes=moved_N, calls=1))
        return passes

    def saved_bytes(self, sizes: TaskSizes, setting: CostSetting, weights: bool) -> Array | float:
        """Return the bytes of tensors of intermediate size, including the input of down."""
        inside = {"quick_gelu": 2, CLAMPED_SILU: 4}.get(self.layer.activation, 1)
        if setting.execution.compiled:  # recomputed from the results of the linear layers
            inside = 0 if self.layer.gated_ffn else 1
        tensors = inside + (2 if self.layer.gated_ffn else 0) + weights
        inner = tensors * self.layer.ffn_size / setting.execution.tensor
        return setting.element_bytes * sizes.units_N * inner

    def temporaries(self, sizes: TaskSizes, setting: CostSetting) -> TemporaryBytes:
        """Return the bytes of tensors of intermediate size: results, or gradients in backward."""
        tensor = setting.execution.tensor
        inner_N = setting.element_bytes * sizes.units_N * self.layer.ffn_size / tensor
        return TemporaryBytes((4 if self.layer.packed_gate_up else 3) * inner_N, 2 * inner_N)


class Experts(FeedForward):
    """Mixture of experts: a router, and the experts that are selected for each token."""

    shards_other_parameters = True  # experts that are not selected for a token
    divided: ClassVar[tuple[str, ...]] = ("gate", "up", "down")
    """Linear layers of experts, which expert-parallel ranks divide."""

    @classmethod
    def applies_to(cls, layer: LayerDescription) -> bool:
        """Return True for layers with experts."""
        return bool(layer.experts)

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return the linear layers of the selected experts, and the router."""
        return {"router": (self.layer.hidden_size, self.layer.experts)} | super().linears()

    def sharded_linears(self, tensor: int) -> dict[str, Linear]:
        """Return the shards. The router is replicated."""
        return super().sharded_linears(tensor) | {"router": self.linears()["router"]}

    def saved_bytes(self, sizes: TaskSizes, setting: CostSetting, weights: bool) -> Array | float:
        """Return the bytes saved for experts and router.

        Each (token, expert) pair has one row before and after the expert MLP, with row indices,
        expert indices and weights. The router saves probabilities and copies.
        """
        size = setting.element_bytes
        rows_N = self._routed_rows_N(sizes, setting)
        row_bytes = (1 + weights) * size * self.layer.hidden_size + 4 * 8 + size
        routed_N = 4 * self.layer.experts * sizes.units_N
        if self._casts_router(setting):
            hidden = self.layer.hidden_size
            routed_N = routed_N + 4 * hidden * (weights * sizes.units_N + self.layer.experts)
        if self.layer.router_norm:
            hidden_N = self.layer.hidden_size * sizes.units_N
            # Tensors before and after the scales, and a float32 copy of the input as in all norms.
            copied = 4 if size < 4 else 0
            routed_N = routed_N + (2 * size * weights + copied) * hidden_N + 4 * sizes.units_N
        return super().saved_bytes(sizes, setting, weights) + row_bytes * rows_N + routed_N

    def inner_norms(self, sizes: TaskSizes, setting: CostSetting) -> PassOperators:
        """Return the norm of the router."""
        layer = self.layer
        if not layer.router_norm:
            return PassOperators.empty()
        elements_N = sizes.units_N * layer.hidden_size
        return norm_operators(layer.norm, elements_N, 1, setting)

    def result_elements_N(self, sizes: TaskSizes, setting: CostSetting) -> Array | float:
        """Return the number of result elements. Experts have one row per (token, expert) pair."""
        rows_N = self._routed_rows_N(sizes, setting) - sizes.units_N
        return super().result_elements_N(sizes, setting) + rows_N * self.layer.hidden_size

    def matmuls(self, sizes: TaskSizes, setting: CostSetting) -> list[Operator]:
        """Return the matmuls with weights.

        Each expert matmul reads the weights of all experts, and one row per (token, expert) pair.
        Gate and up projections of experts are one matmul.
        """
        layer = self.layer
        execution = setting.execution
        rows_N = self._routed_rows_N(sizes, setting)
        inner = layer.ffn_size / layer.experts_per_token
        weights = self._experts(setting) * layer.hidden_size * inner
        matmuls = []
        pairs = zip(
            self.local_linears(execution.tensor), super().matmuls(sizes, setting), strict=True
        )
        for name, product in pairs:
            if name not in self.divided:
                wide = 4 / setting.element_bytes if self._casts_router(setting) else 1
                matmuls.append(product._replace(memory_bytes=wide * product.memory_bytes))
                continue
            joined = name == "up" and layer.gated_ffn
            width = inner + (0 if joined else layer.hidden_size)
            moved_N = setting.element_bytes * (rows_N * width + weights)
            matmuls.append(product._replace(memory_bytes=moved_N, calls=0 if joined else 1))
        return matmuls

    def matrices(self) -> list[Matrices]:
        """Return the stacked matrices of all experts, with packed gate and up, and the router."""
        layer = self.layer
        inner = layer.ffn_size / layer.experts_per_token
        return [
            Matrices(layer.hidden_size, (1 + layer.gated_ffn) * inner, layer.experts),
            Matrices(inner, layer.hidden_size, layer.experts),
            Matrices(layer.hidden_size, layer.experts),
        ]

    def gradients(self, setting: CostSetting) -> float:
        """Return the number of gradients of the router and of all experts of a rank."""
        layer = self.layer
        chosen = sum(prod(self.linears()[name]) for name in self.divided if name in self.linears())
        each = chosen / layer.experts_per_token
        router = layer.hidden_size * layer.experts
        return router + self._experts(setting) * each

    def largest_gradient(self, setting: CostSetting) -> float:
        """Return the number of gradients of the packed gate and up projections of all experts."""
        layer = self.layer
        inner = layer.ffn_size / layer.experts_per_token
        return self._experts(setting) * layer.hidden_size * (1 + layer.gated_ffn) * inner

    def _casts_router(self, setting: CostSetting) -> bool:
        """Return True if weights and input of the router are cast to float32."""
        return self.layer.router_float32 and setting.element_bytes < 4

    def _experts(self, setting: CostSetting) -> float:
        """Return the number of experts on a rank."""
        return self.layer.experts / setting.execution.tensor / setting.execution.expert

    def operators(self, sizes: TaskSizes, setting: CostSetting) -> PassOperators:
        """Return the activation function, token permutation, weighting and summation.

        The backward pass also concatenates the gradients of gate and up projections.
        """
        passes = super().operators(sizes, setting)
        layer = self.layer
        size = setting.element_bytes
        token_N = size * layer.hidden_size * sizes.units_N
        rows_N = size * layer.hidden_size * self._routed_rows_N(sizes, setting)
        fused = setting.execution.compiled
        # Gradients are concatenated as a sum of slices, or with one copy.
        joined = 14 if layer.activation == CLAMPED_SILU and not fused else 4
        joined_N = joined * size * sizes.units_N * layer.ffn_size / setting.execution.tensor
        forward = Operator("copy", memory_bytes=6 * rows_N + 2 * token_N, calls=18)
        inputs = Operator("copy", memory_bytes=14 * rows_N + 4 * token_N + joined_N, calls=14)
        if fused:
            forward = Operator("copy", memory_bytes=3 * rows_N + token_N, calls=8)
            inputs = Operator("copy", memory_bytes=9 * rows_N + 2 * token_N + joined_N, calls=10)
        passes.forward.append(forward)
        passes.inputs.append(inputs)
        if self._casts_router(setting):
            read_N = (4 + size) * layer.hidden_size * sizes.units_N
            weights = (4 + size) * layer.hidden_size * layer.experts
            passes.forward.append(Operator("copy", memory_bytes=read_N + weights, calls=2))
            passes.inputs.append(Operator("copy", memory_bytes=read_N + weights, calls=2))
        if layer.expert_biases:  # gathered per row and added; backward sums them by expert
            widths = (1 + layer.gated_ffn) * layer.ffn_size / setting.execution.tensor
            biased_N = size * sizes.units_N * widths + rows_N
            passed, calls = (1, 1) if fused else (4, 4)  # if compiled, the consumer adds them
            passes.forward.append(
                Operator("elementwise", memory_bytes=passed * biased_N, calls=calls)
            )
            passes.inputs.append(Operator("elementwise", memory_bytes=biased_N, calls=calls))
        return passes

    def temporaries(self, sizes: TaskSizes, setting: CostSetting) -> TemporaryBytes:
        """Return the bytes of the MLP temporaries, permuted rows and their gradients."""
        inside = super().temporaries(sizes, setting)
        row_bytes = setting.element_bytes * self.layer.hidden_size
        rows_N = 2 * row_bytes * self._routed_rows_N(sizes, setting)
        return TemporaryBytes(inside.forward_N + rows_N, inside.backward_N + rows_N)

    def _routed_rows_N(self, sizes: TaskSizes, setting: CostSetting) -> Array:
        """Return the number of (token, expert) pairs per rank for a balanced router."""
        return sizes.units_N * self.layer.experts_per_token / setting.execution.tensor

    def communication(self, sizes: TaskSizes, setting: CostSetting) -> PassOperators:
        """Return the all-to-all operators of expert parallelism for a balanced router.

        Every token is sent to each of its experts and back. The forward pass has a third call for
        the token counts. They have class "p2p", because every profile has rates for messages.
        """
        ranks = setting.execution.expert
        if ranks == 1:
            return PassOperators.empty()
        rows_N = sizes.units_N * self.layer.experts_per_token
        row_bytes = setting.element_bytes * self.layer.hidden_size
        sent_N = 2 * rows_N * row_bytes * (ranks - 1) / ranks
        link = setting.expert_link
        forward = Operator("p2p", network_bytes=sent_N, calls=3, link=link)
        backward = Operator("p2p", network_bytes=sent_N, calls=2, link=link)
        # Permutation by expert, and its inverse.
        copies = Operator("copy", memory_bytes=4 * rows_N * row_bytes, calls=4)
        return PassOperators([forward, copies], [backward, copies], [], [])


class SharedExpert(LayerComponent):
    """Shared expert, which processes all tokens. Its result can have a gate."""

    @classmethod
    def applies_to(cls, layer: LayerDescription) -> bool:
        """Return True for layers with a shared expert."""
        return bool(layer.shared_ffn_size)

    def extra_input_readers(self) -> int:
        """Return the number of matmuls that read the MLP input: gate, up and result gate."""
        return 2 + self.layer.shared_gate

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return the linear layers of a gated MLP, and the gate of its result."""
        hidden = self.layer.hidden_size
        inner = self.layer.shared_ffn_size
        linears = {
            "shared_gate": (hidden, inner),
            "shared_up": (hidden, inner),
            "shared_down": (inner, hidden),
        }
        return linears | ({"shared_share": (hidden, 1)} if self.layer.shared_gate else {})

    def sharded_linears(self, tensor: int) -> dict[str, Linear]:
        """Return the shards. Intermediate features are sharded, the result gate is replicated."""
        linears = self.linears()
        inner, hidden = linears["shared_down"]
        shards: dict[str, Linear] = {"shared_down": (inner / tensor, hidden)}
        if self.layer.shared_gate:
            shards["shared_share"] = linears["shared_share"]
        return super().sharded_linears(tensor) | shards

    def operators(self, sizes: TaskSizes, setting: CostSetting) -> PassOperators:
        """Return the activation function, the result gate, and the addition to routed experts."""
        layer = self.layer
        size = setting.element_bytes
        inner_N = sizes.units_N * layer.shared_ffn_size / setting.execution.tensor
        passes = activation_operators(layer.activation, True, inner_N, setting)
        token_N = size * sizes.units_N * layer.hidden_size
        added_N = (5 if layer.shared_gate else 3) * token_N
        passes.forward.append(
            Operator("elementwise", memory_bytes=added_N, calls=3 if layer.shared_gate else 1)
        )
        if layer.shared_gate:
            passes.inputs.append(Operator("elementwise", memory_bytes=6 * token_N, calls=4))
        return passes

    def saved_bytes(self, sizes: TaskSizes, setting: CostSetting, weights: bool) -> Array | float:
        """Return the bytes of tensors of intermediate size, and of the result before its gate."""
        inside = 2 if setting.execution.compiled else 3
        inner = (inside + weights) * self.layer.shared_ffn_size / setting.execution.tensor
        gated = self.layer.shared_gate * self.layer.hidden_size
        return setting.element_bytes * sizes.units_N * (inner + gated)


def apply_float8(
    passes: PassOperators,
    rounded: Float8Linears,
    components: Sequence[LayerComponent],
    sizes: TaskSizes,
    setting: CostSetting,
) -> None:
    """Replace matmuls of `components` by float8 matmuls in place, and append casts.

    Args:
        passes: Matmuls of all components, in the order of their `local_linears`.
        rounded: Linear layers that use float8.
        components: Components of the layer.
        sizes: Sizes of the tasks.
        setting: Execution of the layer.
    """
    tensor = setting.execution.tensor
    named = [(c, i, name) for c in components for i, name in enumerate(c.local_linears(tensor))]
    for place, (component, index, name) in enumerate(named):
        if not _uses_float8(component, name, rounded):
            continue
        size = component.local_linears(tensor)[name]
        shares = 0 < index <= component.extra_input_readers()
        rows_N = component.rows_N(name, sizes)
        float8 = float8_matmul(rows_N, *size, rounded, setting, has_cast_input=shares)
        for each, (product, casts) in zip(passes, float8[:3], strict=False):
            each[place] = product._replace(calls=each[place].calls)
            each.append(casts)


def cast_bytes(
    rounded: Float8Linears | None,
    components: Sequence[LayerComponent],
    sizes: TaskSizes,
    setting: CostSetting,
) -> Array:
    """Return the bytes of float8 cast temporaries of the largest linear layer, by task.

    They are the scaled and the clamped values in float32, and the result: 9 bytes per value.
    """
    found_N = [0.0 * sizes.units_N]
    tensor = setting.execution.tensor
    if rounded is None:
        return found_N[0]
    for component in components:
        for name, (inputs, outputs) in component.local_linears(tensor).items():
            if _uses_float8(component, name, rounded):
                rows_N = component.rows_N(name, sizes)
                parts_N = (rows_N * inputs, rows_N * outputs, inputs * outputs + 0 * rows_N)
                found_N.append(9 * np.max(parts_N, axis=0))
    return np.max(found_N, axis=0)


def _uses_float8(component: LayerComponent, name: str, rounded: Float8Linears) -> bool:
    """Return True if a linear layer uses float8."""
    whole = component.local_linears(1).get(name)
    return whole in rounded.linears and not isinstance(component, Experts)
