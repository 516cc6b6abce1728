"""Hands the newest of something to another process; neither side ever waits for the other.

    newest = Handover(directory / "plan")
    newest.put(plan)       one process, as often as it likes
    newest.get()           the other one: what was put last, as a whole; None before the first

It is a file, replaced as a whole. Rejected: a pipe. It takes up about 200 KB; whoever writes more,
as the plan of one large step is, stands still until the other side reads, and who reads must first
read everything that has been outdated. Rejected: shared memory, whose size must be known before.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any


class Handover:
    """One of its two sides.

    Args:
        path: of the file, in a directory that only this user may write to.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._unfinished = path, path.with_name(path.name + ".part")

    def put(self, value: Any) -> None:
        """Replaces what was put before.

        Raises:
            OSError: the file cannot be written; the directory may be gone.
        """
        self._unfinished.write_bytes(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
        self._unfinished.replace(self._path)

    def get(self) -> Any:
        """What was put last; None if nothing was."""
        try:
            return pickle.loads(self._path.read_bytes())
        except FileNotFoundError:
            return None
