"""Detection of NCCL operations that never complete.

A communication completes when all participating ranks have started it, streams run in order, and
hosts launch operations until they wait. `find_stuck` simulates this with two options:

- `shared`: point-to-point operations of a group use one communicator and stream, as in groups that
  are bound to a device. Otherwise, each pair of ranks has a separate communicator.
- `queues`: streams are assigned to hardware queues in the order of their first use. Operations
  behind an operation that cannot start yet are blocked as well.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from fakecuda.records import Record, action_of, short

Ranks = dict[int, list[Record]]


def mismatches(ranks: Ranks) -> list[str]:
    """Return communicators whose operations differ between ranks."""
    problems: list[str] = []
    uses: dict[str, Ranks] = defaultdict(lambda: defaultdict(list))
    for rank, records in ranks.items():
        for r in records:
            if r.kind == "comm":
                uses[_communicator(r)][rank].append(r)
    for name, by_rank in uses.items():
        check = _pair_mismatches if "/" in name else _group_mismatches
        problems += [f"{name}: {problem}" for problem in check(by_rank)]
    return problems


def _pair_mismatches(by_rank: Ranks) -> list[str]:
    if len(by_rank) != 2:
        return [f"used by ranks {sorted(by_rank)} only"]
    (first, a), (second, b) = sorted(by_rank.items())
    problems = []
    if len(a) != len(b):
        problems.append(f"{len(a)} operations on rank {first}, {len(b)} on rank {second}")
    if len({r.name for r in a}) > 1:
        problems.append("both directions in one communicator")
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if {x.name, y.name} != {"send", "recv"} or _content(x) != _content(y):
            problems.append(
                f"operation {i}: {x.name} {x.text} in {x.label} on rank {first}, "
                f"{y.name} {y.text} in {y.label} on rank {second}"
            )
            break
    return problems


def _same_on_all(record: Record) -> tuple[str, str]:
    """Return the properties that must be equal on all ranks of a group.

    The lengths of an all-to-all differ between ranks.
    """
    if record.name == "all_to_all":
        return record.name, re.sub(r"\|\d+ ", "| ", record.text)
    return record.name, record.text


def _group_mismatches(by_rank: Ranks) -> list[str]:
    operations = {
        rank: [_same_on_all(r) for r in records if not r.name.startswith("coalesced")]
        for rank, records in by_rank.items()
    }
    expected = next(iter(operations.values()))
    for rank, local in operations.items():
        for i, (x, y) in enumerate(zip(local, expected, strict=False)):
            if x != y:
                return [f"rank {rank} differs at operation {i}: {x} instead of {y}"]
        if len(local) != len(expected):
            return [f"{len(local)} operations on rank {rank} instead of {len(expected)}"]
    return []


def find_stuck(ranks: Ranks, *, shared: bool = False, queues: int = 0) -> list[str]:
    """Return operations that never complete. Empty if all ranks reach the end.

    Args:
        shared: See the module.
        queues: Number of hardware queues. 0 stands for one per stream.
    """
    return _Simulation(ranks, shared, queues).find_stuck()


def _communicator(r: Record) -> str:
    return r.text.partition("|")[0]


def _content(r: Record) -> str:
    return r.text.partition("|")[2]


@dataclass
class _Item:
    """An operation in a stream."""

    kind: str
    event: int
    record: Record
    collective: Any = None
    """Communication: the k-th operation of a communicator is the same operation on all ranks."""
    done: bool = False
    passed: bool = False
    """Whether an event record is past the head of its queue."""


@dataclass
class _Device:
    """Host and streams of a rank."""

    program: list[tuple[int, _Item] | Record]
    """Items with their streams, and waits of the host."""
    host: int = 0
    """Number of launched entries."""
    streams: dict[int, deque[_Item]] = field(default_factory=lambda: defaultdict(deque))
    queues: dict[int, deque[tuple[int, _Item]]] = field(default_factory=lambda: defaultdict(deque))
    numbers: dict[int, int] = field(default_factory=dict)
    """Stream numbers in the order of their first use."""
    recorded: set[int] = field(default_factory=set)
    recorded_in_step: set[int] = field(default_factory=set)
    """Events that are recorded within the step. Other events are complete."""

    def is_over(self, event: int) -> bool:
        return event in self.recorded or event not in self.recorded_in_step


class _Simulation:
    def __init__(self, ranks: Ranks, shared: bool, queues: int) -> None:
        self.queues = queues
        self.arrived: dict[Any, set[int]] = defaultdict(set)
        self.needed: dict[Any, int] = {}
        self.devices = {rank: self._device(rank, ranks[rank], shared) for rank in ranks}
        members: dict[str, set[int]] = defaultdict(set)
        for rank, records in ranks.items():
            for r in records:
                if r.kind == "comm":
                    members[_communicator(r)].add(rank)
        for device in self.devices.values():
            for entry in device.program:
                if isinstance(entry, Record):
                    continue
                if (collective := entry[1].collective) is not None:
                    pair = isinstance(collective[1], tuple)
                    self.needed[collective] = 2 if pair else len(members[collective[0]])

    def _device(self, rank: int, records: list[Record], shared: bool) -> _Device:
        count: Counter[Any] = Counter()
        device = _Device([])
        for r in records:
            if r.kind == "sync":
                device.program.append(r)
            elif r.kind in ("kernel", "record", "wait"):
                device.program.append((r.stream, _Item(r.kind, r.a, r)))
                if r.kind == "record":
                    device.recorded_in_step.add(r.a)
            elif r.kind == "comm":
                collective = self._collective_key(rank, r, count)
                kind = "kernel" if collective is None else "comm"
                device.program.append((r.stream, _Item(kind, 0, r, collective)))
        if shared:
            _share_streams(device)
        return device

    @staticmethod
    def _collective_key(rank: int, r: Record, count: Counter[Any]) -> Any:
        name = _communicator(r)
        if r.name.startswith("coalesced"):
            return None
        key: tuple[Any, ...] = (name, "all")
        if r.name in ("send", "recv"):
            ends = (rank, r.a) if r.name == "send" else (r.a, rank)
            key = (name.partition("/")[0], ends)
        count[key] += 1
        return (*key, count[key])

    def find_stuck(self) -> list[str]:
        """Simulate to the end and return incomplete operations."""
        run = self._run_queues if self.queues else self._run_streams
        # The list makes every rank advance before the check.
        while any(
            [self._launch(device) | run(rank, device) for rank, device in self.devices.items()]
        ):
            pass
        return [line for rank, device in self.devices.items() for line in _incomplete(rank, device)]

    def _launch(self, device: _Device) -> bool:
        """Launch operations of the host until it waits."""
        begin = device.host
        while device.host < len(device.program):
            entry = device.program[device.host]
            if isinstance(entry, Record):
                if self._host_waits(device, entry):
                    break
            else:
                stream, item = entry
                device.streams[stream].append(item)
                if self.queues:
                    number = device.numbers.setdefault(stream, len(device.numbers))
                    device.queues[number % self.queues].append(entry)
            device.host += 1
        return device.host > begin

    @staticmethod
    def _host_waits(device: _Device, sync: Record) -> bool:
        if sync.stream == -1:
            return not device.is_over(sync.a)
        if sync.stream == -2:
            return any(device.streams.values())
        return bool(device.streams[sync.stream])

    def _start(self, rank: int, device: _Device, item: _Item) -> None:
        if item.kind == "record":
            device.recorded.add(item.event)
        if item.collective is None:
            item.done = True
        else:
            self.arrived[item.collective].add(rank)

    def _ends(self, rank: int, item: _Item) -> bool:
        arrived = self.arrived[item.collective]
        return rank in arrived and len(arrived) >= self.needed[item.collective]

    def _run_streams(self, rank: int, device: _Device) -> bool:
        moved = False
        for items in device.streams.values():
            while items:
                item = items[0]
                if item.kind == "wait" and not device.is_over(item.event):
                    break
                if item.collective is not None and rank not in self.arrived[item.collective]:
                    moved = True
                self._start(rank, device, item)
                if item.collective is not None and not self._ends(rank, item):
                    break
                items.popleft()
                moved = True
        return moved

    def _run_queues(self, rank: int, device: _Device) -> bool:
        moved = False
        for queue in device.queues.values():
            while queue:
                stream, item = queue[0]
                items = device.streams[stream]
                moved |= self._remove_completed(rank, device, items)
                if item.kind == "record":
                    # It completes with the previous operations of its stream and blocks no other.
                    item.passed = True
                elif not items or items[0] is not item:
                    break  # kernels wait for the previous kernel of their stream
                elif item.kind == "wait" and not device.is_over(item.event):
                    break
                else:
                    self._start(rank, device, item)
                queue.popleft()
                moved = True
        for items in device.streams.values():
            moved |= self._remove_completed(rank, device, items)
        return moved

    def _remove_completed(self, rank: int, device: _Device, items: deque[_Item]) -> bool:
        """Remove completed operations from the head of a stream."""
        moved = False
        while items:
            item = items[0]
            if item.collective is not None:
                item.done = self._ends(rank, item)
            if item.kind == "record" and item.passed:
                self._start(rank, device, item)
            if not item.done:
                break
            items.popleft()
            moved = True
        return moved


def _share_streams(device: _Device) -> None:
    """Move the operations of all pairs of a group to one stream."""
    renamed: dict[int, int] = {}
    groups: dict[str, int] = {}
    for entry in device.program:
        if not isinstance(entry, Record) and "/" in _communicator(entry[1].record):
            group = _communicator(entry[1].record).partition("/")[0]
            renamed[entry[0]] = groups.setdefault(group, -100 - len(groups))
    device.program = [
        entry if isinstance(entry, Record) else (renamed.get(entry[0], entry[0]), entry[1])
        for entry in device.program
    ]


def _incomplete(rank: int, device: _Device) -> list[str]:
    lines = []
    if device.host < len(device.program):
        waits = device.program[device.host]
        assert isinstance(waits, Record)
        location = f"{action_of(waits.label)}, {short(waits.site)}"
        lines.append(f"rank {rank}: host in {waits.name} ({location})")
    for stream, items in device.streams.items():
        if items:
            r = items[0].record
            operation = f"{r.name or items[0].kind} {r.label}"
            lines.append(f"rank {rank}, stream {stream}: {operation} {items[0].collective or ''}")
    return lines
