"""Measurement of operators and tiny layers on the local device, for `calibration`.

As in training, inputs rotate through more memory than fits in caches, and results are new tensors.
Cases are timed in several rounds, so that temporary slowdowns of the host affect all cases. Results
are medians over rounds. In a process group, all ranks measure at the same time, because they also
compete for memory bandwidth in training. Collectives and messages are then also measured.
"""

from __future__ import annotations

import platform
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, pairwise, product
from math import ceil, prod
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from torchmm.balance.costs.calibration import Measurements, TimedLayers, TimedOperator
from torchmm.balance.measurement.layers import (
    LayerCase,
    build_compiled_case,
    build_layer_cases,
    time_parallel_layers,
    time_realistic_layers,
)
from torchmm.balance.measurement.network import measure_network
from torchmm.common.processes import set_malloc_retention
from torchmm.costs.execution import CostSetting, Execution
from torchmm.costs.operators import Operator, OperatorKind, norm_operators
from torchmm.models.layers.attention import Segments, attention

ROUNDS = 5
"""Default number of rounds."""
MAX_DURATION_S = 80.0
"""Time after which no further round starts, so that calibration takes less than two minutes."""
MAX_INPUT_SETS = 64
"""Maximum number of input sets of a case."""
MAX_QUEUED_RUNS = 100
"""Maximum number of runs in the queue of a GPU, which has space for 1024 kernels."""
DELAY_WIDTH = 8192
"""Width of float32 matmuls that delay a GPU: 1.1 TFLOP, about 20 ms on an H100."""
SMALL_HEADS = (8, 8, 64)
"""Number of query heads, number of key heads, and head size."""
LARGE_HEADS = (32, 8, 128)
"""The same for large LLMs. Measured only on GPUs, with `PACKED_TOKENS` tokens."""
PACKED_TOKENS = 8192
"""Number of tokens of a packed sequence."""
TINY_ELEMENTS = 64
"""Number of elements of operators that measure the overhead of a call."""
TINY_LAYER = (16, 8)
"""Width and number of tokens of layers whose time is overhead of calls."""


class _Sizes(NamedTuple):
    """Sizes of measured operators."""

    rows: tuple[int, ...]
    """Rows of matmuls."""
    widths: tuple[int, ...]
    """Inputs and outputs of matmuls."""
    lengths: tuple[int, ...]
    """Lengths of attention segments."""
    elements: tuple[int, ...]
    """Numbers of elements of element-wise operators."""


CPU_SIZES = _Sizes(
    rows=(32, 128, 512, 1024),
    widths=(64, 256, 1024, 2048),
    lengths=(16, 64, 256, 1024),
    elements=(1 << 13, 1 << 16, 1 << 19, 1 << 22),
)
GPU_SIZES = _Sizes(
    rows=(128, 512, 2048, 8192),
    widths=(1024, 4096, 14336),
    lengths=(256, 1024, 4096, 8192),
    elements=(1 << 18, 1 << 21, 1 << 24, 1 << 27),
)


@dataclass(frozen=True)
class OperatorCase:
    """Operator to be timed, and the function that runs it."""

    operator: Operator
    run: Callable[[], object]
    tiny: bool = False
    """Whether the work is negligible, so that the time is the overhead of a call."""


def measure(
    device: torch.device,
    dtype: torch.dtype,
    seconds: float,
    *,
    rounds: int = ROUNDS,
    quick: bool = False,
) -> Measurements:
    """Measure operators of all classes (collective in a process group).

    Args:
        device: Device to measure.
        dtype: Dtype of inputs.
        seconds: Approximate time for operators.
        rounds: Number of rounds. Results are medians over rounds.
        quick: Whether to run small sizes once, as a functional test with inaccurate results.
    """
    rounds = 1 if quick else rounds
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if device.type == "cpu":
        set_malloc_retention()  # as training does
    cases = list(_compute_cases(device, dtype, quick))
    times = _time_all(cases, device, seconds, rounds)
    tiny: dict[OperatorKind, float] = {}
    tiny_device: dict[OperatorKind, float] = {}
    operators = []
    for case, took in zip(cases, times, strict=True):
        if case.tiny:
            tiny[case.operator.kind] = took.host_s / float(case.operator.calls)
            tiny_device[case.operator.kind] = took.device_s / float(case.operator.calls)
        else:
            operators.append(TimedOperator(case.operator, took.device_s))
    for times_of_kind in (tiny, tiny_device):
        times_of_kind["norm"] = times_of_kind[
            "elementwise"
        ]  # an RMSNorm consists of element-wise calls
    for sent, seconds_each in measure_network(device, rounds, quick=quick) if ranks > 1 else ():
        if sent.tiny:
            tiny[sent.operator.kind] = seconds_each / float(sent.operator.calls)
        else:
            operators.append(TimedOperator(sent.operator, seconds_each))

    def best_s(case: LayerCase) -> float:
        return min(seconds_per_run(case.run, device, 0.1) for _ in range(rounds))

    layers = [(case.calls, best_s(case)) for case in build_layer_cases(device, *TINY_LAYER)]
    compiled = None
    if device.type == "cuda":
        tiny_case = build_compiled_case(device, *TINY_LAYER)
        compiled = TimedLayers(
            (*tiny_case.forward_operators, *tiny_case.backward_operators), best_s(tiny_case)
        )
    working = []
    if device.type == "cpu" and dtype == torch.float32:
        working = time_realistic_layers(device, rounds, quick=quick)
    split = time_parallel_layers(device, rounds, quick=quick) if ranks > 1 else {}
    queued = tiny_device if device.type == "cuda" else {}
    return Measurements(operators, tiny, layers, working, split, compiled, queued)


def describe_device(device: torch.device) -> str:
    """Return a description of device, host and software version."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return f"{name}, {ranks} rank(s), {socket.gethostname()}, torch {torch.__version__}"


def seconds_per_run(run: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Return the mean time of a run in seconds, after a warm-up run.

    For a CPU with one thread and one rank, this is CPU time, which excludes other programs. With
    several ranks, this is wall-clock time, because threads of process groups use CPU time as in
    training.

    Args:
        run: Function to time.
        device: Device of the function.
        budget_s: Approximate time to spend.
    """
    is_distributed = dist.is_initialized() and dist.get_world_size() > 1
    uses_cpu_time = device.type == "cpu" and torch.get_num_threads() == 1 and not is_distributed
    clock = time.process_time if uses_cpu_time else time.perf_counter
    run()
    once = _timed(run, device, clock, 1)
    runs = max(1, min(1000, int(budget_s / max(once, 1e-6))))
    return _timed(run, device, clock, runs)


def _timed(
    run: Callable[[], object], device: torch.device, clock: Callable[[], float], runs: int
) -> float:
    """Return the mean time of `runs` runs in seconds."""
    _synchronize(device)
    begin = clock()
    for _ in range(runs):
        run()
    _synchronize(device)
    return (clock() - begin) / runs


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class CallTimes(NamedTuple):
    """Device time and host time of a run in seconds, which are equal on CPUs."""

    device_s: float
    host_s: float


def queued_times(
    run: Callable[[], object],
    delay: Callable[[], object],
    budget_s: float,
    *,
    make_event: Callable[[], torch.cuda.Event],
    synchronize: Callable[[], object],
    clock: Callable[[], float] = time.perf_counter,
) -> CallTimes:
    """Return the device time and the host time of a run on a device that executes a queue.

    The device runs `delay` until the host has queued all runs, so that they run without gaps:

        host     | queue delays | queue run 1..n |
        device                  | delay | delay  | run 1 | run 2 | ... | run n |

    Otherwise, the measured time of a small kernel would be its queueing time.

    Args:
        run: Queues the work to time.
        delay: Queues long work.
        budget_s: Approximate time to spend.
        make_event: Creates an event with timing.
        synchronize: Waits for the device.
        clock: Time of the host in seconds.
    """

    def timed(function: Callable[[], object], runs: int, before: int) -> CallTimes:
        synchronize()
        for _ in range(before):
            delay()
        first = make_event()
        last = make_event()
        first.record()
        begin_s = clock()
        for _ in range(runs):
            function()
        host_s = clock() - begin_s
        last.record()
        synchronize()
        return CallTimes(first.elapsed_time(last) / 1e3 / runs, host_s / runs)

    run()
    once = timed(run, 1, 0)
    runs = max(1, min(MAX_QUEUED_RUNS, int(budget_s / max(*once, 1e-6))))
    delay_s = timed(delay, 1, 0).device_s
    delays = ceil(2 * runs * once.host_s / max(delay_s, 1e-6))
    return timed(run, runs, min(MAX_QUEUED_RUNS, delays))


def _call_times(
    run: Callable[[], object], device: torch.device, budget_s: float, delay: Callable[[], object]
) -> CallTimes:
    """Return the times of a run within about `budget_s`, after a run that is not timed."""
    if device.type != "cuda":
        took_s = seconds_per_run(run, device, budget_s)
        return CallTimes(took_s, took_s)
    return queued_times(
        run,
        delay,
        budget_s,
        make_event=partial(torch.cuda.Event, enable_timing=True),
        synchronize=partial(torch.cuda.synchronize, device),
    )


def _time_all(
    cases: Sequence[OperatorCase], device: torch.device, seconds: float, repeats: int
) -> list[CallTimes]:
    """Return the median times of each case over rounds, as means over ranks.

    On a shared host, rounds take longer, and the number of rounds is lower (`MAX_DURATION_S`).

    Args:
        cases: Operators to time.
        device: Device to measure.
        seconds: Approximate time for all rounds.
        repeats: Maximum number of rounds.
    """
    budget_s = seconds / (len(cases) * repeats)
    square = torch.ones(DELAY_WIDTH if device.type == "cuda" else 1, device=device).diag()
    begin_s = time.perf_counter()
    rounds: list[list[CallTimes]] = []
    while len(rounds) < repeats and _mean_over_ranks(
        [(time.perf_counter() - begin_s) * (len(rounds) + 1)], device
    )[0] <= MAX_DURATION_S * max(1, len(rounds)):
        times = []
        for case in cases:
            if dist.is_initialized():
                dist.barrier()
            times.append(_call_times(case.run, device, budget_s, lambda: square @ square))
        rounds.append(times)
    medians = [
        median(seconds_of_rounds)
        for times in zip(*rounds, strict=True)
        for seconds_of_rounds in zip(*times, strict=True)
    ]
    means = iter(_mean_over_ranks(medians, device))
    return [CallTimes(device_s, next(means)) for device_s in means]


def _mean_over_ranks(values: list[float], device: torch.device) -> list[float]:
    if not dist.is_initialized():
        return values
    means = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(means)
    return (means / dist.get_world_size()).tolist()


def _compute_cases(device: torch.device, dtype: torch.dtype, quick: bool) -> Iterator[OperatorCase]:
    pool = _Pool(device, dtype)
    sizes = GPU_SIZES if device.type == "cuda" else CPU_SIZES
    if quick:
        sizes = _Sizes(*(values[:2] for values in sizes))
    widths = [*((n, n) for n in sizes.widths), *pairwise(sizes.widths)]
    for rows, (inputs, outputs) in product(sizes.rows, widths):
        if rows * inputs * outputs <= 2.2e9 or device.type == "cuda":
            yield from _matmul_cases(pool, rows, inputs, outputs)
    yield from _matmul_cases(pool, 4, 4, 4, tiny=True)
    for length, causal in product(sizes.lengths, (True, False)):
        segments = max(1, 1024 // length)
        yield from _attention_cases(length, segments, causal, device, dtype)
        if device.type == "cuda":
            packed = max(1, PACKED_TOKENS // length)
            yield from _attention_cases(length, packed, causal, device, dtype, LARGE_HEADS)
    yield from _attention_cases(1, 1, False, device, dtype, tiny=True)
    for count in (TINY_ELEMENTS, *sizes.elements):
        yield from _elementwise_cases(pool, count, tiny=count == TINY_ELEMENTS)


class _Pool:
    """Random values in more memory than fits in caches, from which cases use rotating inputs."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        nbytes = 2 << 30 if device.type == "cuda" else 96 << 20
        self._values = torch.randn(nbytes // dtype.itemsize, device=device, dtype=dtype)
        self.device, self.dtype = device, dtype

    def turns(self, *shapes: tuple[int, int]) -> Callable[[], list[Tensor]]:
        """Return a function that returns tensors of these shapes, rotating through the pool."""
        sizes = [prod(shape) for shape in shapes]
        count = min(MAX_INPUT_SETS, max(1, len(self._values) // sum(sizes)))
        sets = []
        for turn in range(count):
            rest = self._values[turn * sum(sizes) :]
            parts = rest[: sum(sizes)].split(sizes)
            sets.append([part.view(shape) for part, shape in zip(parts, shapes, strict=True)])
        turns = cycle(sets)
        return lambda: next(turns)


def _matmul_cases(
    pool: _Pool, rows: int, inputs: int, outputs: int, tiny: bool = False
) -> Iterator[OperatorCase]:
    """Yield the forward matmul of a linear layer, and the matmuls of both gradients."""
    next_inputs = pool.turns((rows, inputs), (outputs, inputs), (rows, outputs))

    def forward() -> object:
        x, weight, _ = next_inputs()
        return functional.linear(x, weight)

    def of_inputs() -> object:
        _, weight, gradient = next_inputs()
        return gradient @ weight

    def of_weights() -> object:
        x, _, gradient = next_inputs()
        return gradient.t() @ x

    moved = rows * (inputs + outputs) + inputs * outputs
    operator = Operator("matmul", 2.0 * rows * inputs * outputs, pool.dtype.itemsize * moved)
    for run in (forward,) if tiny else (forward, of_inputs, of_weights):
        yield OperatorCase(operator, run, tiny)


def _attention_cases(
    length: int,
    segments: int,
    causal: bool,
    device: torch.device,
    dtype: torch.dtype,
    widths: tuple[int, int, int] = SMALL_HEADS,
    tiny: bool = False,
) -> Iterator[OperatorCase]:
    """Yield attention within segments of different lengths, and its backward pass.

    Args:
        length: Positions in a segment.
        segments: Number of segments.
        causal: Whether attention has a causal mask.
        device: Device to measure.
        dtype: Dtype of queries, keys and values.
        widths: Number of query heads, number of key heads, and head size.
        tiny: Whether the work is negligible.
    """
    heads, key_heads, features = widths
    # Adjacent lengths differ, so that kernels for equal lengths need one call per segment.
    lengths = [length + i % 2 for i in range(segments)]
    starts = [sum(lengths[:i]) for i in range(segments + 1)]
    rows = Segments.from_starts(starts, device)
    query, key, value = (
        torch.randn((1, n, starts[-1], features), device=device, dtype=dtype, requires_grad=True)
        for n in (heads, key_heads, key_heads)
    )
    module = torch.nn.Module()

    def forward() -> Tensor:
        with torch.no_grad():
            out, _ = attention(
                module, query, key, value, None, cu_seq_lens_q=rows, is_causal=causal
            )
        return out

    out, _ = attention(module, query, key, value, None, cu_seq_lens_q=rows, is_causal=causal)
    gradient = torch.randn_like(out)

    def backward() -> object:
        return torch.autograd.grad(out, (query, key, value), gradient, retain_graph=True)

    setting = CostSetting(Execution(), dtype.itemsize, calls_per_segment=device.type == "cpu")
    block = setting.causal_block
    pairs = sum(n * min(n, (n + block) / 2) if causal else n * n for n in lengths)
    width = heads * features
    calls = float(segments if setting.calls_per_segment else 1)
    moved = dtype.itemsize * starts[-1] * 2 * (heads + key_heads) * features
    yield OperatorCase(Operator("attention", 4 * width * pairs, moved, calls=calls), forward, tiny)
    yield OperatorCase(
        Operator("attention_backward", 10 * width * pairs, 2 * moved, calls=calls), backward, tiny
    )


def _elementwise_cases(pool: _Pool, elements: int, tiny: bool) -> Iterator[OperatorCase]:
    """Yield element-wise operators, activations, copies and norms."""
    width = min(elements, 1024)
    size = pool.dtype.itemsize * elements
    norm = LlamaRMSNorm(width).to(pool.device, pool.dtype)
    next_inputs = pool.turns((elements // width, width), (elements // width, width))
    (normed,) = norm_operators(
        "rms", float(elements), 1, CostSetting(Execution(), pool.dtype.itemsize)
    )[0]
    gelu = torch.ops.aten.gelu.default
    gelu_backward = torch.ops.aten.gelu_backward.default
    runs: list[tuple[Operator, Callable[[Tensor, Tensor], object]]] = [
        (Operator("elementwise", memory_bytes=3.0 * size), lambda x, y: x + y),
        (Operator("activation", memory_bytes=2.0 * size), lambda x, y: functional.silu(x)),
        (
            Operator("gelu_tanh", memory_bytes=2.0 * size),
            lambda x, y: gelu(x, approximate="tanh"),
        ),
        (
            Operator("gelu_tanh_backward", memory_bytes=3.0 * size),
            lambda x, y: gelu_backward(x, y, approximate="tanh"),
        ),
        (Operator("copy", memory_bytes=2.0 * size), lambda x, y: x.clone()),
    ]
    if not tiny:
        runs += [
            (Operator("elementwise", memory_bytes=3.0 * size), lambda x, y: x * y),
            (Operator("activation", memory_bytes=2.0 * size), lambda x, y: x.log_softmax(-1)),
            (normed, lambda x, y: norm(x)),
        ]
    for operator, function in runs:

        def run(function: Callable[[Tensor, Tensor], object] = function) -> object:
            with torch.no_grad():
                x, y = next_inputs()
                return function(x, y)

        yield OperatorCase(operator, run, tiny)
