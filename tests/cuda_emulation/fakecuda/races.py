"""Accesses to the same memory from two streams that nothing orders.

Every stream has a vector clock: how far it is, and how far behind it knows the other streams to be,
from events that it waited for. What the host has waited for, all streams know. Memory that is freed
goes back to the pool of the stream that allocated it, and may be handed out there at once: a race
if another stream was not known to be done with it (`record_stream` delays that).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from fakecuda.records import Record, action_of, described

Clock = dict[int, int]
"""By stream: number of its last operation that is known to be over."""


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
    """The clock of its stream when it was allocated."""
    number: int = 0
    """The record that allocated it."""
    born: bool = True
    """Whether that was logged."""
    uses: list[_Use] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)


class _Returned(NamedTuple):
    """Memory that went back into a pool while another stream could still use it."""

    number: int
    stream: int
    at: int
    text: str


def races(records: list[Record]) -> Counter[Race]:
    """The races of a rank's step, with how often each was seen."""
    return _Races(records).found


def operations_beside(records: list[Record], place: str) -> int:
    """How many operations that a place in the code launches on other streams need not wait for
    the last one of the stream that computes (the busiest one)."""
    return _Beside(records, place).found_beside


def operations_before_the_end(records: list[Record], place: str) -> int:
    """How many operations the stream that computes begins while nothing says that those are over
    which a place in the code has launched on other streams."""
    return _Ahead(records, place).found_ahead


def still_running(records: list[Record], later: list[Record]) -> set[int]:
    """Streams whose operations the host has not waited for when it goes on.

    Args:
        later: what follows; all waits that it begins with count.
    """
    begins = list(takewhile(lambda r: r.kind == "sync", later))
    clocks = _Races([*records, *begins])
    return {s for s, own in clocks.clocks.items() if clocks.host.get(s, 0) < own.get(s, 0)}


class _Races:
    def __init__(self, records: list[Record]) -> None:
        self.found: Counter[Race] = Counter()
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
            block = self.memory.setdefault(allocation, _Memory(0, born=False))
            if block.born and not block.uses:
                self._first_use(block, r, clock)
            if block.born and r.stream != block.stream and clock.get(block.stream, 0) < block.at:
                what = f"allocation of {block.size} B"
                kind = "used on another stream before its allocation's is there"
                self.found[Race(kind, what, described(r))] += 1
            self._use(block, _Use(r.stream, clock[r.stream], begin, end, write, r), clock)

    def _first_use(self, block: _Memory, r: Record, clock: Clock) -> None:
        """It may be any memory that its pool has been given back."""
        left = []
        for returned in self.returned[block.stream]:
            if clock.get(returned.stream, 0) >= returned.at:
                if r.stream == block.stream:
                    continue  # from here on this stream is behind that use
            elif returned.number < block.number:
                kind = "handed out again while another stream may use it"
                self.found[Race(kind, returned.text, described(r))] += 1
            left.append(returned)
        self.returned[block.stream] = left

    def _use(self, block: _Memory, new: _Use, clock: Clock) -> None:
        keep = []
        for use in block.uses:
            overlap = use.begin < new.end and new.begin < use.end
            ordered = clock.get(use.stream, 0) >= use.at
            if overlap and (new.write or use.write) and not ordered:
                race = Race("unordered", described(use.record), described(new.record))
                self.found[race] += 1
            # What is overwritten after it was ordered need not be remembered.
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
        own = self.clocks[block.stream]
        for use in block.uses:
            if use.stream == block.stream or use.stream in block.recorded:
                continue
            if max(own.get(use.stream, 0), self.host.get(use.stream, 0)) < use.at:
                used = f"{block.size} B of stream {block.stream}, used by {described(use.record)}"
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
            known = self.events.get(r.a, {}) if r.stream == -1 else self.clocks[r.stream]
            _merge(self.host, known)


class _Beside(_Races):
    def __init__(self, records: list[Record], place: str) -> None:
        self._place = place
        self._computing = Counter(r.stream for r in records if r.kind == "kernel").most_common(1)
        self.found_beside = 0
        super().__init__(records)

    def _operation(self, number: int, r: Record) -> None:
        super()._operation(number, r)
        main = self._computing[0][0]
        last = self.clocks[main].get(main, 0)
        if self._place in r.site and r.stream != main:
            self.found_beside += self.clocks[r.stream].get(main, 0) < last


class _Ahead(_Races):
    def __init__(self, records: list[Record], place: str) -> None:
        self._place = place
        self._computing = Counter(r.stream for r in records if r.kind == "kernel").most_common(1)
        self._launched: Clock = {}
        self.found_ahead = 0
        super().__init__(records)

    def _operation(self, number: int, r: Record) -> None:
        super()._operation(number, r)
        main = self._computing[0][0]
        if r.stream == main:
            known = self.clocks[main]
            ahead = any(known.get(s, 0) < at for s, at in self._launched.items())
            self.found_ahead += ahead
        elif self._place in r.site:
            self._launched[r.stream] = self.clocks[r.stream].get(r.stream, 0)


def _merge(into: Clock, other: Clock) -> None:
    for stream, at in other.items():
        if at > into.get(stream, 0):
            into[stream] = at
