"""Parse values of records that may be JSON text, without trusting them.

JSON text must have unique keys, finite numbers and a limited depth.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from torchmm.data.corrupt import CorruptSampleError

MAX_DEPTH = 64
"""Maximum nesting depth of messages, arguments and tools."""


def parse_json(value: Any, what: str) -> Any:
    """Return a value that may be JSON text. Keys with None are dropped from other values.

    Args:
        value: JSON text, or a value of objects, lists and scalars.
        what: Name of the value in error messages.

    Raises:
        CorruptSampleError: The value is not valid JSON, or is nested too deeply.
    """
    if not isinstance(value, str):
        return _drop_none(value, what, MAX_DEPTH)
    try:
        made = json.loads(value, object_pairs_hook=_unique_keys, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptSampleError(f"{what}: {value[:80]!r} is not valid JSON: {error}") from error
    _check_depth(made, what, MAX_DEPTH)
    return made


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a key appears twice")
    return table


def _reject_constant(text: str) -> None:
    raise ValueError(f"{text} is not a valid JSON number")


def _drop_none(value: Any, what: str, depth: int) -> Any:
    if depth == 0:
        raise CorruptSampleError(f"{what} is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, Mapping):
        items = value.items()
        return {str(k): _drop_none(v, what, depth - 1) for k, v in items if v is not None}
    if isinstance(value, list | tuple):
        return [_drop_none(item, what, depth - 1) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise CorruptSampleError(f"{what} contains {value}, which is not a valid JSON number")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise CorruptSampleError(
        f"{what} contains a value of type {type(value).__name__}, which JSON does not support"
    )


def _check_depth(value: Any, what: str, depth: int) -> None:
    if depth == 0:
        raise CorruptSampleError(f"{what} is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _check_depth(item, what, depth - 1)
