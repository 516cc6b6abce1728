"""JSON files that may be damaged, because they come from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file that may be damaged.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not a regular file, not UTF-8, not JSON, or not an object; the
            message starts with the path.
        OSError: The file cannot be read.
    """
    if path.exists() and not path.is_file():  # reading a named pipe would block
        raise ValueError(f"{path} is not a regular file")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path} is not valid JSON ({' '.join(str(error).split())})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} has a JSON {type(found).__name__} instead of an object")
    return found


def json_problems(directory: Path, names: Iterable[str]) -> list[str]:
    """Return a message for each existing file of a directory that is not a JSON object."""
    problems = []
    for name in names:
        try:
            read_json_object(directory / name)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            problems.append(str(error))
    return problems
