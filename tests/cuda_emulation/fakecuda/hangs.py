"""Whether NCCL's operations of all ranks come to their end.

Communication ends when all that take part have come to it, a stream runs in order, and hosts launch
ahead until they wait. `stuck` plays all of that, under the assumption that is asked for:

- `shared`: point-to-point operations of a group use one communicator and stream, as in groups that
  are bound to a device; else each pair of ranks has its own.
- `queues`: streams are dealt out to so many hardware queues in the order of their first use; what
  stands in a queue behind an operation that cannot begin yet waits, too.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from fakecuda.records import Record, action_of, short

Ranks = dict[int, list[Record]]


def mismatches(ranks: Ranks) -> list[str]:
    """Communicators that not all ranks use alike."""
    problems: list[str] = []
    uses: dict[str, Ranks] = defaultdict(lambda: defaultdict(list))
    for rank, records in ranks.items():
        for r in records:
            if r.kind == "comm":
                uses[_communicator(r)][rank].append(r)
    for name, by_rank in uses.items():
        of_kind = _pair_mismatches if "/" in name else _group_mismatches
        problems += [f"{name}: {problem}" for problem in of_kind(by_rank)]
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
    """What has to be the same on all ranks of a group. In an all-to-all each sends to each what it
    has for it, so lengths are not."""
    if record.name == "all_to_all":
        return record.name, re.sub(r"\|\d+ ", "| ", record.text)
    return record.name, record.text


def _group_mismatches(by_rank: Ranks) -> list[str]:
    plain = {
        rank: [_same_on_all(r) for r in records if not r.name.startswith("coalesced")]
        for rank, records in by_rank.items()
    }
    expected = next(iter(plain.values()))
    for rank, own in plain.items():
        for i, (x, y) in enumerate(zip(own, expected, strict=False)):
            if x != y:
                return [f"rank {rank} differs at operation {i}: {x} instead of {y}"]
        if len(own) != len(expected):
            return [f"{len(own)} operations on rank {rank} instead of {len(expected)}"]
    return []


def stuck(ranks: Ranks, *, shared: bool = False, queues: int = 0) -> list[str]:
    """What cannot go on; nothing if all ranks reach the end.

    Args:
        shared: see the module.
        queues: hardware queues; 0: as many as streams.
    """
    return _Play(ranks, shared, queues).stuck()


def _communicator(r: Record) -> str:
    return r.text.partition("|")[0]


def _content(r: Record) -> str:
    return r.text.partition("|")[2]


@dataclass
class _Item:
    """Something in a stream."""

    kind: str
    event: int
    record: Record
    meeting: Any = None
    """Of communication: the k-th operation of a communicator is one on all its ranks."""
    done: bool = False
    passed: bool = False
    """A record of an event that its queue is past."""


@dataclass
class _Device:
    """A rank's host and streams."""

    program: list[tuple[int, _Item] | Record]
    """Items with their streams, and where the host waits."""
    host: int = 0
    """Entries that it has launched."""
    streams: dict[int, deque[_Item]] = field(default_factory=lambda: defaultdict(deque))
    queues: dict[int, deque[tuple[int, _Item]]] = field(default_factory=lambda: defaultdict(deque))
    numbers: dict[int, int] = field(default_factory=dict)
    """Streams in the order of their first use."""
    recorded: set[int] = field(default_factory=set)
    known: set[int] = field(default_factory=set)
    """Events that are recorded within the step; others were long ago."""

    def is_over(self, event: int) -> bool:
        return event in self.recorded or event not in self.known


class _Play:
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
                if (meeting := entry[1].meeting) is not None:
                    pair = isinstance(meeting[1], tuple)
                    self.needed[meeting] = 2 if pair else len(members[meeting[0]])

    def _device(self, rank: int, records: list[Record], shared: bool) -> _Device:
        count: Counter[Any] = Counter()
        device = _Device([])
        for r in records:
            if r.kind == "sync":
                device.program.append(r)
            elif r.kind in ("kernel", "record", "wait"):
                device.program.append((r.stream, _Item(r.kind, r.a, r)))
                if r.kind == "record":
                    device.known.add(r.a)
            elif r.kind == "comm":
                meeting = self._meeting(rank, r, count)
                kind = "kernel" if meeting is None else "comm"
                device.program.append((r.stream, _Item(kind, 0, r, meeting)))
        if shared:
            _share_streams(device)
        return device

    @staticmethod
    def _meeting(rank: int, r: Record, count: Counter[Any]) -> Any:
        name = _communicator(r)
        if r.name.startswith("coalesced"):
            return None
        key: tuple[Any, ...] = (name, "all")
        if r.name in ("send", "recv"):
            ends = (rank, r.a) if r.name == "send" else (r.a, rank)
            key = (name.partition("/")[0], ends)
        count[key] += 1
        return (*key, count[key])

    def stuck(self) -> list[str]:
        """Plays to the end; what is left."""
        run = self._run_queues if self.queues else self._run_streams
        # A list: every rank goes on, then is asked whether any has.
        while any(
            [self._launch(device) | run(rank, device) for rank, device in self.devices.items()]
        ):
            pass
        return [line for rank, device in self.devices.items() for line in _left(rank, device)]

    def _launch(self, device: _Device) -> bool:
        """The host goes on until it has to wait."""
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
        if item.meeting is None:
            item.done = True
        else:
            self.arrived[item.meeting].add(rank)

    def _ends(self, rank: int, item: _Item) -> bool:
        met = self.arrived[item.meeting]
        return rank in met and len(met) >= self.needed[item.meeting]

    def _run_streams(self, rank: int, device: _Device) -> bool:
        moved = False
        for own in device.streams.values():
            while own:
                item = own[0]
                if item.kind == "wait" and not device.is_over(item.event):
                    break
                if item.meeting is not None and rank not in self.arrived[item.meeting]:
                    moved = True
                self._start(rank, device, item)
                if item.meeting is not None and not self._ends(rank, item):
                    break
                own.popleft()
                moved = True
        return moved

    def _run_queues(self, rank: int, device: _Device) -> bool:
        moved = False
        for queue in device.queues.values():
            while queue:
                stream, item = queue[0]
                own = device.streams[stream]
                moved |= self._settle(rank, device, own)
                if item.kind == "record":
                    # It completes with what is in front of it in its stream, and holds nothing up.
                    item.passed = True
                elif not own or own[0] is not item:
                    break  # kernels wait for the one before them in their stream
                elif item.kind == "wait" and not device.is_over(item.event):
                    break
                else:
                    self._start(rank, device, item)
                queue.popleft()
                moved = True
        for own in device.streams.values():
            moved |= self._settle(rank, device, own)
        return moved

    def _settle(self, rank: int, device: _Device, own: deque[_Item]) -> bool:
        """Takes what has ended off the head of a stream."""
        moved = False
        while own:
            item = own[0]
            if item.meeting is not None:
                item.done = self._ends(rank, item)
            if item.kind == "record" and item.passed:
                self._start(rank, device, item)
            if not item.done:
                break
            own.popleft()
            moved = True
        return moved


def _share_streams(device: _Device) -> None:
    """Moves the operations of all pairs of a group, and all else there, to one stream."""
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


def _left(rank: int, device: _Device) -> list[str]:
    found = []
    if device.host < len(device.program):
        waits = device.program[device.host]
        assert isinstance(waits, Record)
        place = f"{action_of(waits.label)}, {short(waits.site)}"
        found.append(f"rank {rank}: host in {waits.name} ({place})")
    for stream, own in device.streams.items():
        if own:
            r = own[0].record
            what = f"{r.name or own[0].kind} {r.label}"
            found.append(f"rank {rank}, stream {stream}: {what} {own[0].meeting or ''}")
    return found
