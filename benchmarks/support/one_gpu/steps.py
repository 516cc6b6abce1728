"""Timing of training steps: device and host time per step, idle time, peak memory.

A side is a program that trains: torchmm, a Hugging Face loop, TRL. Only one side exists at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

WARM_UP, TIMED, MIN_TIMED = 3, 8, 2


class Side(Protocol):
    """A program that trains."""

    tokens: list[int]
    """Tokens of each batch, without padding."""
    flops: list[float]
    """Model FLOPs of each batch."""
    wait_s: float
    """Total wait time of the host for the device at the end of forward and backward."""

    def step(self, index: int) -> float:
        """Run a training step with batch `index` and return its loss."""

    def close(self) -> None:
        """Stop threads and release files."""


class Mark:
    """A point in time of the device: an event on CUDA, else the time of the host."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        self._at_s = time.perf_counter()

    def until(self, later: Mark) -> float:
        """Return the time until a later mark in ms. The device must have passed both."""
        if self._event is None:
            return (later._at_s - self._at_s) * 1e3
        return float(self._event.elapsed_time(later._event))


@dataclass
class Timed:
    """Times of a side.

    Attributes:
        step_ms: time of each timed step on the device.
        host_ms: time per step in which the host did not wait for the device, median.
        first_loss: loss of the first step.
        steps: numbers of the timed batches.
    """

    step_ms: list[float]
    host_ms: float
    first_loss: float
    steps: list[int]
    warm_up_s: float

    @property
    def median_ms(self) -> float:
        """Median time of a step."""
        return median(self.step_ms)

    @property
    def first_ms(self) -> float:
        """Time of the fastest step on the first batch."""
        pairs = zip(self.step_ms, self.steps, strict=True)
        return min([ms for ms, index in pairs if index == 0] or self.step_ms)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_steps(side: Side, device: torch.device, budget_s: float, quick: bool = False) -> Timed:
    """Time the steps of a side.

    Args:
        budget_s: time after which no step is started, except for the first two.
        quick: whether one step of warm-up and two timed steps are enough.
    """
    batches = len(side.tokens)
    begin_s = time.perf_counter()
    warm_up, timed = (1, MIN_TIMED) if quick else (WARM_UP, TIMED)
    losses = [side.step(0)]
    for i in range(1, warm_up):
        if i > 1 and time.perf_counter() - begin_s > budget_s / 2:
            break
        losses.append(side.step(i % batches))
    synchronize(device)
    warm_up_s = time.perf_counter() - begin_s
    marks, host_s, steps = [Mark(device)], [_host_s(side)], []
    for i in range(timed):
        if i >= MIN_TIMED and time.perf_counter() - begin_s > budget_s:
            break
        side.step(i % batches)
        steps.append(i % batches)
        marks.append(Mark(device))
        host_s.append(_host_s(side))
    synchronize(device)
    step_ms = [a.until(b) for a, b in pairwise(marks)]
    host_ms = median((b - a) * 1e3 for a, b in pairwise(host_s))
    return Timed(step_ms, host_ms, losses[0], steps, warm_up_s)


def _host_s(side: Side) -> float:
    return time.perf_counter() - side.wait_s


class Kernel(NamedTuple):
    """A kernel or copy that ran on the device."""

    name: str
    span: tuple[int, int]
    """Begin and end in ns."""


def record_kernels(run: Callable[[], object], device: torch.device) -> list[Kernel] | None:
    """Return the kernels of a call in the order of their begin; None if they cannot be recorded."""
    if not can_profile(device):
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        synchronize(device)
    return kernels_of(recorded) or None


def can_profile(device: torch.device) -> bool:
    """Return True if the profiler records kernels of the device."""
    return device.type == "cuda" and ProfilerActivity.CUDA in torch.profiler.supported_activities()


def kernels_of(recorded: profile) -> list[Kernel]:
    """Return the recorded kernels in the order of their begin."""
    events = recorded.profiler.kineto_results.events() if recorded.profiler else []
    found = [
        Kernel(e.name(), (e.start_ns(), e.start_ns() + e.duration_ns()))
        for e in events
        if e.device_type() == DeviceType.CUDA and e.duration_ns() > 0 and not _is_annotation(e)
    ]
    return sorted(found, key=lambda kernel: kernel.span)


def _is_annotation(event: Any) -> bool:
    """Return True for ranges that the profiler copies from the host to the device timeline."""
    kind = str(getattr(event, "activity_type", str)())
    return "annotation" in kind or bool(getattr(event, "is_user_annotation", bool)())


def merged_ns(spans: Iterable[tuple[int, int]]) -> int:
    """Return the length of the union of intervals."""
    total, reached = 0, 0
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total
