"""Logged operations of an emulated device, and waits of the host."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple


class Record(NamedTuple):
    """Operation of a rank, in the order of the host."""

    kind: str
    """kernel, comm, alloc, free, record_stream, record, wait, sync or sdpa."""
    stream: int
    """Stream of the operation. For sync, -1 stands for an event and -2 for the device."""
    name: str
    site: str
    """Innermost line of torchmm, and the line that called torch."""
    label: str
    """Action of the plan, or phase of the step."""
    accesses: list[tuple[int, int, int, bool]]
    """(allocation, begin, end, is_write) in bytes."""
    a: int
    """Event, allocation or peer."""
    b: int
    """Size of an allocation."""
    text: str
    """Communicator|elements and types of a communication."""
    thread: int


def read_records(directory: Path, step: int, kind: str = "step") -> dict[int, list[Record]]:
    """Return the records of a step, or of the save after it ("save"), by rank."""
    by_rank = {}
    for path in sorted(directory.glob(f"{kind}-{step}-rank-*.json")):
        rank = int(path.stem.rpartition("-")[2])
        by_rank[rank] = as_records(json.loads(path.read_text()))
    return by_rank


class Wait(NamedTuple):
    """Wait of the host for its device."""

    what: str
    action: str
    site: str


def host_waits(records: list[Record]) -> Counter[Wait]:
    """Count the waits of the host by position."""
    return Counter(
        Wait(r.name, action_of(r.label), short(r.site)) for r in records if r.kind == "sync"
    )


def attention_kernels(records: list[Record]) -> Counter[str]:
    """Count scaled_dot_product_attention calls by the kernel that CUDA would select."""
    return Counter(r.name for r in records if r.kind == "sdpa")


def action_of(label: str) -> str:
    """Return the action type of a label, such as F of 3F2."""
    match = re.match(r"\d+([A-Z_]+)", label)
    return match[1] if match else label


def short(site: str) -> str:
    """Return a source position without the package directory."""
    return site.replace("site-packages/", "")


def describe(r: Record) -> str:
    """Return the description of a record in messages."""
    return f"{r.name} [{action_of(r.label)}] {short(r.site)} (stream {r.stream})"


def as_records(rows: Any) -> list[Record]:
    """Convert the log of the device to records."""
    return [Record(*row) for row in rows]
