"""Part "trace": the kernels of one training step, and what the host did while the GPU was idle."""

from __future__ import annotations

import gzip
import re
import shutil
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from support.one_gpu.rows import Recorder
from support.one_gpu.steps import Kernel, Side, can_profile, kernels_of, merged_ns, synchronize

GAP_NS = 50_000
SHOWN_KERNELS, SHOWN_GAPS = 20, 10
TRACE_BYTES = 12 * 2**20
"""Compressed size up to which the trace is kept: files of 16 MiB can be copied back."""
CLASSES = (
    ("attention", r"flash|fmha|attention|sdpa"),
    ("matmul", r"gemm|cutlass|nvjet|xmma|cublas|splitk"),
    ("update", r"adam|multi_tensor|lpnorm|l2norm|foreach"),
    ("loss", r"softmax|nll|cross_entropy|logit"),
    ("copies", r"memcpy|memset|copy|catarray"),
    ("compiled", r"triton"),
)
"""Class of a kernel by its name; all others are element-wise."""


class Gap(NamedTuple):
    """Time in which the GPU ran nothing."""

    span: tuple[int, int]
    host: str
    """What the host did in the middle of it."""


def trace_step(
    recorder: Recorder, case: str, side: Side, device: torch.device, peak: float
) -> None:
    """Add rows for the kernels of a step, its gaps and its largest losses."""
    activities = [ProfilerActivity.CPU]
    if can_profile(device):
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        side.step(0)
        synchronize(device)
    kernels = kernels_of(recorded)
    if not kernels:
        top = sorted(recorded.key_averages(), key=lambda e: -e.self_cpu_time_total)
        for event in top[:SHOWN_KERNELS]:
            recorder.add("trace", case, "host", event.key[:80], event.self_cpu_time_total / 1e3,
                         "ms", note=f"{event.count} calls")  # fmt: skip
        return
    _add_kernels(recorder, case, kernels)
    gaps = find_gaps(kernels, _host_events(recorded))
    for gap in sorted(gaps, key=lambda g: g.span[0] - g.span[1])[:SHOWN_GAPS]:
        recorder.add("trace", case, "idle GPU", "gap", (gap.span[1] - gap.span[0]) / 1e6, "ms",
                     note=gap.host)  # fmt: skip
    _add_losses(recorder, case, kernels, gaps, side.flops[0] / peak * 1e3)
    _keep_trace(recorder, recorded)


def _add_kernels(recorder: Recorder, case: str, kernels: list[Kernel]) -> None:
    times, calls = Counter[str](), Counter[str]()
    for kernel in kernels:
        times[kernel.name] += kernel.span[1] - kernel.span[0]
        calls[kernel.name] += 1
    recorder.add("trace", case, "GPU", "kernels", len(kernels), "")
    for name, ns in times.most_common(SHOWN_KERNELS):
        recorder.add("trace", case, "GPU", "kernel", ns / 1e6, "ms",
                     note=f"{calls[name]} x {name[:100]}")  # fmt: skip


def _host_events(recorded: profile) -> list[tuple[tuple[int, int], str]]:
    events: list[Any] = recorded.profiler.kineto_results.events() if recorded.profiler else []
    return [
        ((e.start_ns(), e.start_ns() + e.duration_ns()), e.name())
        for e in events
        if e.device_type() == DeviceType.CPU and e.duration_ns() > 0
    ]


def find_gaps(kernels: list[Kernel], host: list[tuple[tuple[int, int], str]]) -> list[Gap]:
    """Return gaps of more than 50 us between kernels, with the host events in their middle.

    Args:
        kernels: in the order of their begin.
        host: span and name of each host event.
    """
    found, reached = [], kernels[0].span[1]
    for kernel in kernels[1:]:
        begin, end = kernel.span
        if begin - reached > GAP_NS:
            middle = (reached + begin) // 2
            inside = sorted((b - a, name) for (a, b), name in host if a <= middle < b)
            names = [name for _, name in inside]
            shown = [names[0], *([names[-1]] if len(names) > 1 else [])] if names else ["Python"]
            found.append(Gap((reached, begin), " in ".join(name[:60] for name in shown)))
        reached = max(reached, end)
    return found


def class_of(kernel: str) -> str:
    """Return the class of a kernel."""
    name = kernel.lower()
    return next((c for c, pattern in CLASSES if re.search(pattern, name)), "element-wise")


def _add_losses(
    recorder: Recorder, case: str, kernels: list[Kernel], gaps: list[Gap], ideal_ms: float
) -> None:
    """Add the time that each class of kernels and idle time add to that of the FLOPs at the peak,
    the largest first."""
    by_class: dict[str, list[tuple[int, int]]] = {}
    for kernel in kernels:
        by_class.setdefault(class_of(kernel.name), []).append(kernel.span)
    times = {name: merged_ns(spans) / 1e6 for name, spans in by_class.items()}
    span = kernels[-1].span[1] - kernels[0].span[0]
    idle_ms = (span - merged_ns(k.span for k in kernels)) / 1e6
    losses = {name: (ms, "") for name, ms in times.items() if name != "matmul"}
    losses["idle GPU"] = (idle_ms, f"{len(gaps)} gaps of more than 50 us")
    matmul_ms = times.get("matmul", 0.0)
    losses["matmul below the peak"] = (
        matmul_ms - ideal_ms,
        f"matmul {matmul_ms:.0f} ms; all FLOPs at the peak {ideal_ms:.0f} ms",
    )
    for name, (ms, note) in sorted(losses.items(), key=lambda item: -item[1][0]):
        recorder.add("trace", case, "GPU", f"loss {name}", ms, "ms", note=note)


def _keep_trace(recorder: Recorder, recorded: profile) -> None:
    plain = recorder.directory / "trace.json"
    recorded.export_chrome_trace(str(plain))
    packed = plain.with_suffix(".json.gz")
    with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=4) as target:
        shutil.copyfileobj(source, target)
    plain.unlink()
    if packed.stat().st_size > TRACE_BYTES:
        packed.unlink()
