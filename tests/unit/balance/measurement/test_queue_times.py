"""Tests of device and host times of operators on a device that executes a queue."""

from __future__ import annotations

import pytest

from torchmm.balance.measurement.operators import queued_times


class Queue:
    """Device that executes a queue, and the clock of the host that fills it."""

    def __init__(self) -> None:
        self.host_s = 0.0
        self.free_s = 0.0
        """Time when the device has executed the queue."""

    def call(self, host_s: float, device_s: float) -> None:
        self.host_s += host_s
        self.free_s = max(self.free_s, self.host_s) + device_s

    def synchronize(self) -> None:
        self.host_s = max(self.host_s, self.free_s)


class Event:
    """Time when the device reaches this point of the queue."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    def record(self) -> None:
        self.at_s = max(self.queue.free_s, self.queue.host_s)

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at_s - self.at_s)


@pytest.mark.parametrize(("host_s", "device_s"), [(33e-6, 2e-6), (5e-6, 1e-3), (33e-6, 33e-6)])
@pytest.mark.parametrize("busy", [True, False])
def test_slow_host_is_not_slow_device(host_s: float, device_s: float, busy: bool) -> None:
    queue = Queue()
    times = queued_times(
        lambda: queue.call(host_s, device_s),
        lambda: queue.call(5e-6, 20e-3 if busy else 0.0),
        0.1,
        make_event=lambda: Event(queue),  # type: ignore[arg-type,return-value]
        synchronize=queue.synchronize,
        clock=lambda: queue.host_s,
    )
    assert times.host_s == pytest.approx(host_s)
    # With an empty queue, the device waits for the host.
    assert times.device_s == pytest.approx(device_s if busy else max(host_s, device_s), rel=0.02)
