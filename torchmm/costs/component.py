"""What a component of a transformer layer can say about its costs, and the one that all layers
have: the feed-forward part, alone or of experts. Other kinds are in `components.py`.

A token goes through `experts_per_token` experts and leaves a row for each of them: what depends on
tokens counts as often. What depends on weights counts all experts of a rank: their weights are read
for every microbatch, and have gradients.

Shape suffix N: tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import ClassVar, NamedTuple

import numpy as np

from torchmm.common.layers import LayerDescription, Rounded
from torchmm.costs.execution import Matrices, Setting
from torchmm.costs.operators import (
    CLAMPED,
    Operator,
    Operators,
    activation_operators,
    matmul,
    norm_operators,
    rounded_matmul,
)
from torchmm.costs.sizes import Array, TaskSizes

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

    def products(self, sizes: TaskSizes, setting: Setting) -> list[Operator]:
        """Matrix products with weights, in the order of `local_linears`."""
        own = self.local_linears(setting.execution.tensor).items()
        return [matmul(self.rows_N(name, sizes), *size, setting) for name, size in own]

    def matrices(self) -> list[Matrices]:
        """Parameters that Muon moves, whole."""
        return [Matrices(inputs, outputs) for inputs, outputs in self.local_linears(1).values()]

    def gradients(self, setting: Setting) -> float:
        """Gradients of their weights that a rank computes, added to those of other microbatches."""
        return sum(a * b for a, b in self.local_linears(setting.execution.tensor).values())

    def largest_gradient(self, setting: Setting) -> float:
        """Of them, those of the largest weight."""
        return max(
            (a * b for a, b in self.local_linears(setting.execution.tensor).values()), default=0
        )

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
        return setting.element_bytes * self.results_N(sizes, setting)

    def results_N(self, sizes: TaskSizes, setting: Setting) -> Array | float:
        """Elements of the results of matrix products with weights."""
        rows = self.local_linears(setting.execution.tensor).items()
        return sum(self.rows_N(name, sizes) * outputs for name, (_, outputs) in rows)

    def temporaries(self, sizes: TaskSizes, setting: Setting) -> Temporaries:
        """What is needed beyond what is kept."""
        return Temporaries(0.0, 0.0)

    def flops_N(self, sizes: TaskSizes) -> Array | float:
        """Forward FLOPs of products with weights."""
        every = self.linears().items()
        return sum(2 * prod(size) * self.rows_N(name, sizes) for name, size in every)

    def exchange(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """Sending tokens to the ranks that have their experts, or that share their row."""
        return Operators.none()

    def parameters(self, tensor: int) -> float:
        """Parameters of matrix products on one rank."""
        linears = self.linears()
        own = self.sharded_linears(tensor) | {n: linears[n] for n in self.replicated(tensor)}
        return sum(inputs * outputs for inputs, outputs in own.values())


def exchange_of_heads(
    sent: Sequence[float], back: float, sizes: TaskSizes, setting: Setting
) -> Operators:
    """Context parallelism: tokens for heads, and back behind attention or what is in its place; in
    backward the other way round. Timed as messages, for which every profile has rates.

    Args:
        sent: features of a token in each tensor that is divided by heads, for all ranks.
        back: features of a token's result.
    """
    ranks = setting.execution.context
    if ranks == 1:
        return Operators.none()
    token_bytes = setting.element_bytes * sizes.units_N
    sent_N = token_bytes * (sum(sent) + back) * (ranks - 1) / ranks
    messages = Operator("p2p", network_bytes=sent_N, calls=2, link=setting.context_link)
    # Packed for the other ranks twice, and joined; what comes back is joined only.
    copied_N = 2 * token_bytes * (3 * sum(sent) + back)
    copies = Operator("copy", memory_bytes=copied_N, calls=3 * len(sent) + 2)
    return Operators([messages, copies], [messages, copies], [], [])


class FeedForward(Component):
    """A feed-forward network of two linears, or three with a gate."""

    sublayer = True

    def extra_readers(self) -> int:
        """The gate, unless one linear gives it."""
        return int(self.layer.gated_ffn and not self.layer.packed_gate_up)

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

    def local_linears(self, tensor: int) -> dict[str, Linear]:
        """Gate and up are one product if one linear gives them."""
        own = self.sharded_linears(tensor)
        if not self.layer.packed_gate_up:
            return own
        inputs, inner = own["up"]
        return {"gate_up": (inputs, 2 * inner), "down": own["down"]}

    def replicated(self, tensor: int) -> tuple[str, ...]:
        """What one linear gives together."""
        return ("gate", "up") if self.layer.packed_gate_up else ()

    def operators(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """The activation function, and the product with the gate."""
        layer = self.layer
        inner_N = sizes.units_N * layer.ffn_size / setting.execution.tensor
        passes = activation_operators(layer.activation, layer.gated_ffn, inner_N, setting)
        if layer.packed_gate_up:  # their gradients are joined
            moved_N = 4 * setting.element_bytes * inner_N
            passes.inputs.append(Operator("copy", memory_bytes=moved_N, calls=1))
        return passes

    def kept_bytes(self, sizes: TaskSizes, setting: Setting, weights: bool) -> Array | float:
        """Tensors of the inner size; the last one is the input of a linear."""
        inside = {"quick_gelu": 2, CLAMPED: 4}.get(self.layer.activation, 1)
        if setting.execution.compiled:  # computed again from the results of the linears
            inside = 0 if self.layer.gated_ffn else 1
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
    divided: ClassVar[tuple[str, ...]] = ("gate", "up", "down")
    """Linears of experts, which expert-parallel ranks divide among themselves."""

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

    def kept_bytes(self, sizes: TaskSizes, setting: Setting, weights: bool) -> Array | float:
        """With a row for each expert of a token, before and behind its feed-forward part; the
        router's probabilities and copies; numbers of rows, experts and shares."""
        size = setting.element_bytes
        rows_N = self._chosen_N(sizes, setting)
        row_bytes = (1 + weights) * size * self.layer.hidden_size + 4 * 8 + size
        routed_N = 4 * self.layer.experts * sizes.units_N
        if self._casts_router(setting):
            hidden = self.layer.hidden_size
            routed_N = routed_N + 4 * hidden * (weights * sizes.units_N + self.layer.experts)
        if self.layer.router_norm:
            hidden_N = self.layer.hidden_size * sizes.units_N
            # Before and behind its scales; what it reads, in float32 as other norms do.
            copied = 4 if size < 4 else 0
            routed_N = routed_N + (2 * size * weights + copied) * hidden_N + 4 * sizes.units_N
        return super().kept_bytes(sizes, setting, weights) + row_bytes * rows_N + routed_N

    def inner_norms(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """The router's, whose scales weigh as those of other norms."""
        layer = self.layer
        if not layer.router_norm:
            return Operators.none()
        elements_N = sizes.units_N * layer.hidden_size
        return norm_operators(layer.norm, elements_N, 1, setting)

    def results_N(self, sizes: TaskSizes, setting: Setting) -> Array | float:
        """Those of experts are as many rows of a token as it has experts."""
        rows_N = self._chosen_N(sizes, setting) - sizes.units_N
        return super().results_N(sizes, setting) + rows_N * self.layer.hidden_size

    def products(self, sizes: TaskSizes, setting: Setting) -> list[Operator]:
        """Each of the experts' reads the weights of all experts, and a row for each expert of a
        token; gate and what it is for are one product."""
        layer = self.layer
        execution = setting.execution
        rows_N = self._chosen_N(sizes, setting)
        inner = layer.ffn_size / layer.experts_per_token
        weights = self._experts(setting) * layer.hidden_size * inner
        found = []
        own = zip(
            self.local_linears(execution.tensor), super().products(sizes, setting), strict=True
        )
        for name, product in own:
            if name not in self.divided:
                wide = 4 / setting.element_bytes if self._casts_router(setting) else 1
                found.append(product._replace(memory_bytes=wide * product.memory_bytes))
                continue
            joined = name == "up" and layer.gated_ffn
            width = inner + (0 if joined else layer.hidden_size)
            moved_N = setting.element_bytes * (rows_N * width + weights)
            found.append(product._replace(memory_bytes=moved_N, calls=0 if joined else 1))
        return found

    def matrices(self) -> list[Matrices]:
        """Stacks of all experts' matrices, gates with what they are for; the router."""
        layer = self.layer
        inner = layer.ffn_size / layer.experts_per_token
        return [
            Matrices(layer.hidden_size, (1 + layer.gated_ffn) * inner, layer.experts),
            Matrices(inner, layer.hidden_size, layer.experts),
            Matrices(layer.hidden_size, layer.experts),
        ]

    def gradients(self, setting: Setting) -> float:
        """Of all experts' weights."""
        layer = self.layer
        chosen = sum(prod(self.linears()[name]) for name in self.divided if name in self.linears())
        each = chosen / layer.experts_per_token
        router = layer.hidden_size * layer.experts
        return router + self._experts(setting) * each

    def largest_gradient(self, setting: Setting) -> float:
        """One tensor holds gates and what they are for, of all experts."""
        layer = self.layer
        inner = layer.ffn_size / layer.experts_per_token
        return self._experts(setting) * layer.hidden_size * (1 + layer.gated_ffn) * inner

    def _casts_router(self, setting: Setting) -> bool:
        """Whether the router's weights and what it reads are copied to float32."""
        return self.layer.router_float32 and setting.element_bytes < 4

    def _experts(self, setting: Setting) -> float:
        """That a rank has."""
        return self.layer.experts / setting.execution.tensor / setting.execution.expert

    def operators(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """With what brings rows into the order of experts and back, weighs and adds them; in
        backward, gradients of gates and what they are for are joined."""
        passes = super().operators(sizes, setting)
        layer = self.layer
        size = setting.element_bytes
        token_N = size * layer.hidden_size * sizes.units_N
        rows_N = size * layer.hidden_size * self._chosen_N(sizes, setting)
        fused = setting.execution.compiled
        # A sum of slices, or one copy.
        joined = 14 if layer.activation == CLAMPED and not fused else 4
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
        if layer.expert_biases:  # a row of them for each row, added to it; sums by expert
            widths = (1 + layer.gated_ffn) * layer.ffn_size / setting.execution.tensor
            biased_N = size * sizes.units_N * widths + rows_N
            passed, calls = (1, 1) if fused else (4, 4)  # compiled, what reads them adds
            passes.forward.append(
                Operator("elementwise", memory_bytes=passed * biased_N, calls=calls)
            )
            passes.inputs.append(Operator("elementwise", memory_bytes=biased_N, calls=calls))
        return passes

    def temporaries(self, sizes: TaskSizes, setting: Setting) -> Temporaries:
        """With rows in another order, and their gradients."""
        inside = super().temporaries(sizes, setting)
        row_bytes = setting.element_bytes * self.layer.hidden_size
        rows_N = 2 * row_bytes * self._chosen_N(sizes, setting)
        return Temporaries(inside.forward_N + rows_N, inside.backward_N + rows_N)

    def _chosen_N(self, sizes: TaskSizes, setting: Setting) -> Array:
        """Pairs of a token and one of its experts on a rank, if they are spread evenly."""
        return sizes.units_N * self.layer.experts_per_token / setting.execution.tensor

    def exchange(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """Every token to each of its experts and back, if they are spread evenly; twice, as numbers
        of tokens go first. Timed as messages, for which every profile has rates."""
        ranks = setting.execution.expert
        if ranks == 1:
            return Operators.none()
        rows_N = sizes.units_N * self.layer.experts_per_token
        row_bytes = setting.element_bytes * self.layer.hidden_size
        sent_N = 2 * rows_N * row_bytes * (ranks - 1) / ranks
        link = setting.expert_link
        forward = Operator("p2p", network_bytes=sent_N, calls=3, link=link)
        backward = Operator("p2p", network_bytes=sent_N, calls=2, link=link)
        # In order of experts, and back.
        copies = Operator("copy", memory_bytes=4 * rows_N * row_bytes, calls=4)
        return Operators([forward, copies], [backward, copies], [], [])


class SharedExpert(Component):
    """The expert beside the others that all tokens go through; its result may have a gate."""

    @classmethod
    def is_in(cls, layer: LayerDescription) -> bool:
        """As the description says."""
        return bool(layer.shared_ffn_size)

    def extra_readers(self) -> int:
        """All but the product that leads out."""
        return 2 + self.layer.shared_gate

    def linears(self) -> dict[str, tuple[int, int]]:
        """Of a gated feed-forward network, and the gate of its result."""
        hidden = self.layer.hidden_size
        inner = self.layer.shared_ffn_size
        linears = {
            "shared_gate": (hidden, inner),
            "shared_up": (hidden, inner),
            "shared_down": (inner, hidden),
        }
        return linears | ({"shared_share": (hidden, 1)} if self.layer.shared_gate else {})

    def sharded_linears(self, tensor: int) -> dict[str, Linear]:
        """The inner features are divided; every rank has the whole gate of the result."""
        linears = self.linears()
        inner, hidden = linears["shared_down"]
        own: dict[str, Linear] = {"shared_down": (inner / tensor, hidden)}
        if self.layer.shared_gate:
            own["shared_share"] = linears["shared_share"]
        return super().sharded_linears(tensor) | own

    def operators(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """The activation function; the gate of the result, which is added to the others'."""
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

    def kept_bytes(self, sizes: TaskSizes, setting: Setting, weights: bool) -> Array | float:
        """Tensors of the inner size, and the result before its gate, if it has one."""
        inside = 2 if setting.execution.compiled else 3
        inner = (inside + weights) * self.layer.shared_ffn_size / setting.execution.tensor
        gated = self.layer.shared_gate * self.layer.hidden_size
        return setting.element_bytes * sizes.units_N * (inner + gated)


def round_products(
    passes: Operators,
    rounded: Rounded,
    components: Sequence[Component],
    sizes: TaskSizes,
    setting: Setting,
) -> None:
    """Puts products in float8 in place of others of `components`, in the same order, and casts
    behind all of them."""
    tensor = setting.execution.tensor
    named = [(c, i, name) for c in components for i, name in enumerate(c.local_linears(tensor))]
    for place, (component, index, name) in enumerate(named):
        if not _rounds(component, name, rounded):
            continue
        own = component.local_linears(tensor)[name]
        shares = 0 < index <= component.extra_readers()
        rows_N = component.rows_N(name, sizes)
        found = rounded_matmul(rows_N, *own, rounded, setting, has_cast_input=shares)
        for each, (product, casts) in zip(passes, found[:3], strict=False):
            each[place] = product._replace(calls=each[place].calls)
            each.append(casts)


def cast_bytes(
    rounded: Rounded | None, components: Sequence[Component], sizes: TaskSizes, setting: Setting
) -> Array:
    """Of casts to float8: values that were scaled, and limited, in float32, and the result; of the
    largest linear."""
    found_N = [0.0 * sizes.units_N]
    tensor = setting.execution.tensor
    if rounded is None:
        return found_N[0]
    for component in components:
        for name, (inputs, outputs) in component.local_linears(tensor).items():
            if _rounds(component, name, rounded):
                rows_N = component.rows_N(name, sizes)
                parts_N = (rows_N * inputs, rows_N * outputs, inputs * outputs + 0 * rows_N)
                found_N.append(9 * np.max(parts_N, axis=0))
    return np.max(found_N, axis=0)


def _rounds(component: Component, name: str, rounded: Rounded) -> bool:
    whole = component.local_linears(1).get(name)
    return whole in rounded.linears and not isinstance(component, Experts)
