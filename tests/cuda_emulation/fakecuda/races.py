"""Detection of unordered accesses to the same memory from two streams.

Every stream has a vector clock with its progress and the known progress of other streams, from
events that it waited for. All streams know the operations that the host has waited for. Freed
memory returns to the pool of the stream that allocated it, and can be reused immediately. This is a
race if another stream may still use it (`record_stream` delays the reuse).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from fakecuda.records import Record, action_of, describe

Clock = dict[int, int]
"""Number of the last completed operation, by stream."""


class Race(NamedTuple):
    """Two accesses without an order."""

    kind: str
    first: str
    second: str


class _Use(NamedTuple):
    stream: int
    at: int
    begin: int
    end: int
    write: bool
    record: Record


@dataclass
class _Memory:
    stream: int
    size: int = 0
    at: int = 0
    """Clock of the stream at the allocation."""
    number: int = 0
    """Index of the record of the allocation."""
    is_logged: bool = True
    """Whether the allocation was logged."""
    uses: list[_Use] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)


class _Returned(NamedTuple):
    """Memory that was freed while another stream could still use it."""

    number: int
    stream: int
    at: int
    text: str


def races(records: list[Record]) -> Counter[Race]:
    """Return the races of a step of a rank, with their counts."""
    return _Races(records).counts


def overlapped_operations(records: list[Record], source_file: str) -> int:
    """Count operations of a source file that can overlap the last compute operation.

    The compute stream is the stream with the most kernels. Operations of other streams are counted
    if they do not wait for its last operation.
    """
    return _OverlapRaces(records, source_file).overlapped


def operations_before_end(records: list[Record], source_file: str) -> int:
    """Count compute operations that start before operations of a source file are complete."""
    return _AheadRaces(records, source_file).ahead_count


def still_running(records: list[Record], later: list[Record]) -> set[int]:
    """Return streams whose operations the host has not waited for.

    Args:
        later: Following records. Waits at their start are included.
    """
    begins = list(takewhile(lambda r: r.kind == "sync", later))
    clocks = _Races([*records, *begins])
    return {s for s, clock in clocks.clocks.items() if clocks.host.get(s, 0) < clock.get(s, 0)}


class _Races:
    def __init__(self, records: list[Record]) -> None:
        self.counts: Counter[Race] = Counter()
        self.clocks: dict[int, Clock] = defaultdict(dict)
        self.host: Clock = {}
        self.events: dict[int, Clock] = {}
        self.memory: dict[int, _Memory] = {}
        self.returned: dict[int, list[_Returned]] = defaultdict(list)
        handlers = {
            "kernel": self._operation,
            "comm": self._operation,
            "alloc": self._alloc,
            "free": self._free,
            "record_stream": self._record_stream,
            "record": self._record,
            "wait": self._wait,
            "sync": self._sync,
        }
        for number, record in enumerate(records):
            if record.kind in handlers:
                handlers[record.kind](number, record)

    def _operation(self, number: int, r: Record) -> None:
        clock = self.clocks[r.stream]
        _merge(clock, self.host)
        clock[r.stream] = clock.get(r.stream, 0) + 1
        for allocation, begin, end, write in r.accesses:
            block = self.memory.setdefault(allocation, _Memory(0, is_logged=False))
            if block.is_logged and not block.uses:
                self._first_use(block, r, clock)
            if (
                block.is_logged
                and r.stream != block.stream
                and clock.get(block.stream, 0) < block.at
            ):
                allocation_text = f"allocation of {block.size} B"
                kind = "used on another stream before the allocation"
                self.counts[Race(kind, allocation_text, describe(r))] += 1
            self._use(block, _Use(r.stream, clock[r.stream], begin, end, write, r), clock)

    def _first_use(self, block: _Memory, r: Record, clock: Clock) -> None:
        """Check memory that may have been freed in the pool of its stream before."""
        remaining = []
        for returned in self.returned[block.stream]:
            if clock.get(returned.stream, 0) >= returned.at:
                if r.stream == block.stream:
                    continue  # all later operations of this stream follow that use
            elif returned.number < block.number:
                kind = "reused while another stream may use it"
                self.counts[Race(kind, returned.text, describe(r))] += 1
            remaining.append(returned)
        self.returned[block.stream] = remaining

    def _use(self, block: _Memory, new: _Use, clock: Clock) -> None:
        keep = []
        for use in block.uses:
            overlap = use.begin < new.end and new.begin < use.end
            ordered = clock.get(use.stream, 0) >= use.at
            if overlap and (new.write or use.write) and not ordered:
                race = Race("unordered", describe(use.record), describe(new.record))
                self.counts[race] += 1
            # Ordered uses that are overwritten are not needed any longer.
            covered = new.begin <= use.begin and use.end <= new.end
            if not (ordered and new.write and covered):
                keep.append(use)
        block.uses = [*keep, new]

    def _alloc(self, number: int, r: Record) -> None:
        clock = self.clocks[r.stream]
        _merge(clock, self.host)
        self.memory[r.a] = _Memory(r.stream, r.b, clock.get(r.stream, 0), number)

    def _free(self, number: int, r: Record) -> None:
        block = self.memory.pop(r.a, None)
        if block is None:
            return
        clock = self.clocks[block.stream]
        for use in block.uses:
            if use.stream == block.stream or use.stream in block.recorded:
                continue
            if max(clock.get(use.stream, 0), self.host.get(use.stream, 0)) < use.at:
                used = f"{block.size} B of stream {block.stream}, used by {describe(use.record)}"
                text = f"{used}, freed in {action_of(r.label)}"
                returned = _Returned(number, use.stream, use.at, text)
                self.returned[block.stream].append(returned)

    def _record_stream(self, number: int, r: Record) -> None:
        if r.a in self.memory:
            self.memory[r.a].recorded.add(r.stream)

    def _record(self, number: int, r: Record) -> None:
        clock = self.clocks[r.stream]
        _merge(clock, self.host)
        self.events[r.a] = dict(clock)

    def _wait(self, number: int, r: Record) -> None:
        _merge(self.clocks[r.stream], self.events.get(r.a, {}))

    def _sync(self, number: int, r: Record) -> None:
        if r.stream == -2:
            for clock in self.clocks.values():
                _merge(self.host, clock)
        else:
            completed = self.events.get(r.a, {}) if r.stream == -1 else self.clocks[r.stream]
            _merge(self.host, completed)


class _OverlapRaces(_Races):
    def __init__(self, records: list[Record], source_file: str) -> None:
        self._source_file = source_file
        self._computing = Counter(r.stream for r in records if r.kind == "kernel").most_common(1)
        self.overlapped = 0
        super().__init__(records)

    def _operation(self, number: int, r: Record) -> None:
        super()._operation(number, r)
        main = self._computing[0][0]
        last = self.clocks[main].get(main, 0)
        if self._source_file in r.site and r.stream != main:
            self.overlapped += self.clocks[r.stream].get(main, 0) < last


class _AheadRaces(_Races):
    def __init__(self, records: list[Record], source_file: str) -> None:
        self._source_file = source_file
        self._computing = Counter(r.stream for r in records if r.kind == "kernel").most_common(1)
        self._launched: Clock = {}
        self.ahead_count = 0
        super().__init__(records)

    def _operation(self, number: int, r: Record) -> None:
        super()._operation(number, r)
        main = self._computing[0][0]
        if r.stream == main:
            clock = self.clocks[main]
            ahead = any(clock.get(s, 0) < at for s, at in self._launched.items())
            self.ahead_count += ahead
        elif self._source_file in r.site:
            self._launched[r.stream] = self.clocks[r.stream].get(r.stream, 0)


def _merge(into: Clock, other: Clock) -> None:
    for stream, at in other.items():
        if at > into.get(stream, 0):
            into[stream] = at
