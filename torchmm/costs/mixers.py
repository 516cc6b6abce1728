"""Costs of components that only some layers have: delta nets, short convolutions and adapters.

Gated delta nets and short convolutions replace attention. The FLOPs of a delta net are those of the
chunked recurrence, with a full last chunk for each segment. Convolutions also process the zeros
between segments.

The shape suffix N means tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from torchmm.common.layers import AdapterSizes, ConvolutionSizes, DeltaSizes, LayerDescription
from torchmm.costs.component import LayerComponent, Linear, TemporaryBytes, head_exchange_operators
from torchmm.costs.execution import CostSetting, Matrices
from torchmm.costs.operators import (
    Operator,
    PassOperators,
    accumulation_operator,
    all_reduce_bytes,
    matmul_operator,
)
from torchmm.costs.sizes import Array, TaskSizes

MIN_CHUNK, MAX_CHUNK = 16, 64
"""Range of positions per chunk of a gated delta net, see `torchmm.models.layers.delta_ops`."""


class DeltaNet(LayerComponent):
    """Gated delta net: projections, a causal convolution and a chunked recurrence."""

    is_residual_branch = True

    def __init__(self, layer: LayerDescription) -> None:
        super().__init__(layer)
        assert isinstance(layer.mixer, DeltaSizes), (
            "unsupported config; applies_to should have rejected this"
        )
        self.delta = layer.mixer
        self.keys = self.delta.key_heads * self.delta.key_dim
        self.values = self.delta.value_heads * self.delta.value_dim

    @classmethod
    def applies_to(cls, layer: LayerDescription) -> bool:
        """Return True for layers with a gated delta net."""
        return isinstance(layer.mixer, DeltaSizes)

    def extra_input_readers(self) -> int:
        """Return the number of input projections without the first one."""
        return len(self.linears()) - 2

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return the projections. Beta and decay have one value per head."""
        hidden = self.layer.hidden_size
        mixed = 2 * self.keys + self.values
        heads = self.delta.value_heads
        if self.delta.interleaved:
            inputs = {"mixed_gate": (hidden, mixed + self.values), "shares": (hidden, 2 * heads)}
        else:
            inputs = {"mixed": (hidden, mixed), "gate": (hidden, self.values)}
            inputs |= {"beta": (hidden, heads), "decay": (hidden, heads)}
        return {f"delta_{name}": size for name, size in inputs.items()} | {
            "delta_output": (self.values, hidden)
        }

    def sharded_linears(self, tensor: int) -> dict[str, Linear]:
        """Return the shards. Heads are sharded."""
        inputs, outputs = self.linears()["delta_output"]
        return super().sharded_linears(tensor) | {"delta_output": (inputs / tensor, outputs)}

    def replicated_linears(self, tensor: int) -> tuple[str, ...]:
        """Return the projection with concatenated queries, keys and values."""
        return () if self.delta.interleaved else ("delta_mixed",)

    def _channels(self, setting: CostSetting) -> float:
        """Return the number of channels of the convolution on a rank.

        A context-parallel rank has at least one full key head, which other ranks can also have.
        """
        execution = setting.execution
        keys = max(self.keys / execution.tensor, execution.context * self.delta.key_dim)
        return 2 * keys + self.values / execution.tensor

    def flops_N(self, sizes: TaskSizes) -> Array | float:
        """Return the FLOPs of linear layers and of the convolution."""
        channels = 2 * self.keys + self.values
        return super().flops_N(sizes) + filter_flops_N(self.delta.filter_width, channels, sizes)

    def pair_flops_N(self, sizes: TaskSizes) -> Array | float:
        """Return the FLOPs of the matmuls of the recurrence in full chunks.

        Inside a chunk of length L, these are keys with keys and with queries (2 * L^2 * key_dim),
        and scores with values (L^2 * value_dim). Three matmuls have the state (3 * L * key_dim *
        value_dim), one of which is its update.
        """
        d = self.delta
        length_N = _chunk_lengths_N(sizes)
        inside_N = length_N**2 * (2 * d.key_dim + d.value_dim)
        state_N = 3 * length_N * d.key_dim * d.value_dim
        return 2 * d.value_heads * (inside_N + state_N) * sizes.chunks_N(length_N)

    def operators(self, sizes: TaskSizes, setting: CostSetting) -> PassOperators:
        """Return the recurrence as one operator per pass, and the operators around it.

        The backward pass recomputes the matmuls of the forward pass. Memory traffic is a rough
        estimate: the recurrence reads and writes float32 tensors of chunks about 20 times.
        """
        size = setting.element_bytes
        tensor = setting.execution.tensor
        flops_N = self.pair_flops_N(sizes) / tensor
        solved_N = self._solve_flops_N(sizes) / tensor
        wide_N = self._wide_bytes_N(sizes) / tensor
        calls_N = sizes.segments_N * 0.0 + 1
        forward = Operator("attention", flops_N + solved_N, memory_bytes=wide_N, calls=calls_N)
        backward_flops_N = 3 * flops_N + 4 * solved_N
        backward = Operator(
            "attention_backward", backward_flops_N, memory_bytes=3 * wide_N, calls=calls_N
        )
        mixed_N = size * sizes.units_N * self._channels(setting)
        gated_N = 4 * sizes.units_N * self.values / tensor
        passes = PassOperators([forward], [backward], [], [])
        fused = setting.execution.compiled
        for of_pass, mixed, gated, calls in (
            (passes.forward, *((7, 4, 11) if fused else (12, 12, 34))),
            (passes.inputs, *((12, 8, 14) if fused else (20, 30, 48))),
        ):
            moved_N = mixed * mixed_N + gated * gated_N
            of_pass.append(Operator("elementwise", memory_bytes=moved_N, calls=calls))
        return passes

    def _solve_flops_N(self, sizes: TaskSizes) -> Array:
        """Return the FLOPs of the two triangular solves, which torch does not count."""
        d = self.delta
        length_N = _chunk_lengths_N(sizes)
        widths = d.key_dim + d.value_dim
        return d.value_heads * length_N**2 * widths * sizes.chunks_N(length_N)

    def _wide_bytes_N(self, sizes: TaskSizes) -> Array:
        """Return the bytes of the float32 tensors of a pass over the chunks."""
        d = self.delta
        length_N = _chunk_lengths_N(sizes)
        inside_N = length_N * (5 * length_N + 6 * d.key_dim + 5 * d.value_dim)
        state = d.key_dim * d.value_dim
        return 4 * d.value_heads * (inside_N + state) * sizes.chunks_N(length_N)

    def saved_bytes(self, sizes: TaskSizes, setting: CostSetting, weights: bool) -> Array | float:
        """Return the bytes saved by convolution, activation, recurrence, norm and gate.

        Two int64 index tensors for permuting the tokens of the packed sequence are also saved.
        """
        size = setting.element_bytes
        tensor = setting.execution.tensor
        heads = self.delta.value_heads / tensor
        mixed = self._channels(setting)
        values = self.values / tensor
        filtered_N = size * mixed * positions_with_padding_N(self.delta.filter_width, sizes)
        activated_N = 2 * size * mixed * sizes.units_N
        # Decay and its inputs in float32, beta, and the inverse norm per head.
        shares_N = (3 * 4 + size + 4) * heads * sizes.units_N
        # Float32 result, its norm and the activated gate, the gate, and twice the norm result.
        normed_N = (4 * 3 + size * (3 + 2 * weights)) * values * sizes.units_N
        moves_N = 16 * sizes.units_N / sizes.share
        return filtered_N + activated_N + shares_N + normed_N + moves_N

    def saved_results_bytes(self, sizes: TaskSizes, setting: CostSetting) -> Array | float:
        """Return the bytes of results of linear layers and of the recurrence."""
        values = self.values / setting.execution.tensor
        result_N = setting.element_bytes * values * sizes.units_N
        return super().saved_results_bytes(sizes, setting) + result_N

    def temporaries(self, sizes: TaskSizes, setting: CostSetting) -> TemporaryBytes:
        """Return the bytes of float32 chunks, in the backward pass with their gradients."""
        tensor = setting.execution.tensor
        wide_N = self._wide_bytes_N(sizes) / tensor
        return TemporaryBytes(wide_N, 3 * wide_N)

    def communication(self, sizes: TaskSizes, setting: CostSetting) -> PassOperators:
        """Return the all-to-all of values, beta, decay, keys and queries, and of the result.

        Received tensors are concatenated to channels again.
        """
        tensor = setting.execution.tensor
        values, heads = self.values / tensor, self.delta.value_heads / tensor
        channels = self._channels(setting)
        keys = (channels - values) / 2
        passes = head_exchange_operators((values, heads, heads, keys, keys), values, sizes, setting)
        if setting.execution.context > 1:
            joined_N = 2 * setting.element_bytes * sizes.units_N * channels
            for part in (passes.forward, passes.inputs):
                part.append(Operator("copy", memory_bytes=joined_N, calls=1))
        return passes


class ShortConvolution(LayerComponent):
    """Short causal convolution between two gates. One linear layer computes its input and gates."""

    is_residual_branch = True

    def __init__(self, layer: LayerDescription) -> None:
        super().__init__(layer)
        assert isinstance(layer.mixer, ConvolutionSizes), (
            "unsupported config; applies_to should have rejected this"
        )
        self.width = layer.mixer.filter_width

    @classmethod
    def applies_to(cls, layer: LayerDescription) -> bool:
        """Return True for layers with a short convolution."""
        return isinstance(layer.mixer, ConvolutionSizes)

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return the input projection, which includes both gates, and the output projection."""
        hidden = self.layer.hidden_size
        return {
            "convolution_input": (hidden, 3 * hidden),
            "convolution_output": (hidden, hidden),
        }

    def sharded_linears(self, tensor: int) -> dict[str, Linear]:
        """Return the shards. Channels are sharded."""
        inputs, outputs = self.linears()["convolution_output"]
        shards = {"convolution_output": (inputs / tensor, float(outputs))}
        return super().sharded_linears(tensor) | shards

    def replicated_linears(self, tensor: int) -> tuple[str, ...]:
        """Return the projection with concatenated gates and convolution input."""
        return ("convolution_input",)

    def flops_N(self, sizes: TaskSizes) -> Array | float:
        """Return the FLOPs of linear layers and of the convolution."""
        channels = self.layer.hidden_size
        return super().flops_N(sizes) + filter_flops_N(self.width, channels, sizes)

    def operators(self, sizes: TaskSizes, setting: CostSetting) -> PassOperators:
        """Return the gate multiplications, the convolution, and the insertion of zeros for it."""
        channels = self.layer.hidden_size / setting.execution.tensor
        moved_N = setting.element_bytes * channels * sizes.units_N
        apart_N = setting.element_bytes * channels * positions_with_padding_N(self.width, sizes)
        passes = PassOperators.empty()
        fused = setting.execution.compiled
        for of_pass, moved, calls in (
            (passes.forward, *((9, 6) if fused else (9, 12))),
            (passes.inputs, *((16, 6) if fused else (30, 12))),
        ):
            nbytes_N = moved * moved_N + 6 * apart_N
            of_pass.append(Operator("elementwise", memory_bytes=nbytes_N, calls=calls))
        return passes

    def saved_bytes(self, sizes: TaskSizes, setting: CostSetting, weights: bool) -> Array | float:
        """Return the saved bytes.

        They are the result of the linear layer, the gated input with and without inserted zeros,
        the result of the convolution, and the gated result. Two int64 index tensors for inserting
        zeros are also saved.
        """
        channels = self.layer.hidden_size / setting.execution.tensor
        apart_N = positions_with_padding_N(self.width, sizes)
        wide_N = channels * ((5 + weights) * sizes.units_N + apart_N)
        return setting.element_bytes * wide_N + 16 * sizes.units_N / sizes.share

    def temporaries(self, sizes: TaskSizes, setting: CostSetting) -> TemporaryBytes:
        """Return the bytes of products and copies in forward, and of gradients in backward."""
        channels = self.layer.hidden_size / setting.execution.tensor
        wide_N = setting.element_bytes * channels * sizes.units_N
        return TemporaryBytes(4 * wide_N, 6 * wide_N)

    def communication(self, sizes: TaskSizes, setting: CostSetting) -> PassOperators:
        """Return the all-to-all of the gated channels and of the convolution result."""
        channels = self.layer.hidden_size / setting.execution.tensor
        return head_exchange_operators((channels,), channels, sizes, setting)


def positions_with_padding_N(width: int, sizes: TaskSizes) -> Array:
    """Return the number of positions per rank, including width - 1 zeros before each segment.

    Context-parallel ranks divide the channels, so a rank has `share` of the positions.
    """
    return sizes.units_N + (width - 1) * sizes.share * sizes.segments_N


def filter_flops_N(width: int, channels: int, sizes: TaskSizes) -> Array:
    """Return the forward FLOPs of a depthwise convolution."""
    return (
        2 * width * channels * (positions_with_padding_N(width, sizes) - (width - 1) * sizes.share)
    )


def _chunk_lengths_N(sizes: TaskSizes) -> Array:
    """Return the chunk length by task: the longest segment, rounded up to a power of 2 in range."""
    powers_N = np.ceil(np.log2(np.maximum(sizes.longest_N, 1)))
    return np.clip(2**powers_N, MIN_CHUNK, MAX_CHUNK)


class _LocalAdapter(NamedTuple):
    """Sizes of an adapter on one tensor-parallel rank."""

    inputs: float
    outputs: float
    rank: int
    magnitudes: bool

    @property
    def parameters(self) -> float:
        """Number of parameters of both matrices and of the magnitudes."""
        return self.rank * (self.inputs + self.outputs) + self.magnitudes * self.outputs


class AdapterCosts:
    """Low-rank adapters (LoRA, DoRA) of linear layers with the same number of rows.

    LoRA adds two small matmuls to each linear layer, and a sum of both results. DoRA also computes
    the norms of the weight rows in every forward pass, and multiplies outputs by a factor.

    All other weights are frozen, so `weights` of the operators contains only adapters.

    Args:
        adapters: Sizes of the adapters.
    """

    def __init__(self, adapters: Sequence[AdapterSizes]) -> None:
        self._adapters = adapters

    def _local(self, tensor: int) -> list[_LocalAdapter]:
        return [
            _LocalAdapter(
                adapter.inputs / (tensor if adapter.sharded_dim == "inputs" else 1),
                adapter.outputs / (tensor if adapter.sharded_dim == "outputs" else 1),
                adapter.rank,
                adapter.magnitudes,
            )
            for adapter in self._adapters
        ]

    def parameters(self, tensor: int) -> float:
        """Return the number of parameters of all adapters on one rank."""
        return sum(adapter.parameters for adapter in self._local(tensor))

    def flops_N(self, rows_N: Array) -> Array:
        """Return the FLOPs of both matmuls. Norms of weight rows are not included."""
        return (
            2
            * sum(adapter.rank * (adapter.inputs + adapter.outputs) for adapter in self._adapters)
            * rows_N
        )

    def operators(self, rows_N: Array, setting: CostSetting) -> PassOperators:
        """Return both matmuls, the scaling of the low-rank features, and the sum.

        The backward pass has the same operators. It also adds the input gradients of linear layer
        and adapter.
        """
        size = setting.element_bytes
        passes = PassOperators.empty()
        for adapter in self._local(setting.execution.tensor):
            inputs, outputs, rank, magnitudes = adapter
            products = [
                matmul_operator(rows_N, inputs, rank, setting),
                matmul_operator(rows_N, rank, outputs, setting),
            ]
            # If compiled, the consumer of the sum adds.
            passed, calls = (1, 1) if setting.execution.compiled else (3, 2)
            for part, width in ((passes.forward, outputs), (passes.inputs, inputs)):
                moved_N = size * rows_N * (2 * rank + passed * width)
                part.extend([*products, Operator("elementwise", memory_bytes=moved_N, calls=calls)])
            sums = accumulation_operator(adapter.parameters, setting, 2 + magnitudes)
            passes.weights.extend([*products, sums])
            if magnitudes:
                passes.add(_magnitude_operators(adapter, rows_N, setting))
        passes.forward.extend(self._sums_of_squares(setting))
        return passes

    def _sums_of_squares(self, setting: CostSetting) -> Iterator[Operator]:
        """Yield the all-reduces of squared row norms for weights with sharded rows (DoRA)."""
        tensor = setting.execution.tensor
        for adapter in self._adapters:
            if adapter.magnitudes and adapter.sharded_dim == "inputs" and tensor > 1:
                sent = all_reduce_bytes(4 * adapter.outputs, tensor)
                yield Operator("all_reduce", network_bytes=sent, link=setting.tensor_link)

    def saved_bytes(self, rows_N: Array, setting: CostSetting) -> Array:
        """Return the bytes of low-rank features, and of the inputs of magnitudes."""
        local = self._local(setting.execution.tensor)
        kept = sum(adapter.rank + adapter.magnitudes * adapter.outputs for adapter in local)
        return setting.element_bytes * rows_N * kept

    def saved_results_bytes(self, rows_N: Array, setting: CostSetting) -> Array:
        """Return the bytes of the results of all matmuls, including those for row norms."""
        size = setting.element_bytes
        local = self._local(setting.execution.tensor)
        results = sum(adapter.outputs + adapter.rank for adapter in local)
        of_norms = sum(
            (size + 4) * adapter.outputs * adapter.rank + size * adapter.rank**2
            for adapter in local
            if adapter.magnitudes
        )
        return size * rows_N * results + of_norms

    def temporaries(self, rows_N: Array, setting: CostSetting) -> TemporaryBytes:
        """Return the bytes of the results of linear layer and adapter, and of their sum.

        In the backward pass, these are the input gradients of both, and their sum.
        """
        local = self._local(setting.execution.tensor)
        bytes_N = setting.element_bytes * rows_N
        return TemporaryBytes(
            3 * bytes_N * max(adapter.outputs for adapter in local),
            3 * bytes_N * max(adapter.inputs for adapter in local),
        )


class AdapterComponent(LayerComponent):
    """Low-rank adapters of the linear layers of a transformer layer."""

    def __init__(self, layer: LayerDescription) -> None:
        super().__init__(layer)
        self.adapter_costs = AdapterCosts(layer.adapters)

    @classmethod
    def applies_to(cls, layer: LayerDescription) -> bool:
        """Return True for layers with adapters."""
        return bool(layer.adapters)

    def matrices(self) -> list[Matrices]:
        """Return both matrices of each adapter."""
        every = self.layer.adapters
        pairs = ((Matrices(a.inputs, a.rank), Matrices(a.rank, a.outputs)) for a in every)
        return [matrices for pair in pairs for matrices in pair]

    def parameters(self, tensor: int) -> float:
        """Return the number of parameters of all adapters on one rank."""
        return self.adapter_costs.parameters(tensor)

    def flops_N(self, sizes: TaskSizes) -> Array | float:
        """Return the FLOPs of the adapter matmuls."""
        return self.adapter_costs.flops_N(sizes.units_N)

    def operators(self, sizes: TaskSizes, setting: CostSetting) -> PassOperators:
        """Return the operators of all adapters."""
        return self.adapter_costs.operators(sizes.units_N, setting)

    def saved_bytes(self, sizes: TaskSizes, setting: CostSetting, weights: bool) -> Array | float:
        """Return the saved bytes without the inputs of linear layers, which are already counted."""
        return weights * self.adapter_costs.saved_bytes(sizes.units_N, setting)

    def saved_results_bytes(self, sizes: TaskSizes, setting: CostSetting) -> Array | float:
        """Return the bytes of the results of the adapter matmuls."""
        return self.adapter_costs.saved_results_bytes(sizes.units_N, setting)

    def temporaries(self, sizes: TaskSizes, setting: CostSetting) -> TemporaryBytes:
        """Return the maximum bytes of temporaries, see `AdapterCosts.temporaries`."""
        return self.adapter_costs.temporaries(sizes.units_N, setting)


def _magnitude_operators(
    adapter: _LocalAdapter, rows_N: Array, setting: CostSetting
) -> PassOperators:
    """Return the operators of DoRA: norms of the weight rows, and a factor per output.

    The norms require squares of the weight, its matmul with A, and small matmuls. The factor is a
    multiplication. The backward pass has one multiplication for the result, and one that is summed
    over tokens for the magnitudes.
    """
    size = setting.element_bytes
    squares = Operator(
        "elementwise", memory_bytes=size * adapter.outputs * adapter.inputs, calls=10
    )
    norms = [squares, matmul_operator(adapter.outputs, adapter.inputs, adapter.rank, setting)]
    norms += [matmul_operator(adapter.rank, adapter.inputs, adapter.rank, setting)]
    norms += [matmul_operator(adapter.outputs, adapter.rank, adapter.rank, setting)]
    result_N = size * rows_N * adapter.outputs
    factor = Operator("elementwise", memory_bytes=2 * result_N)
    summed = Operator("elementwise", memory_bytes=4 * result_N, calls=3)
    return PassOperators([*norms, factor], [factor], [summed], [])
