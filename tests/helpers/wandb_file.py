"""Reads what W&B has written offline: a log in LevelDB's format, of protocol buffers."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

HEADER = 7
BLOCK = 32768
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def read_wandb(file: Path) -> list[Record]:
    """All records of a .wandb file."""
    found = []
    for data in _chunks(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        found.append(record)
    return found


def _chunks(data: bytes) -> Iterator[bytes]:
    at, whole = HEADER, b""
    assert data[:4] == b":W&B"
    while at + HEADER <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:  # what is too small for a header is empty
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEADER])
        if kind == 0:
            return
        whole += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (FULL, LAST):
            yield whole
            whole = b""


def history(records: list[Record]) -> list[dict[str, Any]]:
    """What was logged, in order."""
    return [_values(record) for record in records if record.HasField("history")]


def _values(record: Record) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in record.history.item:
        *above, last = list(item.nested_key) or [item.key]
        place = found
        for key in above:
            place = place.setdefault(key, {})
        place[last] = json.loads(item.value_json)
    return found
