"""Hands the newest of something to another process; neither side ever waits for the other.

    newest = Handover(directory / "plan")
    newest.put({"numbers": numbers})    one process, as often as it likes
    newest.get()                        the other one: what was put last, as a whole

It is a file of arrays, replaced as a whole. Rejected: a pipe. It takes up about 200 KB; whoever
writes more, as the plan of one large step is, stands still until the other side reads, and who
reads must first read everything that has been outdated. Rejected: shared memory, whose size must be
known before.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]


class Handover:
    """One of its two sides.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._unfinished = path, path.with_name(path.name + ".part")

    def put(self, arrays: Arrays) -> None:
        """Replaces what was put before.

        Raises:
            OSError: the file cannot be written; the directory may be gone.
        """
        named: dict[str, Any] = dict(arrays)
        with self._unfinished.open("wb") as file:
            np.savez(file, **named)
        self._unfinished.replace(self._path)

    def get(self) -> Arrays | None:
        """What was put last; None if nothing was."""
        try:
            with np.load(self._path, allow_pickle=False) as found:
                return dict(found)
        except FileNotFoundError:
            return None
