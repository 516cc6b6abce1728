"""What an emulated device has logged, and where the host waited for it."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple


class Record(NamedTuple):
    """An operation of a rank, in the order in which the host launched them."""

    kind: str
    """kernel, comm, alloc, free, record_stream, record, wait, sync, sdpa."""
    stream: int
    """On which it runs; of a sync -1: an event's, -2: all of the device."""
    name: str
    site: str
    """Innermost line of torchmm, and the line that called torch."""
    label: str
    """The plan's action, or the part of the step."""
    accesses: list[tuple[int, int, int, bool]]
    """(allocation, begin, end, whether it is written), bytes."""
    a: int
    """Event, allocation or peer."""
    b: int
    """Size of an allocation."""
    text: str
    """Of communication: communicator|elements and types."""
    thread: int


def read_records(directory: Path, step: int, what: str = "step") -> dict[int, list[Record]]:
    """By rank, of one step, or of saving behind it ("save")."""
    found = {}
    for path in sorted(directory.glob(f"{what}-{step}-rank-*.json")):
        rank = int(path.stem.rpartition("-")[2])
        found[rank] = as_records(json.loads(path.read_text()))
    return found


class Wait(NamedTuple):
    """The host waits for its device."""

    what: str
    action: str
    site: str


def host_waits(records: list[Record]) -> Counter[Wait]:
    """How often the host waits, and where."""
    return Counter(
        Wait(r.name, action_of(r.label), short(r.site)) for r in records if r.kind == "sync"
    )


def attention_kernels(records: list[Record]) -> Counter[str]:
    """Calls of scaled_dot_product_attention by the kernel that CUDA would choose."""
    return Counter(r.name for r in records if r.kind == "sdpa")


def action_of(label: str) -> str:
    """F of 3F2, for example."""
    match = re.match(r"\d+([A-Z_]+)", label)
    return match[1] if match else label


def short(site: str) -> str:
    """A place without where packages lie."""
    return site.replace("site-packages/", "")


def described(r: Record) -> str:
    """A record in a message."""
    return f"{r.name} [{action_of(r.label)}] {short(r.site)} (stream {r.stream})"


def as_records(rows: Any) -> list[Record]:
    """Of what the device hands out."""
    return [Record(*row) for row in rows]
