"""Operators and how long a device takes for them.

    time = calls * overhead + max(FLOPs / (a_f F), bytes / (a_m B), network bytes / (a_n B_n))

(PipeWeaver §4) with the device's peaks F, B, B_n and efficiencies a by class of operator. The
efficiency of a class is a function of how much one call does of what the class is about (FLOPs of
a matrix product, bytes of a copy), because small calls reach much less of the peak. Overheads are
what a call costs however little it does.

A collective over several nodes has a stage inside the nodes (NVLink) and a stage between them. The
stages are pipelined, so the slower one sets the time. The ranks of a node use the network cards of
their own devices together (`stage_shares`).

Where the host only queues work (GPUs), it takes `launch_us` per call, and whoever is slower, host
or device, sets the time of an action; elsewhere calls follow each other.

Quantities are arrays over tasks; shape suffix N.

A block is what a module's chain (`blocks.py`) consists of, with the operators of each pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import log2
from typing import Literal, NamedTuple, TypeVar, get_args

import numpy as np

from torchmm.common.layers import LatentSizes, Rounded
from torchmm.costs.devices import NODE, Device, Link
from torchmm.costs.execution import Setting
from torchmm.costs.sizes import Array, TaskSizes

Amount = TypeVar("Amount", float, Array)
Kind = Literal[
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
"""Classes of operators. attention: fused kernels; activation: element-wise with an exponential;
gelu_tanh: GELU in its tanh form, on CPUs five times as much work per element as others. The last
five are host work besides operators: for a linear of DTensors, for gathering or scattering slices
of the sequence, for gathering or reducing a unit of FSDP2; for any call of a forward, which comes
from Python, while those of backwards come from autograd's C++; for entering the compiled code of a
layer."""
STAND_INS: dict[Kind, Kind] = {"gelu_tanh": "activation", "gelu_tanh_backward": "activation"}
"""What a class is taken for where a profile has no efficiency of it."""
HOST_KINDS: tuple[Kind, ...] = (
    "tensor_linear",
    "sequence_exchange",
    "shard_unit",
    "forward_call",
    "compiled_call",
)
"""Python's time for calls, nothing else: no bytes, no efficiency."""
ASSUMED_LAUNCHES: dict[Kind, float] = {"shard_unit": 40.0, "compiled_call": 60.0}
"""Host time of these classes on asynchronous devices that have no measurement, in launches of an
eager operator. Both are ratios of CPU time: where an operator takes 19 us, a unit of FSDP2 takes
0.8 ms, and entering a compiled layer 1.2 ms."""
KINDS: tuple[Kind, ...] = tuple(kind for kind in get_args(Kind) if kind not in HOST_KINDS)
COMPUTE_KINDS: tuple[Kind, ...] = ("matmul", "attention", "attention_backward")
TANH_GELUS = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu-approximate")
"""Activation functions of class gelu_tanh, by Hugging Face's names."""
CLAMPED = "clamped_silu"
"""GPT-OSS's, of several operators."""
NETWORK_KINDS: tuple[Kind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "p2p")


class Operator(NamedTuple):
    """Equal calls of one class; numbers are sums over the calls, by task."""

    kind: Kind
    flops: Array | float = 0.0
    memory_bytes: Array | float = 0.0
    network_bytes: Array | float = 0.0
    """Sent by each device."""
    calls: Array | float = 1.0
    link: Link = NODE
    dtype: str = ""
    """Of matrix products, where it is not the compute dtype."""
    in_layer: bool = True
    """Whether the code of a layer calls it, which may be compiled; autograd adds gradients."""


@dataclass(frozen=True)
class Curve:
    """Efficiency by size of a call; linear in the logarithm of the size, constant outside.

    Attributes:
        sizes: FLOPs or bytes, rising.
        values: share of the peak; above 1 where caches are faster than memory.

    Raises:
        ValueError: sizes do not rise, or a value is not positive.
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
        """Efficiency of calls of a size."""
        logs = np.log(np.maximum(size, 1.0))
        return np.interp(logs, np.log(self.sizes), self.values)


@dataclass(frozen=True)
class Profile:
    """A device with what operators reach of its peaks.

    Attributes:
        efficiency: by class, of what the class is about: FLOP/s, memory or network bandwidth.
        call_us: by class: overhead of a call on the device; 0 where missing.
        launch_us: mean host time per call in eager layers, on asynchronous devices.
        host_us: by class: host time per call outside of layers, as compiled code calls; `launch_us`
            where missing.
        factors: by module and action type ("F", "B", "I", "W"): measured over predicted time, as
            learned from recorded steps; 1 where missing.
        measured_on: where and how it was measured; empty: assumed.
        network: Fraction of the network bandwidth that communication between nodes reaches, by
            bytes per device and call. If None, the efficiency of the class applies.
    """

    device: Device
    efficiency: Mapping[Kind, Curve]
    call_us: Mapping[Kind, float] = field(default_factory=dict)
    launch_us: float = 0.0
    factors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    measured_on: str = ""
    host_us: Mapping[Kind, float] = field(default_factory=dict)
    network: Curve | None = None

    def factor(self, module: str, action_type: str) -> float:
        """Learned correction of a module's actions."""
        return self.factors.get(module, {}).get(action_type, 1.0)

    def queueing_us(self, kind: Kind, *, compiled: bool = False) -> float:
        """Return the host time of a call on an asynchronous device.

        Args:
            kind: Class of the call.
            compiled: Whether compiled code calls, without modules and autograd around the call.
        """
        if kind in HOST_KINDS:
            return self.call_us.get(kind, ASSUMED_LAUNCHES.get(kind, 0.0) * self.launch_us)
        return self.host_us.get(kind, self.launch_us) if compiled else self.launch_us


def operator_ms(operator: Operator, profile: Profile, dtype: str) -> Array:
    """Time on the device, by task.

    Args:
        dtype: in which it computes; names a peak of the device.
    """
    device = profile.device
    kind = operator.kind
    calls = np.asarray(operator.calls, float)
    if kind in HOST_KINDS:
        return calls * (0.0 if device.asynchronous else profile.call_us.get(kind, 0.0) * 1e-3)
    per_call = 1 / np.maximum(calls, 1e-9)
    main = main_quantity(operator)
    reached = profile.efficiency[kind].at(main * per_call)
    memory = profile.device.memory_bytes_per_s
    if kind in COMPUTE_KINDS:
        beside = profile.efficiency["copy"].at(operator.memory_bytes * per_call)
        seconds = np.maximum(
            main / (reached * _peak_flops(device, operator.dtype, dtype)),
            operator.memory_bytes / (beside * memory),
        )
    elif kind in NETWORK_KINDS:
        inside, between = stage_shares(kind, operator.link)
        seconds = inside * main / (reached * device.node_bytes_per_s)
        if between:
            if profile.network is not None:
                reached = profile.network.at(between * main * per_call)
            sent_s = between * main / (reached * device.network_bytes_per_s)
            seconds = np.maximum(seconds, sent_s) + calls * hops_s(kind, operator.link, device)
    else:
        seconds = main / (reached * memory)
    return calls * profile.call_us.get(kind, 0.0) * 1e-3 + seconds * 1e3


def stage_shares(kind: Kind, link: Link) -> tuple[float, float]:
    """Return the bytes per device inside the nodes and between them, relative to the bytes sent.

    All-gathers and reduce-scatters are rings: what a device sends passes the network once per node,
    divided over the cards of all ranks on the node. All-reduces are hierarchical (NCCL trees):
    reduce-scatter on each node, all-reduce between nodes, all-gather on each node. Messages go from
    each rank to all others evenly, each through the cards of its sender.
    """
    if link.nodes == 1:
        return 1.0, 0.0
    others = link.ranks - 1
    if kind == "p2p":
        return (link.local - 1) / others, (link.ranks - link.local) / others
    if kind == "all_reduce":
        inside = link.nodes * (link.local - 1) / others
        return inside, (link.nodes - 1) / others
    return float(link.local > 1), 1 / link.local


def hops_s(kind: Kind, link: Link, device: Device) -> float:
    """Return the latency that nodes beyond the first add to a call, in seconds.

    Rings pass all ranks, trees have a depth of log2(nodes) in both directions. Latencies per hop
    are those of NCCL for LL128 (github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc): ring
    1.9 us over NVLink and 4 us over the network, tree 8.5 us.
    """
    if not device.asynchronous or kind == "p2p":
        return 0.0
    if kind == "all_reduce":
        return 2 * log2(link.nodes) * 8.5e-6
    return (link.nodes - 1) * ((link.local - 1) * 1.9e-6 + 4e-6)


def _peak_flops(device: Device, own: str, dtype: str) -> float:
    """Of products in a dtype of their own; devices without any are taken to use the other one.

    How much of it they reach nobody has measured: as large a share as others of that size.
    """
    return device.peak_flops.get(own, device.peak_flops[dtype])


def main_quantity(operator: Operator) -> Array:
    """What the class is about: FLOPs, memory bytes or network bytes."""
    if operator.kind in COMPUTE_KINDS:
        return np.asarray(operator.flops, float)
    of_network = operator.kind in NETWORK_KINDS
    return np.asarray(operator.network_bytes if of_network else operator.memory_bytes, float)


class Operators(NamedTuple):
    """Operators of one of equal blocks, by pass."""

    forward: list[Operator]
    inputs: list[Operator]
    """Backward for inputs."""
    weights: list[Operator]
    """Backward for weights."""
    again: list[Operator]
    """What backward runs again because it was not kept."""

    @classmethod
    def none(cls) -> Operators:
        """No operators."""
        return cls([], [], [], [])

    def add(self, other: Operators) -> None:
        """Appends another's operators, pass by pass."""
        for own, more in zip(self, other, strict=True):
            own.extend(more)


class Times(NamedTuple):
    """Time of operators that follow each other, by task."""

    device_ms: Array
    tensor_ms: Array
    """Of it, communication that nothing hides."""
    host_ms: Array
    """Host time to queue the operators, on asynchronous devices."""

    @property
    def total_ms(self) -> Array:
        """The longer of device time and host time."""
        return np.maximum(self.device_ms, self.host_ms)


class Work(NamedTuple):
    """What operators add up to, by task, before it is known what hides what."""

    compute_ms: Array
    matmul_ms: Array
    """Of `compute_ms`: matrix products, during which communication may run."""
    network_ms: Array
    host_ms: Array
    """What the host takes to queue it, on asynchronous devices."""

    @classmethod
    def none(cls, tasks: int) -> Work:
        """No work."""
        return cls(*(np.zeros(tasks) for _ in cls._fields))

    @classmethod
    def of(
        cls,
        operators: Iterable[Operator],
        profile: Profile,
        dtype: str,
        tasks: int,
        *,
        compiled: bool = False,
    ) -> Work:
        """Return the work of operators.

        Args:
            compiled: Whether the operators of layers are called by compiled code.
        """
        work = cls.none(tasks)
        for operator in operators:
            time_N = operator_ms(operator, profile, dtype)
            if profile.device.asynchronous:
                call_us = profile.queueing_us(
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

    def plus(self, other: Work, times: Array | float = 1.0) -> Work:
        """The sum of both, with the other counted several times."""
        return Work(*(a + times * b for a, b in zip(self, other, strict=True)))

    def times(self, profile: Profile, hidden_share: float = 0.0) -> Times:
        """How long it takes.

        Args:
            hidden_share: how much of communication may run during matrix products.
        """
        hidden_ms = np.minimum(hidden_share * self.network_ms, self.matmul_ms)
        exposed_ms = self.network_ms - hidden_ms
        return Times(self.compute_ms + exposed_ms, exposed_ms, self.host_ms)


def matmul(rows: Array | float, inputs: float, outputs: float, setting: Setting) -> Operator:
    """A matrix product with weights."""
    moved = rows * (inputs + outputs) + inputs * outputs
    flops = 2 * rows * inputs * outputs
    return Operator("matmul", flops, memory_bytes=setting.element_bytes * moved)


def rounded_matmul(
    rows: Array | float,
    inputs: float,
    outputs: float,
    rounded: Rounded,
    setting: Setting,
    *,
    has_cast_input: bool = False,
) -> Operators:
    """Return the three matmuls of a float8 linear, with the casts of their operands.

    A cast takes the largest magnitude of each row or of all, scales in float32, limits and casts:
    six operators on all values, others on scales. Compiled code casts a tensor once for all matmuls
    of a pass and of the backward that read it.

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
        calls = 2 * (rounded.calls - (size == 4))
        if setting.execution.compiled:  # read for the magnitudes, and again to be cast
            cast_bytes = 2 * size + 1
            calls = 4
        moved = (1 if rounded.products else size) * cast + size * elements[written]
        passes.append(
            [
                Operator(
                    "matmul",
                    2 * rows * inputs * outputs,
                    memory_bytes=moved,
                    dtype="float8" if rounded.products else "",
                ),
                Operator("elementwise", memory_bytes=cast_bytes * values, calls=calls),
            ]
        )
    forward, of_inputs, of_weights = passes
    return Operators(forward, of_inputs, of_weights, [])


def accumulate(parameters: float, setting: Setting, tensors: int) -> Operator:
    """Adding new gradients to the float32 sums of a step."""
    bytes_each = setting.accumulated * (8 + setting.element_bytes)
    return Operator(
        "elementwise", memory_bytes=bytes_each * parameters, calls=tensors, in_layer=False
    )


def norm_operators(
    kind: str,
    elements: Array | float,
    calls: int,
    setting: Setting,
    weight_float32: bool = False,
) -> Operators:
    """Return the operators of norms of `elements` values in all.

    In eager layers, all norms but "layer" compute in float32, call by call. In compiled layers a
    norm reads its input and writes its result once; backward reads gradient and input, and writes a
    gradient; gradients of weights are sums over both.

    Args:
        weight_float32: whether the weights are multiplied in float32 too.
    """
    size = setting.element_bytes
    casts = setting.element_bytes < 4
    if setting.execution.compiled:
        fused = [
            Operator("elementwise", memory_bytes=passed * size * elements, calls=calls)
            for passed in (2, 3, 2)
        ]
        return Operators([fused[0]], [fused[1]], [fused[2]], [])
    if kind == "layer":
        forward = 2 * size
        inputs = 3 * size
        weights = 2 * size
        counts = (1, 1, 0)
    else:
        weighed = 4 if weight_float32 else size
        centred = kind == "centred"  # the mean, and two differences from it
        cast = 2 * (4 + size) if casts else 0
        forward = (40 if centred else 20) + 2 * weighed + cast
        inputs = (108 if centred else 68) + 2 * weighed + cast
        weights = 4 * weighed
        more = casts and weight_float32  # the weights are cast too
        counts = (
            (9 if centred else 6) + 2 * casts + more * centred,
            (19 if centred else 12) + 2 * casts,
            2 + more,
        )
    each = zip((forward, inputs, weights), counts, strict=True)
    first, second, third = (
        Operator("norm", memory_bytes=bytes_each * elements, calls=calls * count)
        for bytes_each, count in each
    )
    return Operators([first], [second], [third], [])


def activation_operators(name: str, gated: bool, elements: Array, setting: Setting) -> Operators:
    """Return the operators of the function inside a feed-forward network, and of its gate.

    Compiled, each pass is one kernel that reads and writes every tensor once.
    """
    size = setting.element_bytes

    def operator(kind: Kind, passes: int, calls: int) -> Operator:
        return Operator(kind, memory_bytes=passes * size * elements, calls=calls)

    kinds: tuple[Kind, Kind] = ("activation", "activation")
    if name in TANH_GELUS:
        kinds = ("gelu_tanh", "gelu_tanh_backward")
    if setting.execution.compiled:
        passes = (3, 5) if gated else (2, 3)
        forward, inputs = ([operator(kinds[i], passes[i], 1)] for i in (0, 1))
        return Operators(forward, inputs, [], [])
    forward = [operator(kinds[0], 2, 1)]
    inputs = [operator(kinds[1], 3, 1)]
    if name == "quick_gelu":  # x * sigmoid(1.702 x)
        forward.append(operator("elementwise", 5, 2))
        inputs.append(operator("elementwise", 11, 4))
    if name == CLAMPED:  # of both: limits, a factor, a sigmoid, one more
        forward.append(operator("elementwise", 11, 5))
        inputs.append(operator("elementwise", 17, 7))
    if gated:
        forward.append(operator("elementwise", 3, 1))
        inputs.append(operator("elementwise", 6, 2))
    return Operators(forward, inputs, [], [])


def all_reduce_bytes(whole: Amount, ranks: int) -> Amount:
    """What each rank sends to add up `whole` bytes in a ring."""
    return 2 * whole * (ranks - 1) / ranks


@dataclass(frozen=True)
class Block(ABC):
    """Consecutive equal blocks of a module; costs are those of one of them, on one rank.

    Attributes:
        trained: whether its weights are, or adapters of them.
        count: how many equal ones follow each other.
        leaf: its input never needs a gradient: pixels.
    """

    trained: bool
    count: int = 1
    leaf: bool = False

    @property
    def backward_in_forward(self) -> bool:
        """Whether its gradients are computed in F already."""
        return False

    @abstractmethod
    def flops(self, sizes: TaskSizes) -> tuple[Array, Array]:
        """Forward FLOPs: (products with weights, products between activations)."""

    def weight_flops(self, sizes: TaskSizes) -> Array:
        """Of them, products with weights that are trained."""
        return self.trained * self.flops(sizes)[0]

    @abstractmethod
    def operators(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """What is run."""

    @abstractmethod
    def kept_bytes(self, sizes: TaskSizes, setting: Setting, weights: bool) -> Array:
        """What is kept from forward to backward, by task, if there is one.

        Args:
            weights: whether weight gradients are needed.
        """

    @abstractmethod
    def gradients_bytes(self, sizes: TaskSizes, setting: Setting) -> Array:
        """Gradients of results that wait for W after I, besides what was kept, by task."""

    @abstractmethod
    def temporary_bytes(self, sizes: TaskSizes, setting: Setting, has_backward: Array) -> Array:
        """The most that is needed at one time beyond what is kept, by task."""


@dataclass(frozen=True)
class Encoding(Block):
    """The first half of a frozen autoencoder, which turns pixels into what a generator draws.

    Nothing of it is kept, and nothing goes back through it. What is computed are whole images,
    without the padding that the generator's layers have.

    Attributes:
        of: sizes.
    """

    of: LatentSizes = field(kw_only=True)

    def flops(self, sizes: TaskSizes) -> tuple[Array, Array]:
        """Of convolutions, and of attention in each frame."""
        each = sum(work.flops for work in self.of.work)
        return each * sizes.drawn_N, self.of.pair_flops * sizes.frame_pairs_N

    def operators(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """What is called for frames of one size; weights are read each time."""
        size = setting.element_bytes
        calls_N = np.ceil(sizes.frames_N / self.of.encode_batch_size)
        made = []
        for work in self.of.work:
            moved_N = work.elements * sizes.drawn_N
            if work.kind == "matmul":
                moved_N = moved_N + self.of.encoder_parameters * calls_N
            flops_N = work.flops * sizes.drawn_N
            made.append(Operator(work.kind, flops_N, size * moved_N, calls=work.calls * calls_N))
        pairs_N = self.of.pair_flops * sizes.frame_pairs_N
        read_N = size * self.of.attended * sizes.drawn_N
        if self.of.attentions:
            calls_N = self.of.attentions * calls_N
            made.append(Operator("attention", pairs_N, memory_bytes=read_N, calls=calls_N))
        return Operators(made, [], [], [])

    def kept_bytes(self, sizes: TaskSizes, setting: Setting, weights: bool) -> Array:
        """Nothing."""
        return 0.0 * sizes.drawn_N

    def gradients_bytes(self, sizes: TaskSizes, setting: Setting) -> Array:
        """None."""
        return 0.0 * sizes.drawn_N

    def temporary_bytes(self, sizes: TaskSizes, setting: Setting, has_backward: Array) -> Array:
        """Pixels as numbers, of all images and once more in the dtype of the weights; what is there
        at a time of as many frames of the largest size as are encoded together."""
        at_once_N = np.minimum(sizes.frames_N, self.of.encode_batch_size) * sizes.largest_frame_N
        pixels_N = (4 + 2 * setting.element_bytes) * self.of.pixels * sizes.drawn_N
        return pixels_N + setting.element_bytes * self.of.live * at_once_N
