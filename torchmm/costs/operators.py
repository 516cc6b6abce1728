"""Operators, and their time on a device (PipeWeaver, section 4).

    time = calls * overhead + max(FLOPs / (a_f F), bytes / (a_m B), network bytes / (a_n B_n))

F, B and B_n are the peak rates of the device. The efficiencies a depend on the class of the
operator and on the size of one call, because small calls achieve a smaller fraction of the peak:

    class                size of a call    efficiency
    matmul, attention    FLOPs             1 |          ______
    norm, copy, ...      memory bytes        |       __/
    collectives, p2p     network bytes       |  ____/
                                             +----------------> log(size)

The overhead is the time of a call without work.

A collective over several nodes has a stage inside the nodes (NVLink) and a stage between them. The
stages are pipelined, so the slower one sets the time. The ranks of a node use the network cards of
their devices jointly (`link_byte_fractions`).

On GPUs, the host only queues kernels, which requires `launch_us` per call. The time of an action
is the maximum of host time and device time. On CPUs, calls run sequentially.

Quantities are arrays over tasks, with the shape suffix N. Modules are sequences of blocks
(`torchmm.costs.blocks`), and a `ModuleBlock` lists the operators of each pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import log2
from typing import Literal, NamedTuple, TypeVar, get_args

import numpy as np

from torchmm.common.layers import AutoencoderSizes, Float8Linears, QuantizedLinear
from torchmm.costs.devices import WITHIN_NODE, Device, LinkRanks
from torchmm.costs.execution import CostSetting
from torchmm.costs.sizes import Array, TaskSizes

Amount = TypeVar("Amount", float, Array)
OperatorKind = Literal[
    "matmul",
    "attention",
    "attention_backward",
    "norm",
    "elementwise",
    "activation",
    "gelu_tanh",
    "gelu_tanh_backward",
    "copy",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "p2p",
    "tensor_linear",
    "sequence_exchange",
    "shard_unit",
    "forward_call",
    "compiled_call",
]
"""Classes of operators.

- attention, attention_backward: Fused attention kernels.
- activation: Element-wise operators with an exponential.
- gelu_tanh: GELU with the tanh approximation, five times the work per element on CPUs.
- tensor_linear: Host work for a linear layer with DTensors.
- sequence_exchange: Host work for gathering or scattering slices of a sequence.
- shard_unit: Host work for gathering or reducing an FSDP2 unit.
- forward_call: Host work for a call in a forward pass, which Python makes. In backward passes, the
  C++ code of autograd makes the calls.
- compiled_call: Host work for entering the compiled code of a layer."""
FALLBACK_KINDS: dict[OperatorKind, OperatorKind] = {
    "gelu_tanh": "activation",
    "gelu_tanh_backward": "activation",
}
"""Class whose efficiency is used if a profile has no measurement of a class."""
HOST_KINDS: tuple[OperatorKind, ...] = (
    "tensor_linear",
    "sequence_exchange",
    "shard_unit",
    "forward_call",
    "compiled_call",
)
"""Classes of host work, which have neither bytes nor an efficiency."""
ASSUMED_LAUNCHES: dict[OperatorKind, float] = {"shard_unit": 40.0, "compiled_call": 60.0}
"""Host time of classes without a measurement, in eager operator launches.

Measured CPU times: 19 us for an operator launch, 0.8 ms for an FSDP2 unit, and 1.2 ms for entering
a compiled layer."""
KINDS: tuple[OperatorKind, ...] = tuple(
    kind for kind in get_args(OperatorKind) if kind not in HOST_KINDS
)
"""Classes of operators that run on the device."""
COMPUTE_KINDS: tuple[OperatorKind, ...] = ("matmul", "attention", "attention_backward")
"""Classes whose time depends on FLOPs."""
TANH_GELUS = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu-approximate")
"""Hugging Face names of activation functions of class gelu_tanh."""
CLAMPED_SILU = "clamped_silu"
"""Activation function of GPT-OSS, which consists of several operators."""
NETWORK_KINDS: tuple[OperatorKind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "p2p")
"""Classes of communication."""


class Operator(NamedTuple):
    """Equal calls of one class. Values are sums over the calls, by task."""

    kind: OperatorKind
    flops: Array | float = 0.0
    memory_bytes: Array | float = 0.0
    network_bytes: Array | float = 0.0
    """Bytes that each device sends."""
    calls: Array | float = 1.0
    link: LinkRanks = WITHIN_NODE
    dtype: str = ""
    """Dtype of matmuls. If empty, the compute dtype."""
    in_layer: bool = True
    """Whether the code of a layer, which can be compiled, calls the operator. False for the
    gradient accumulation of autograd."""


@dataclass(frozen=True)
class EfficiencyCurve:
    """Efficiency as a function of the size of a call.

    Values are interpolated linearly in the logarithm of the size, and constant outside of the
    range of sizes.

    Attributes:
        sizes: FLOPs or bytes of a call, in ascending order.
        values: Fraction of the peak. Caches that are faster than memory cause values above 1.

    Raises:
        ValueError: Sizes are not ascending, or a value is not positive.
    """

    sizes: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.sizes, self.sizes[1:], strict=False))
        positive = all(0 < v < np.inf for v in (*self.sizes, *self.values))
        if not (self.sizes and len(self.sizes) == len(self.values) and rising and positive):
            raise ValueError(
                f"efficiencies {list(self.values)} at sizes {list(self.sizes)}: use the same "
                "number of values and sizes, positive values, and increasing sizes"
            )

    def at(self, size: Array | float) -> Array:
        """Return the efficiency of calls of a size."""
        logs = np.log(np.maximum(size, 1.0))
        return np.interp(logs, np.log(self.sizes), self.values)


@dataclass(frozen=True)
class DeviceProfile:
    """A device and the efficiencies of operators on it.

    Attributes:
        device: Peak rates and sizes of the device.
        efficiency: Efficiency by class: fraction of peak FLOP/s, memory or network bandwidth.
        call_us: Overhead of a call on the device in us, by class. 0 for missing classes.
        launch_us: Mean host time per call in eager layers in us, on asynchronous devices.
        factors: Measured over predicted time by module and action type ("F", "B", "I", "W"),
            calibrated with recorded steps. 1 for missing entries.
        measured_on: Host and method of the measurement. Empty for assumed values.
        host_us: Host time per call from compiled code in us, by class. `launch_us` for missing
            classes.
        network: Fraction of the network bandwidth that communication between nodes reaches, by
            bytes per device and call. If None, the efficiency of the class applies.
    """

    device: Device
    efficiency: Mapping[OperatorKind, EfficiencyCurve]
    call_us: Mapping[OperatorKind, float] = field(default_factory=dict)
    launch_us: float = 0.0
    factors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    measured_on: str = ""
    host_us: Mapping[OperatorKind, float] = field(default_factory=dict)
    network: EfficiencyCurve | None = None

    def factor(self, module: str, action_type: str) -> float:
        """Return the measured over predicted time of the actions of a module."""
        return self.factors.get(module, {}).get(action_type, 1.0)

    def launch_time_us(self, kind: OperatorKind, *, compiled: bool = False) -> float:
        """Return the host time of a call on an asynchronous device.

        Args:
            kind: Class of the call.
            compiled: Whether compiled code makes the call, without modules and autograd.
        """
        if kind in HOST_KINDS:
            return self.call_us.get(kind, ASSUMED_LAUNCHES.get(kind, 0.0) * self.launch_us)
        return self.host_us.get(kind, self.launch_us) if compiled else self.launch_us


def operator_time_ms(operator: Operator, profile: DeviceProfile, dtype: str) -> Array:
    """Return the time of an operator on the device in ms, by task.

    Args:
        operator: Calls of one class.
        profile: Device and efficiencies.
        dtype: Compute dtype, a key of `Device.peak_flops`.
    """
    device = profile.device
    kind = operator.kind
    calls = np.asarray(operator.calls, float)
    if kind in HOST_KINDS:
        return calls * (0.0 if device.asynchronous else profile.call_us.get(kind, 0.0) * 1e-3)
    per_call = 1 / np.maximum(calls, 1e-9)
    quantity = efficiency_quantity(operator)
    efficiency = profile.efficiency[kind].at(quantity * per_call)
    memory = profile.device.memory_bytes_per_s
    if kind in COMPUTE_KINDS:
        copy_efficiency = profile.efficiency["copy"].at(operator.memory_bytes * per_call)
        seconds = np.maximum(
            quantity / (efficiency * _peak_flops(device, operator.dtype, dtype)),
            operator.memory_bytes / (copy_efficiency * memory),
        )
    elif kind in NETWORK_KINDS:
        within_fraction, between_fraction = link_byte_fractions(kind, operator.link)
        seconds = within_fraction * quantity / (efficiency * device.node_bytes_per_s)
        if between_fraction:
            if profile.network is not None:
                efficiency = profile.network.at(between_fraction * quantity * per_call)
            between_s = between_fraction * quantity / (efficiency * device.network_bytes_per_s)
            seconds = np.maximum(seconds, between_s) + calls * hop_latency_s(
                kind, operator.link, device
            )
    else:
        seconds = quantity / (efficiency * memory)
    return calls * profile.call_us.get(kind, 0.0) * 1e-3 + seconds * 1e3


def link_byte_fractions(kind: OperatorKind, link: LinkRanks) -> tuple[float, float]:
    """Return the bytes per device inside the nodes and between them, relative to the bytes sent.

    All-gathers and reduce-scatters are rings. The bytes that a device sends pass the network once
    per node, divided over the network cards of all ranks on the node.

    All-reduces are hierarchical (NCCL trees):
    reduce-scatter on each node, all-reduce between nodes, all-gather on each node. Messages are
    sent evenly from each rank to all other ranks, through the network card of the sender.

    With n nodes of l ranks each, and r = n * l ranks:

        kind                         inside the nodes      between the nodes
        all_gather, reduce_scatter   1 (0 if l = 1)        1 / l
        all_reduce                   n (l - 1) / (r - 1)   (n - 1) / (r - 1)
        p2p                          (l - 1) / (r - 1)     (r - l) / (r - 1)
    """
    if link.nodes == 1:
        return 1.0, 0.0
    other_ranks = link.ranks - 1
    if kind == "p2p":
        return (link.ranks_per_node - 1) / other_ranks, (
            link.ranks - link.ranks_per_node
        ) / other_ranks
    if kind == "all_reduce":
        inside = link.nodes * (link.ranks_per_node - 1) / other_ranks
        return inside, (link.nodes - 1) / other_ranks
    return float(link.ranks_per_node > 1), 1 / link.ranks_per_node


def hop_latency_s(kind: OperatorKind, link: LinkRanks, device: Device) -> float:
    """Return the latency that nodes beyond the first add to a call, in seconds.

    Rings pass all ranks, trees have a depth of log2(nodes) in both directions. Latencies per hop
    are those of NCCL for LL128 (github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc): ring
    1.9 us over NVLink and 4 us over the network, tree 8.5 us.
    """
    if not device.asynchronous or kind == "p2p":
        return 0.0
    if kind == "all_reduce":
        return 2 * log2(link.nodes) * 8.5e-6
    return (link.nodes - 1) * ((link.ranks_per_node - 1) * 1.9e-6 + 4e-6)


def _peak_flops(device: Device, matmul_dtype: str, dtype: str) -> float:
    """Return the peak FLOP/s in `matmul_dtype`, or in the compute dtype if there is none.

    The efficiency of float8 matmuls is assumed to be that of other matmuls with the same FLOPs.
    """
    return device.peak_flops.get(matmul_dtype, device.peak_flops[dtype])


def efficiency_quantity(operator: Operator) -> Array:
    """Return the quantity that efficiency refers to: FLOPs, memory bytes or network bytes."""
    if operator.kind in COMPUTE_KINDS:
        return np.asarray(operator.flops, float)
    is_network = operator.kind in NETWORK_KINDS
    return np.asarray(operator.network_bytes if is_network else operator.memory_bytes, float)


class PassOperators(NamedTuple):
    """Operators of one block, by pass."""

    forward: list[Operator]
    inputs: list[Operator]
    """Backward pass for inputs."""
    weights: list[Operator]
    """Backward pass for weights."""
    recomputed: list[Operator]
    """Operators that the backward pass recomputes."""

    @classmethod
    def empty(cls) -> PassOperators:
        """Return empty lists."""
        return cls([], [], [], [])

    def add(self, other: PassOperators) -> None:
        """Append the operators of `other` to each pass."""
        for operators, added in zip(self, other, strict=True):
            operators.extend(added)


class OperatorTimes(NamedTuple):
    """Time of sequential operators, by task."""

    device_ms: Array
    tp_comm_ms: Array
    """Part of `device_ms` that is communication without overlap."""
    host_ms: Array
    """Host time to queue the operators, on asynchronous devices."""

    @property
    def total_ms(self) -> Array:
        """Maximum of device time and host time."""
        return np.maximum(self.device_ms, self.host_ms)


class OperatorTotals(NamedTuple):
    """Sums of operator times by task, before overlap is applied."""

    compute_ms: Array
    matmul_ms: Array
    """Part of `compute_ms` that is matmuls, with which communication can overlap."""
    network_ms: Array
    host_ms: Array
    """Host time to queue the operators, on asynchronous devices."""

    @classmethod
    def zero(cls, tasks: int) -> OperatorTotals:
        """Return zero work."""
        return cls(*(np.zeros(tasks) for _ in cls._fields))

    @classmethod
    def from_operators(
        cls,
        operators: Iterable[Operator],
        profile: DeviceProfile,
        dtype: str,
        tasks: int,
        *,
        compiled: bool = False,
    ) -> OperatorTotals:
        """Return the work of operators.

        Args:
            operators: Operators to sum.
            profile: Device and efficiencies.
            dtype: Compute dtype.
            tasks: Number of tasks N.
            compiled: Whether compiled code calls the operators of layers.
        """
        work = cls.zero(tasks)
        for operator in operators:
            time_N = operator_time_ms(operator, profile, dtype)
            if profile.device.asynchronous:
                call_us = profile.launch_time_us(
                    operator.kind, compiled=compiled and operator.in_layer
                )
                work.host_ms[:] += np.asarray(operator.calls) * call_us * 1e-3
            if operator.kind in NETWORK_KINDS:
                work.network_ms[:] += time_N
                continue
            work.compute_ms[:] += time_N
            if operator.kind == "matmul":
                work.matmul_ms[:] += time_N
        return work

    def add(self, other: OperatorTotals, times: Array | float = 1.0) -> OperatorTotals:
        """Return self + times * other."""
        return OperatorTotals(*(a + times * b for a, b in zip(self, other, strict=True)))

    def to_times(self, profile: DeviceProfile, hidden_fraction: float = 0.0) -> OperatorTimes:
        """Return the times of sequential operators with overlapped communication.

        Args:
            profile: Device and efficiencies.
            hidden_fraction: Fraction of the communication that can overlap with matmuls.
        """
        hidden_ms = np.minimum(hidden_fraction * self.network_ms, self.matmul_ms)
        exposed_ms = self.network_ms - hidden_ms
        return OperatorTimes(self.compute_ms + exposed_ms, exposed_ms, self.host_ms)


def matmul_operator(
    rows: Array | float, inputs: float, outputs: float, setting: CostSetting
) -> Operator:
    """Return a matmul with weights: (rows, inputs) @ (inputs, outputs)."""
    moved = rows * (inputs + outputs) + inputs * outputs
    flops = 2 * rows * inputs * outputs
    return Operator("matmul", flops, memory_bytes=setting.element_bytes * moved)


def float8_matmul(
    rows: Array | float,
    inputs: float,
    outputs: float,
    rounded: Float8Linears,
    setting: CostSetting,
    *,
    has_cast_input: bool = False,
) -> PassOperators:
    """Return the three matmuls of a float8 linear, with the casts of their operands.

    A cast computes the maximum magnitude per row or tensor, scales in float32, clamps and casts.
    These are six operators on all values, and more on scales. Compiled code casts a tensor once
    for all matmuls of the forward and backward pass that read it.

    Args:
        rows: Rows of the input.
        inputs: Features of the input.
        outputs: Features of the output.
        rounded: Properties of the float8 linears.
        setting: Execution of the layer.
        has_cast_input: Whether another linear has cast the input for both.
    """
    size = setting.element_bytes
    elements = {"x": rows * inputs, "w": inputs * outputs, "y": rows * outputs}
    passes = []
    for read, written in (("xw", "y"), ("yw", "x"), ("yx", "w")):
        cast = sum(elements[name] for name in read)
        once = [name for name in read if name != "x" or not has_cast_input]
        if setting.execution.compiled and written == "w":
            once = [name for name in once if name != "y"]
        values = sum(elements[name] for name in once) if setting.execution.compiled else cast
        cast_bytes = (4 * size + 25) if size < 4 else (3 * size + 21)
        calls = 2 * (rounded.cast_calls - (size == 4))
        if setting.execution.compiled:  # read for magnitudes, and again for the cast
            cast_bytes = 2 * size + 1
            calls = 4
        moved = (1 if rounded.has_float8_matmuls else size) * cast + size * elements[written]
        passes.append(
            [
                Operator(
                    "matmul",
                    2 * rows * inputs * outputs,
                    memory_bytes=moved,
                    dtype="float8" if rounded.has_float8_matmuls else "",
                ),
                Operator("elementwise", memory_bytes=cast_bytes * values, calls=calls),
            ]
        )
    forward, of_inputs, of_weights = passes
    return PassOperators(forward, of_inputs, of_weights, [])


def decode_operator(linear: QuantizedLinear, setting: CostSetting) -> Operator:
    """Return the operator that decodes the weight of a quantized linear.

    Compiled code reads the codes and writes the weight. Otherwise, table indices, table values and
    scaled values in float32 are written and read.
    """
    weights = linear.local_weights(setting.execution.tensor)
    passed, calls = (0, 1) if setting.execution.compiled else (2 * (2 + 4 + 4), 7)
    value_bytes = linear.value_bytes + passed + setting.element_bytes
    return Operator("elementwise", memory_bytes=value_bytes * weights, calls=calls)


def accumulation_operator(parameters: float, setting: CostSetting, tensors: int) -> Operator:
    """Return the operator that accumulates the gradients of a microbatch in float32."""
    bytes_each = setting.accumulated_fraction * (8 + setting.element_bytes)
    return Operator(
        "elementwise", memory_bytes=bytes_each * parameters, calls=tensors, in_layer=False
    )


def norm_operators(
    kind: str,
    elements: Array | float,
    calls: int,
    setting: CostSetting,
    weight_float32: bool = False,
) -> PassOperators:
    """Return the operators of norms.

    In eager layers, all norms except "layer" compute in float32 with separate calls. A compiled
    norm reads its input and writes its result once. Its backward pass reads gradient and input,
    and writes a gradient. Weight gradients are sums over gradient and input.

    Args:
        kind: Norm type: "layer", "rms" or "centered".
        elements: Number of values of all norms.
        calls: Number of norms.
        setting: Execution of the layer.
        weight_float32: Whether weights are multiplied in float32.
    """
    size = setting.element_bytes
    casts = setting.element_bytes < 4
    if setting.execution.compiled:
        fused = [
            Operator("elementwise", memory_bytes=passed * size * elements, calls=calls)
            for passed in (2, 3, 2)
        ]
        return PassOperators([fused[0]], [fused[1]], [fused[2]], [])
    if kind == "layer":
        forward = 2 * size
        inputs = 3 * size
        weights = 2 * size
        counts = (1, 1, 0)
    else:
        weighed = 4 if weight_float32 else size
        centered = kind == "centered"  # computes the mean, and two differences from it
        cast = 2 * (4 + size) if casts else 0
        # Bytes per value in float32: square (8), mean (4) and multiplication by the inverse root
        # (8) are 20. The multiplication by the weight reads and writes `weighed` bytes.
        forward = (40 if centered else 20) + 2 * weighed + cast
        inputs = (108 if centered else 68) + 2 * weighed + cast
        weights = 4 * weighed
        more = casts and weight_float32  # weights are also cast
        counts = (
            (9 if centered else 6) + 2 * casts + more * centered,
            (19 if centered else 12) + 2 * casts,
            2 + more,
        )
    each = zip((forward, inputs, weights), counts, strict=True)
    first, second, third = (
        Operator("norm", memory_bytes=bytes_each * elements, calls=calls * count)
        for bytes_each, count in each
    )
    return PassOperators([first], [second], [third], [])


def activation_operators(
    name: str, gated: bool, elements: Array, setting: CostSetting
) -> PassOperators:
    """Return the operators of the activation function of an MLP, and of its gate.

    If compiled, each pass is one kernel that reads and writes every tensor once.

    Args:
        name: Hugging Face name of the activation function.
        gated: Whether the MLP is gated.
        elements: Number of values, by task.
        setting: Execution of the layer.
    """
    size = setting.element_bytes

    def operator(kind: OperatorKind, passes: int, calls: int) -> Operator:
        return Operator(kind, memory_bytes=passes * size * elements, calls=calls)

    kinds: tuple[OperatorKind, OperatorKind] = ("activation", "activation")
    if name in TANH_GELUS:
        kinds = ("gelu_tanh", "gelu_tanh_backward")
    if setting.execution.compiled:
        passes = (3, 5) if gated else (2, 3)
        forward, inputs = ([operator(kinds[i], passes[i], 1)] for i in (0, 1))
        return PassOperators(forward, inputs, [], [])
    forward = [operator(kinds[0], 2, 1)]
    inputs = [operator(kinds[1], 3, 1)]
    if name == "quick_gelu":  # x * sigmoid(1.702 x)
        forward.append(operator("elementwise", 5, 2))
        inputs.append(operator("elementwise", 11, 4))
    if name == CLAMPED_SILU:  # clamps of both inputs, a factor, a sigmoid, an addition
        forward.append(operator("elementwise", 11, 5))
        inputs.append(operator("elementwise", 17, 7))
    if gated:
        forward.append(operator("elementwise", 3, 1))
        inputs.append(operator("elementwise", 6, 2))
    return PassOperators(forward, inputs, [], [])


def all_reduce_bytes(whole: Amount, ranks: int) -> Amount:
    """Return the bytes that each rank sends in a ring all-reduce of `whole` bytes."""
    return 2 * whole * (ranks - 1) / ranks


@dataclass(frozen=True)
class ModuleBlock(ABC):
    """Consecutive equal blocks of a module. Costs are those of one block on one rank.

    Attributes:
        trained: Whether weights of the block, or their adapters, are trained.
        count: Number of consecutive equal blocks.
        needs_no_input_gradient: Whether the input never needs a gradient, such as pixels.
    """

    trained: bool
    count: int = 1
    needs_no_input_gradient: bool = False

    @property
    def backward_in_forward(self) -> bool:
        """Return True if F already computes the gradients."""
        return False

    @abstractmethod
    def flops(self, sizes: TaskSizes) -> tuple[Array, Array]:
        """Return the forward FLOPs of matmuls with weights, and of matmuls between activations."""

    def weight_flops(self, sizes: TaskSizes) -> Array:
        """Return the forward FLOPs of matmuls with trained weights."""
        return self.trained * self.flops(sizes)[0]

    @abstractmethod
    def operators(self, sizes: TaskSizes, setting: CostSetting) -> PassOperators:
        """Return the operators of each pass."""

    @abstractmethod
    def saved_bytes(self, sizes: TaskSizes, setting: CostSetting, weights: bool) -> Array:
        """Return the bytes that are saved from the forward to the backward pass, by task.

        Args:
            sizes: Sizes of the tasks.
            setting: Execution of the module.
            weights: Whether weight gradients are needed.
        """

    @abstractmethod
    def gradients_bytes(self, sizes: TaskSizes, setting: CostSetting) -> Array:
        """Return the bytes of gradients that are saved from I to W, by task."""

    @abstractmethod
    def temporary_bytes(self, sizes: TaskSizes, setting: CostSetting, has_backward: Array) -> Array:
        """Return the maximum bytes of temporaries, by task."""


@dataclass(frozen=True)
class AutoencoderBlock(ModuleBlock):
    """Encoder of a frozen VAE, which converts pixels to the latents that a generator predicts.

    It saves no activations and has no backward pass. It processes complete images without the
    padding of the generator layers.

    Attributes:
        autoencoder: Sizes of the VAE encoder.
    """

    autoencoder: AutoencoderSizes = field(kw_only=True)

    def flops(self, sizes: TaskSizes) -> tuple[Array, Array]:
        """Return the FLOPs of convolutions, and of attention in each frame."""
        each = sum(work.flops for work in self.autoencoder.work)
        return each * sizes.target_patches_N, self.autoencoder.pair_flops * sizes.frame_pairs_N

    def operators(self, sizes: TaskSizes, setting: CostSetting) -> PassOperators:
        """Return the operators for batches of frames of one size. Each batch reads all weights."""
        size = setting.element_bytes
        calls_N = np.ceil(sizes.frames_N / self.autoencoder.encode_batch_size)
        operators = []
        for work in self.autoencoder.work:
            moved_N = work.elements * sizes.target_patches_N
            if work.kind == "matmul":
                moved_N = moved_N + self.autoencoder.encoder_parameters * calls_N
            flops_N = work.flops * sizes.target_patches_N
            operators.append(
                Operator(work.kind, flops_N, size * moved_N, calls=work.calls * calls_N)
            )
        pairs_N = self.autoencoder.pair_flops * sizes.frame_pairs_N
        read_N = size * self.autoencoder.attention_elements * sizes.target_patches_N
        if self.autoencoder.attentions:
            calls_N = self.autoencoder.attentions * calls_N
            operators.append(Operator("attention", pairs_N, memory_bytes=read_N, calls=calls_N))
        return PassOperators(operators, [], [], [])

    def saved_bytes(self, sizes: TaskSizes, setting: CostSetting, weights: bool) -> Array:
        """Return zeros."""
        return 0.0 * sizes.target_patches_N

    def gradients_bytes(self, sizes: TaskSizes, setting: CostSetting) -> Array:
        """Return zeros, because the VAE encoder has no backward pass."""
        return 0.0 * sizes.target_patches_N

    def temporary_bytes(self, sizes: TaskSizes, setting: CostSetting, has_backward: Array) -> Array:
        """Return the bytes of all pixels, and of the activations of one batch of frames.

        Pixels are stored in float32 and twice in the compute dtype. The batch has frames of the
        maximum size.
        """
        at_once_N = (
            np.minimum(sizes.frames_N, self.autoencoder.encode_batch_size) * sizes.largest_frame_N
        )
        pixels_N = (
            (4 + 2 * setting.element_bytes)
            * self.autoencoder.pixels_per_patch
            * sizes.target_patches_N
        )
        return pixels_N + setting.element_bytes * self.autoencoder.peak_elements * at_once_N
