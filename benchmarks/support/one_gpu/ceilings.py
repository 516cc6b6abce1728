"""Parts "ceilings" and "attention": how fast single operators run on this card and its host."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as flex
from torch.utils._python_dispatch import TorchDispatchMode

from support.one_gpu.rows import Recorder, Row
from support.one_gpu.steps import Mark, synchronize
from torchmm.common.files import replace_atomically
from torchmm.common.processes import find_missing_compiler
from torchmm.models.layers.attention import KERNELS_FILE, Segments, attention

HOST_CALLS = 200
SHAPES = {
    "8192 x 8192 x 8192": (8192, 8192, 8192),
    "Qwen3-1.7B MLP": (8192, 2048, 6144),
    "Qwen3-8B MLP": (8192, 4096, 12288),
    "SigLIP MLP": (10240, 1152, 4304),
}
"""Rows, input features and output features."""


class Heads(NamedTuple):
    """Attention over `batch` segments of `length` tokens."""

    query_heads: int
    key_heads: int
    width: int
    batch: int
    length: int
    causal: bool

    def small(self) -> Heads:
        """Return the case with a tiny size."""
        key_heads = 2 if self.key_heads == self.query_heads else 1
        return Heads(2, key_heads, 16, 2, 24, self.causal)

    @property
    def flops(self) -> float:
        """FLOPs of the forward pass."""
        scores = self.batch * self.query_heads * self.length**2 * (0.5 if self.causal else 1.0)
        return 4.0 * scores * self.width


HEADS = {
    "16/8 heads of 128, 4 x 2048": Heads(16, 8, 128, 4, 2048, True),
    "32/8 heads of 128, 1 x 8192": Heads(32, 8, 128, 1, 8192, True),
    "16 heads of 72, 40 x 256": Heads(16, 16, 72, 40, 256, False),
    "16 heads of 72, 11 x 729": Heads(16, 16, 72, 11, 729, False),
    "16 heads of 72, 16 x 1024": Heads(16, 16, 72, 16, 1024, False),
    "16 heads of 64, 16 x 577": Heads(16, 16, 64, 16, 577, False),
}
IMAGE_KERNELS = {"flash": "sdpa flash", "cudnn": "sdpa cuDNN"}
"""Kernels that encoders with images of one size may use, with their rows."""
MIN_GAIN = 0.05
"""Fraction of the flash time that cuDNN must save."""
CALLS_PER_SHAPE = 27 * 50
"""Calls with one number of images in a short run: 27 layers, and 50 of the 4,000 microbatches of
1,000 steps if there are 80 different numbers of images. They pay for the plans of cuDNN."""
MAX_ERROR = 1e-2
"""Relative error of a bfloat16 kernel that is right."""


def device_ms(run: Callable[[], object], device: torch.device, runs: int = 10) -> float:
    """Return the median time of a call on the device."""
    for _ in range(2):
        run()
    marks = [Mark(device)]
    for _ in range(runs):
        run()
        marks.append(Mark(device))
    synchronize(device)
    return median(a.until(b) for a, b in pairwise(marks))


def host_us(run: Callable[[], object], device: torch.device) -> float:
    """Return the time in which the host queues a call."""
    for _ in range(3):
        run()
    synchronize(device)
    begin_s = time.perf_counter()
    for _ in range(HOST_CALLS):
        run()
    found = (time.perf_counter() - begin_s) / HOST_CALLS * 1e6
    synchronize(device)
    return found


def measure_ceilings(
    recorder: Recorder, device: torch.device, dtype: torch.dtype, small: bool
) -> float:
    """Add rows for matmuls, memory, host calls and copies; return the best matmul in FLOP/s."""
    best = 0.0
    for name, sizes in SHAPES.items():
        rows, inner, columns = (max(16, size // 64) for size in sizes) if small else sizes
        with recorder.attempt("ceilings", name, "matmul", 8):
            for kind, run in _matmuls(rows, inner, columns, device, dtype):
                flops_per_s = 2.0 * rows * inner * columns / device_ms(run, device) * 1e3
                best = max(best, flops_per_s)
                recorder.add("ceilings", name, kind, "matmul", flops_per_s / 1e12, "TFLOP/s")
    elements = 2**14 if small else 2**28
    with recorder.attempt("ceilings", "memory", "device", 5):
        source = torch.ones(elements, dtype=dtype, device=device)
        target = torch.empty_like(source)
        size = source.nbytes
        copy_ms = device_ms(lambda: target.copy_(source), device)
        recorder.add("ceilings", "memory", "device", "copy", 2 * size / copy_ms / 1e9, "TB/s")
        sum_ms = device_ms(lambda: torch.add(source, target, out=target), device)
        recorder.add("ceilings", "memory", "device", "add", 3 * size / sum_ms / 1e9, "TB/s")
    _measure_copies(recorder, device, elements)
    _measure_host(recorder, device, dtype, small)
    return best


def _matmuls(
    rows: int, inner: int, columns: int, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    hidden = torch.randn(rows, inner, device=device, dtype=dtype)
    weight = torch.randn(columns, inner, device=device, dtype=dtype)
    gradient = torch.randn(rows, columns, device=device, dtype=dtype)
    yield "forward", lambda: hidden @ weight.T
    yield "input gradient", lambda: gradient @ weight
    yield "weight gradient", lambda: gradient.T @ hidden


def _measure_copies(recorder: Recorder, device: torch.device, elements: int) -> None:
    with recorder.attempt("ceilings", "memory", "host", 5):
        on_host = torch.ones(elements // 2, dtype=torch.uint8)
        if device.type == "cuda":
            on_host = on_host.pin_memory()
        on_device = on_host.to(device)
        for name, run in (
            ("to device", lambda: on_device.copy_(on_host, non_blocking=True)),
            ("to host", lambda: on_host.copy_(on_device, non_blocking=True)),
        ):
            gb_per_s = on_host.nbytes / device_ms(run, device, 5) / 1e6
            recorder.add("ceilings", "memory", "page-locked", name, gb_per_s, "GB/s")


def _measure_host(
    recorder: Recorder, device: torch.device, dtype: torch.dtype, small: bool
) -> None:
    tiny = torch.ones(16, 16, device=device, dtype=dtype)
    row = torch.randn(1, 2, 64, 16, device=device, dtype=dtype)
    segments = Segments.from_starts([0, 32, 64], device)
    layer = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.SiLU(), torch.nn.Linear(16, 16))
    layer.to(device, dtype)
    module = torch.nn.Module()
    calls: dict[str, Callable[[], object]] = {
        "add": lambda: tiny + tiny,
        "matmul": lambda: tiny @ tiny,
        "packed attention": lambda: attention(module, row, row, row, segments),
        "eager layer": lambda: layer(tiny),
    }
    for name, run in calls.items():
        with recorder.attempt("ceilings", "host", name, 5):
            recorder.add("ceilings", "host", name, "queue a call", host_us(run, device), "us")
    with recorder.attempt("ceilings", "host", "compiled layer", 15):
        layer.compile(backend="aot_eager" if small else "inductor")
        found = host_us(calls["eager layer"], device)
        recorder.add("ceilings", "host", "compiled layer", "queue a call", found, "us")


def measure_attention(
    recorder: Recorder, device: torch.device, dtype: torch.dtype, small: bool
) -> None:
    """Add rows for every attention kernel and shape: speed, kernel and error."""
    kernels: dict[str, SDPBackend | None] = {
        "sdpa default": None,
        "sdpa flash": SDPBackend.FLASH_ATTENTION,
        "sdpa cuDNN": SDPBackend.CUDNN_ATTENTION,
    }
    if device.type != "cuda":
        kernels = {"sdpa default": None}
    for name, published in HEADS.items():
        heads = published.small() if small else published
        with recorder.attempt("attention", name, "inputs", 5):
            query, key, value = _inputs(heads, device, dtype)
            expected = _sdpa(query.float(), key.float(), value.float(), heads)
        with recorder.attempt("attention", name, "packed", 6):
            _measure_kernel(recorder, name, "packed", heads, (query, key, value), expected,
                            _packed(heads, device))  # fmt: skip
        for kernel, backend in kernels.items():
            with recorder.attempt("attention", name, kernel, 6):
                _measure_sdpa(recorder, name, kernel, backend, heads, device, dtype)
    if device.type == "cuda" and not find_missing_compiler(device.type):
        _measure_flex(recorder, device, dtype, small)


class _OperatorNames(TorchDispatchMode):
    """Collects the names of all operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def _inputs(
    heads: Heads, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random (B, H, S, D) queries, keys and values."""
    torch.manual_seed(0)
    counts = (heads.query_heads, heads.key_heads, heads.key_heads)
    query, key, value = (
        torch.randn(heads.batch, count, heads.length, heads.width, device=device, dtype=dtype)
        for count in counts
    )
    return query, key, value


def _sdpa(query: Tensor, key: Tensor, value: Tensor, heads: Heads) -> Tensor:
    grouped = heads.query_heads != heads.key_heads
    return functional.scaled_dot_product_attention(
        query, key, value, is_causal=heads.causal, enable_gqa=grouped
    )


def _packed(heads: Heads, device: torch.device) -> Callable[..., Tensor]:
    """Return torchmm's attention over the segments, for (B, H, S, D) inputs."""
    starts = [heads.length * i for i in range(heads.batch + 1)]
    segments, module = Segments.from_starts(starts, device), torch.nn.Module()
    module.is_causal = heads.causal  # type: ignore[assignment]

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = [x.transpose(0, 1).flatten(1, 2)[None] for x in (query, key, value)]
        out, _ = attention(module, *rows, segments)
        return out[0].view(heads.batch, heads.length, -1, heads.width).transpose(1, 2)

    return run


def _measure_sdpa(
    recorder: Recorder, name: str, kernel: str, backend: SDPBackend | None, heads: Heads,
    device: torch.device, dtype: torch.dtype,
) -> None:  # fmt: skip
    inputs = _inputs(heads, device, dtype)
    expected = _sdpa(*(x.float() for x in inputs), heads)
    if backend is None:
        _measure_kernel(recorder, name, kernel, heads, inputs, expected,
                        lambda q, k, v: _sdpa(q, k, v, heads))  # fmt: skip
        return
    with sdpa_kernel(backend):
        _measure_kernel(recorder, name, kernel, heads, inputs, expected,
                        lambda q, k, v: _sdpa(q, k, v, heads))  # fmt: skip
        fresh = heads._replace(batch=heads.batch + 1)
        query, key, value = (x.requires_grad_() for x in _inputs(fresh, device, dtype))
        synchronize(device)
        begin_s = time.perf_counter()
        _sdpa(query, key, value, fresh).sum().backward()
        synchronize(device)
        found = (time.perf_counter() - begin_s) * 1e3
        recorder.add("attention", name, kernel, "first call with a new shape", found, "ms")


def _measure_kernel(
    recorder: Recorder, name: str, kernel: str, heads: Heads, inputs: tuple[Tensor, ...],
    expected: Tensor, run: Callable[..., Tensor],
) -> None:  # fmt: skip
    device = inputs[0].device
    names = set()
    if "flex" not in kernel:  # no dispatch mode may see its operator
        with _OperatorNames() as operators:
            run(*inputs)
        names = {name for name in operators.names if "attention" in name}
    out = run(*inputs)
    error = float((out.float() - expected).norm() / expected.norm())
    leaves = [x.detach().requires_grad_() for x in inputs]
    forward_ms = device_ms(lambda: run(*inputs), device)
    out = run(*leaves)
    gradient = torch.randn_like(out)
    backward_ms = device_ms(
        lambda: torch.autograd.grad(out, leaves, gradient, retain_graph=True), device
    )
    speed = heads.flops / forward_ms / 1e9
    recorder.add("attention", name, kernel, "forward", speed, "TFLOP/s",
                 note=", ".join(sorted(names))[:120])  # fmt: skip
    recorder.add(
        "attention", name, kernel, "backward", 2.5 * heads.flops / backward_ms / 1e9, "TFLOP/s"
    )
    recorder.add("attention", name, kernel, "difference", error, "relative to float32")


def choose_image_kernels(rows: Sequence[Row]) -> dict[str, str]:
    """Return the kernel by head width for `attention_kernels.json`, from rows of "attention".

    A width uses cuDNN if all its measured shapes are right, are faster by `MIN_GAIN`, and save the
    time of a first call in `CALLS_PER_SHAPE` calls. Widths with missing rows are not in the result.
    """
    found = {
        (row.case, row.side, row.metric): row.value
        for row in rows
        if row.part == "attention" and row.value is not None
    }
    wins: dict[str, bool] = {}
    for case, heads in HEADS.items():
        if heads.causal:
            continue
        ms = {}
        for kernel, side in IMAGE_KERNELS.items():
            speeds = [found.get((case, side, metric)) for metric in ("forward", "backward")]
            if all(speeds):
                ms[kernel] = sum(
                    factor * heads.flops / (speed * 1e9)
                    for factor, speed in zip((1.0, 2.5), speeds, strict=True)
                    if speed
                )
        plan_ms = found.get((case, "sdpa cuDNN", "first call with a new shape"))
        if len(ms) < len(IMAGE_KERNELS) or plan_ms is None:
            continue
        gain_ms = ms["flash"] - ms["cudnn"]
        error = found.get((case, "sdpa cuDNN", "difference"), 1.0)
        is_better = gain_ms >= MIN_GAIN * ms["flash"] and gain_ms * CALLS_PER_SHAPE >= plan_ms
        width = str(heads.width)
        wins[width] = wins.get(width, True) and is_better and error <= MAX_ERROR
    return {width: "cudnn" if wins[width] else "flash" for width in sorted(wins)}


def save_image_kernels(card: str, kernels: Mapping[str, str], path: Path = KERNELS_FILE) -> None:
    """Store the kernels of a card in the table that torchmm reads."""
    table = {**json.loads(path.read_text()), card: dict(kernels)}
    replace_atomically(path, (json.dumps(table, indent=1, sort_keys=True) + "\n").encode())


def _measure_flex(
    recorder: Recorder, device: torch.device, dtype: torch.dtype, small: bool
) -> None:
    """Compile flex_attention for the long segment."""
    name = "32/8 heads of 128, 1 x 8192"
    heads = HEADS[name].small() if small else HEADS[name]
    with recorder.attempt("attention", name, "flex compiled", 15):
        length = heads.length
        mask = flex.create_block_mask(
            lambda b, h, q, k: q >= k, None, None, length, length, device=str(device)
        )
        call = torch.compile(flex.flex_attention)
        inputs = _inputs(heads, device, dtype)
        expected = _sdpa(*(x.float() for x in inputs), heads)
        run = partial(call, block_mask=mask, enable_gqa=True)
        _measure_kernel(recorder, name, "flex compiled", heads, inputs, expected,
                        run)  # fmt: skip
