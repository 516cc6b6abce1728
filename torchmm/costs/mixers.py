"""Costs of what only some layers have: gated delta nets or short convolutions in place of
attention, and adapters of linears.

FLOPs of a delta net are those of the recurrence in chunks, as it is computed; a segment's last
chunk counts whole. Convolutions also run over the zeros between segments.

Shape suffix N: tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from torchmm.common.layers import ConvolutionSizes, DeltaSizes, LayerDescription, LowRank
from torchmm.costs.component import Component, Linear, Temporaries, exchange_of_heads
from torchmm.costs.execution import Matrices, Setting
from torchmm.costs.operators import (
    Operator,
    Operators,
    accumulate,
    all_reduce_bytes,
    matmul,
)
from torchmm.costs.sizes import Array, TaskSizes

SHORTEST_CHUNK, LONGEST_CHUNK = 16, 64
"""Positions of a chunk of a gated delta net, as in `torchmm.models.layers.delta_ops`."""


class DeltaNet(Component):
    """A gated delta net: projections, a causal convolution and a recurrence in chunks."""

    sublayer = True

    def __init__(self, layer: LayerDescription) -> None:
        super().__init__(layer)
        assert isinstance(layer.mixer, DeltaSizes), (
            "unsupported config; is_in should have rejected this"
        )
        self.delta = layer.mixer
        self.keys = self.delta.key_heads * self.delta.key_dim
        self.values = self.delta.value_heads * self.delta.value_dim

    @classmethod
    def is_in(cls, layer: LayerDescription) -> bool:
        """As the description says."""
        return isinstance(layer.mixer, DeltaSizes)

    def extra_readers(self) -> int:
        """All input projections but the first."""
        return len(self.linears()) - 2

    def linears(self) -> dict[str, tuple[int, int]]:
        """Projections; beta and decay have one value per head."""
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
        """Heads are divided."""
        inputs, outputs = self.linears()["delta_output"]
        return super().sharded_linears(tensor) | {"delta_output": (inputs / tensor, outputs)}

    def replicated(self, tensor: int) -> tuple[str, ...]:
        """What holds queries, keys and values one after the other."""
        return () if self.delta.interleaved else ("delta_mixed",)

    def _channels(self, setting: Setting) -> float:
        """That a rank's convolution has, for its tokens. Ranks that share a row get a whole head of
        keys at least, though others may have the same one."""
        execution = setting.execution
        keys = max(self.keys / execution.tensor, execution.context * self.delta.key_dim)
        return 2 * keys + self.values / execution.tensor

    def flops_N(self, sizes: TaskSizes) -> Array | float:
        """With the convolution."""
        channels = 2 * self.keys + self.values
        return super().flops_N(sizes) + filter_flops_N(self.delta.filter_width, channels, sizes)

    def pair_flops_N(self, sizes: TaskSizes) -> Array | float:
        """Products of the recurrence, of whole chunks: keys with keys and with queries, scores with
        values, and three with the state, of which one is its update."""
        d = self.delta
        length_N = _chunk_lengths_N(sizes)
        inside_N = length_N**2 * (2 * d.key_dim + d.value_dim)
        state_N = 3 * length_N * d.key_dim * d.value_dim
        return 2 * d.value_heads * (inside_N + state_N) * sizes.chunks_N(length_N)

    def operators(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """The recurrence as one operator for each pass, and what stands around it.

        Backward computes forward's products again, without their results. Traffic is rough: the
        recurrence reads and writes float32 tensors of chunks some 20 times.
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
        passes = Operators([forward], [backward], [], [])
        fused = setting.execution.compiled
        for own, mixed, gated, calls in (
            (passes.forward, *((7, 4, 11) if fused else (12, 12, 34))),
            (passes.inputs, *((12, 8, 14) if fused else (20, 30, 48))),
        ):
            moved_N = mixed * mixed_N + gated * gated_N
            own.append(Operator("elementwise", memory_bytes=moved_N, calls=calls))
        return passes

    def _solve_flops_N(self, sizes: TaskSizes) -> Array:
        """Of the two triangular solves, which torch's counter leaves out."""
        d = self.delta
        length_N = _chunk_lengths_N(sizes)
        widths = d.key_dim + d.value_dim
        return d.value_heads * length_N**2 * widths * sizes.chunks_N(length_N)

    def _wide_bytes_N(self, sizes: TaskSizes) -> Array:
        """float32 values that a pass over the chunks makes."""
        d = self.delta
        length_N = _chunk_lengths_N(sizes)
        inside_N = length_N * (5 * length_N + 6 * d.key_dim + 5 * d.value_dim)
        state = d.key_dim * d.value_dim
        return 4 * d.value_heads * (inside_N + state) * sizes.chunks_N(length_N)

    def kept_bytes(self, sizes: TaskSizes, setting: Setting, weights: bool) -> Array | float:
        """Of the convolution and its activation, the recurrence, and the norm with the gate; where
        tokens of the whole row move, in two int64."""
        size = setting.element_bytes
        tensor = setting.execution.tensor
        heads = self.delta.value_heads / tensor
        mixed = self._channels(setting)
        values = self.values / tensor
        filtered_N = size * mixed * spaced_N(self.delta.filter_width, sizes)
        activated_N = 2 * size * mixed * sizes.units_N
        # Decay and its inputs in float32, beta, the inverse root of each head's norm.
        shares_N = (3 * 4 + size + 4) * heads * sizes.units_N
        # Float32 result, its norm and the gate's activation; the gate; the norm's result twice.
        normed_N = (4 * 3 + size * (3 + 2 * weights)) * values * sizes.units_N
        moves_N = 16 * sizes.units_N / sizes.share
        return filtered_N + activated_N + shares_N + normed_N + moves_N

    def kept_results_bytes(self, sizes: TaskSizes, setting: Setting) -> Array | float:
        """With the result of the recurrence."""
        values = self.values / setting.execution.tensor
        own_N = setting.element_bytes * values * sizes.units_N
        return super().kept_results_bytes(sizes, setting) + own_N

    def temporaries(self, sizes: TaskSizes, setting: Setting) -> Temporaries:
        """Chunks in float32; in backward with their gradients."""
        tensor = setting.execution.tensor
        wide_N = self._wide_bytes_N(sizes) / tensor
        return Temporaries(wide_N, 3 * wide_N)

    def exchange(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """Values with their shares, keys and queries, and the result; the first ones are joined to
        channels again."""
        tensor = setting.execution.tensor
        values, heads = self.values / tensor, self.delta.value_heads / tensor
        channels = self._channels(setting)
        keys = (channels - values) / 2
        passes = exchange_of_heads((values, heads, heads, keys, keys), values, sizes, setting)
        if setting.execution.context > 1:
            joined_N = 2 * setting.element_bytes * sizes.units_N * channels
            for part in (passes.forward, passes.inputs):
                part.append(Operator("copy", memory_bytes=joined_N, calls=1))
        return passes


class ShortConvolution(Component):
    """A causal convolution over a few tokens between two gates, which one linear gives with it."""

    sublayer = True

    def __init__(self, layer: LayerDescription) -> None:
        super().__init__(layer)
        assert isinstance(layer.mixer, ConvolutionSizes), (
            "unsupported config; is_in should have rejected this"
        )
        self.width = layer.mixer.filter_width

    @classmethod
    def is_in(cls, layer: LayerDescription) -> bool:
        """As the description says."""
        return isinstance(layer.mixer, ConvolutionSizes)

    def linears(self) -> dict[str, tuple[int, int]]:
        """Into the gates and what they gate, and out again."""
        hidden = self.layer.hidden_size
        return {
            "convolution_input": (hidden, 3 * hidden),
            "convolution_output": (hidden, hidden),
        }

    def sharded_linears(self, tensor: int) -> dict[str, Linear]:
        """Channels are divided."""
        inputs, outputs = self.linears()["convolution_output"]
        own = {"convolution_output": (inputs / tensor, float(outputs))}
        return super().sharded_linears(tensor) | own

    def replicated(self, tensor: int) -> tuple[str, ...]:
        """What holds both gates and what they gate one after the other."""
        return ("convolution_input",)

    def flops_N(self, sizes: TaskSizes) -> Array | float:
        """With the convolution."""
        channels = self.layer.hidden_size
        return super().flops_N(sizes) + filter_flops_N(self.width, channels, sizes)

    def operators(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """Two products with gates, the convolution, and what moves tokens apart for it."""
        channels = self.layer.hidden_size / setting.execution.tensor
        moved_N = setting.element_bytes * channels * sizes.units_N
        apart_N = setting.element_bytes * channels * spaced_N(self.width, sizes)
        passes = Operators.none()
        fused = setting.execution.compiled
        for own, moved, calls in (
            (passes.forward, *((9, 6) if fused else (9, 12))),
            (passes.inputs, *((16, 6) if fused else (30, 12))),
        ):
            nbytes_N = moved * moved_N + 6 * apart_N
            own.append(Operator("elementwise", memory_bytes=nbytes_N, calls=calls))
        return passes

    def kept_bytes(self, sizes: TaskSizes, setting: Setting, weights: bool) -> Array | float:
        """What the linear gave, the first gated product, before and after tokens move apart, what
        the convolution gave, the second; where tokens move, in two int64."""
        channels = self.layer.hidden_size / setting.execution.tensor
        apart_N = spaced_N(self.width, sizes)
        wide_N = channels * ((5 + weights) * sizes.units_N + apart_N)
        return setting.element_bytes * wide_N + 16 * sizes.units_N / sizes.share

    def temporaries(self, sizes: TaskSizes, setting: Setting) -> Temporaries:
        """Of the width of channels: products and copies in forward, gradients in backward."""
        channels = self.layer.hidden_size / setting.execution.tensor
        wide_N = setting.element_bytes * channels * sizes.units_N
        return Temporaries(4 * wide_N, 6 * wide_N)

    def exchange(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """The gated channels, and what the convolution makes of them."""
        channels = self.layer.hidden_size / setting.execution.tensor
        return exchange_of_heads((channels,), channels, sizes, setting)


def spaced_N(width: int, sizes: TaskSizes) -> Array:
    """Positions with the zeros that stand before each segment, as many as a filter reaches back; a
    rank's share of them, as it has of channels."""
    return sizes.units_N + (width - 1) * sizes.share * sizes.segments_N


def filter_flops_N(width: int, channels: int, sizes: TaskSizes) -> Array:
    """Forward FLOPs of a convolution of each channel."""
    return 2 * width * channels * (spaced_N(width, sizes) - (width - 1) * sizes.share)


def _chunk_lengths_N(sizes: TaskSizes) -> Array:
    """A power of 2, which the longest segment asks for."""
    powers_N = np.ceil(np.log2(np.maximum(sizes.longest_N, 1)))
    return np.clip(2**powers_N, SHORTEST_CHUNK, LONGEST_CHUNK)


class _Adapter(NamedTuple):
    """As a tensor-parallel rank has it."""

    inputs: float
    outputs: float
    rank: int
    magnitudes: bool

    @property
    def parameters(self) -> float:
        """Of both matrices, and magnitudes."""
        return self.rank * (self.inputs + self.outputs) + self.magnitudes * self.outputs


class LowRanks:
    """Low-rank adapters of linears that are computed for as many rows each: two small products
    beside each linear, and the sum of both results; with DoRA, norms of the weight's rows in every
    forward, and a factor for each output.

    All else is frozen, so `weights` of their operators are those of adapters alone.

    Args:
        adapters: sizes.
    """

    def __init__(self, adapters: Sequence[LowRank]) -> None:
        self._adapters = adapters

    def _local(self, tensor: int) -> list[_Adapter]:
        return [
            _Adapter(
                own.inputs / (tensor if own.divided == "inputs" else 1),
                own.outputs / (tensor if own.divided == "outputs" else 1),
                own.rank,
                own.magnitudes,
            )
            for own in self._adapters
        ]

    def parameters(self, tensor: int) -> float:
        """Of all adapters, on one rank."""
        return sum(own.parameters for own in self._local(tensor))

    def flops_N(self, rows_N: Array) -> Array:
        """Of both products; norms of rows, the same for any number of tokens, do not count."""
        return 2 * sum(own.rank * (own.inputs + own.outputs) for own in self._adapters) * rows_N

    def operators(self, rows_N: Array, setting: Setting) -> Operators:
        """Both products, a factor for the few features, a sum; in backward the same once more, and
        the sum of the gradients of what linear and adapter read."""
        size = setting.element_bytes
        passes = Operators.none()
        for own in self._local(setting.execution.tensor):
            inputs, outputs, rank, magnitudes = own
            products = [
                matmul(rows_N, inputs, rank, setting),
                matmul(rows_N, rank, outputs, setting),
            ]
            # Compiled, what reads the sum adds.
            passed, calls = (1, 1) if setting.execution.compiled else (3, 2)
            for part, width in ((passes.forward, outputs), (passes.inputs, inputs)):
                moved_N = size * rows_N * (2 * rank + passed * width)
                part.extend([*products, Operator("elementwise", memory_bytes=moved_N, calls=calls)])
            sums = accumulate(own.parameters, setting, 2 + magnitudes)
            passes.weights.extend([*products, sums])
            if magnitudes:
                passes.add(_scaling(own, rows_N, setting))
        passes.forward.extend(self._sums_of_squares(setting))
        return passes

    def _sums_of_squares(self, setting: Setting) -> Iterator[Operator]:
        """Of rows that tensor-parallel ranks divide."""
        tensor = setting.execution.tensor
        for own in self._adapters:
            if own.magnitudes and own.divided == "inputs" and tensor > 1:
                sent = all_reduce_bytes(4 * own.outputs, tensor)
                yield Operator("all_reduce", network_bytes=sent, link=setting.tensor_link)

    def kept_bytes(self, rows_N: Array, setting: Setting) -> Array:
        """The few features, and what magnitudes multiply."""
        local = self._local(setting.execution.tensor)
        kept = sum(own.rank + own.magnitudes * own.outputs for own in local)
        return setting.element_bytes * rows_N * kept

    def kept_results_bytes(self, rows_N: Array, setting: Setting) -> Array:
        """Of both products, and of those for norms."""
        size = setting.element_bytes
        local = self._local(setting.execution.tensor)
        results = sum(own.outputs + own.rank for own in local)
        of_norms = sum(
            (size + 4) * own.outputs * own.rank + size * own.rank**2
            for own in local
            if own.magnitudes
        )
        return size * rows_N * results + of_norms

    def temporaries(self, rows_N: Array, setting: Setting) -> Temporaries:
        """A product beside the linear's, and their sum; gradients of what both read, and their
        sum."""
        local = self._local(setting.execution.tensor)
        bytes_N = setting.element_bytes * rows_N
        return Temporaries(
            3 * bytes_N * max(own.outputs for own in local),
            3 * bytes_N * max(own.inputs for own in local),
        )


class Adapters(Component):
    """`LowRanks` of a layer's linears."""

    def __init__(self, layer: LayerDescription) -> None:
        super().__init__(layer)
        self.low_ranks = LowRanks(layer.adapters)

    @classmethod
    def is_in(cls, layer: LayerDescription) -> bool:
        """As the description says."""
        return bool(layer.adapters)

    def matrices(self) -> list[Matrices]:
        """Both of each adapter."""
        every = self.layer.adapters
        pairs = ((Matrices(a.inputs, a.rank), Matrices(a.rank, a.outputs)) for a in every)
        return [matrices for pair in pairs for matrices in pair]

    def parameters(self, tensor: int) -> float:
        """Of all adapters."""
        return self.low_ranks.parameters(tensor)

    def flops_N(self, sizes: TaskSizes) -> Array | float:
        """Of their products."""
        return self.low_ranks.flops_N(sizes.units_N)

    def operators(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """Beside those of linears."""
        return self.low_ranks.operators(sizes.units_N, setting)

    def kept_bytes(self, sizes: TaskSizes, setting: Setting, weights: bool) -> Array | float:
        """What linears read is counted with them."""
        return weights * self.low_ranks.kept_bytes(sizes.units_N, setting)

    def kept_results_bytes(self, sizes: TaskSizes, setting: Setting) -> Array | float:
        """Of matrix products."""
        return self.low_ranks.kept_results_bytes(sizes.units_N, setting)

    def temporaries(self, sizes: TaskSizes, setting: Setting) -> Temporaries:
        """As `LowRanks` have them."""
        return self.low_ranks.temporaries(sizes.units_N, setting)


def _scaling(own: _Adapter, rows_N: Array, setting: Setting) -> Operators:
    """Of DoRA: norms of the weight's rows, and the factor for each output.

    Squares of the weight, its product with A, and small products; then a multiplication, and in
    backward one for the result and another, summed over tokens, for the magnitudes.
    """
    size = setting.element_bytes
    squares = Operator("elementwise", memory_bytes=size * own.outputs * own.inputs, calls=10)
    norms = [squares, matmul(own.outputs, own.inputs, own.rank, setting)]
    norms += [matmul(own.rank, own.inputs, own.rank, setting)]
    norms += [matmul(own.outputs, own.rank, own.rank, setting)]
    result_N = size * rows_N * own.outputs
    factor = Operator("elementwise", memory_bytes=2 * result_N)
    summed = Operator("elementwise", memory_bytes=4 * result_N, calls=3)
    return Operators([*norms, factor], [factor], [summed], [])
