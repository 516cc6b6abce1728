"""Read a file that W&B wrote offline: a LevelDB log of protocol buffers."""

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
    """Return all records of a .wandb file."""
    records = []
    for data in _chunks(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        records.append(record)
    return records


def _chunks(data: bytes) -> Iterator[bytes]:
    offset, content = HEADER, b""
    assert data[:4] == b":W&B"
    while offset + HEADER <= len(data):
        left = BLOCK - offset % BLOCK
        if left < HEADER:  # a rest that is smaller than a header is empty
            offset += left
            continue
        _, length, kind = struct.unpack("<IHB", data[offset : offset + HEADER])
        if kind == 0:
            return
        content += data[offset + HEADER : offset + HEADER + length]
        offset += HEADER + length
        if kind in (FULL, LAST):
            yield content
            content = b""


def history(records: list[Record]) -> list[dict[str, Any]]:
    """Return the logged values in order."""
    return [_values(record) for record in records if record.HasField("history")]


def _values(record: Record) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for item in record.history.item:
        *parents, last = list(item.nested_key) or [item.key]
        target = values
        for key in parents:
            target = target.setdefault(key, {})
        target[last] = json.loads(item.value_json)
    return values
