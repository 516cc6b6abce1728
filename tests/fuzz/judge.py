"""Run a random recipe and return whether it equals the reference, is rejected, or fails.

    with Judge() as judge:
        verdict = judge(draw)

The judge is a preloaded process without threads. Ranks and the reference are forks of it, so that a
rank that crashes or hangs does not affect other recipes. A recipe is rejected if reading the recipe
or building its model raises a `ConfigError`, before any process group is created. One error is only
detected later: a step that exceeds `activation_checkpoint.memory_limit`, because it depends on the
images. All other errors are failures: a wrong value, a crash, a hang, or a late rejection.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Literal

from train_server import shared_server

from fuzz.draw import Draw

Kind = Literal["equal", "rejected", "failed", "read"]


@dataclass(frozen=True)
class Verdict:
    """Result of a draw."""

    kind: Kind
    how: str
    """Kind of failure: "different", "crash", "hang", "late rejection", "error without key"."""
    problems: list[str] = field(default_factory=list)
    then: str = ""
    """Result of resuming in another layout: "equal", "rejected", or "" without it."""
    seconds: float = 0.0


class Judge:
    """Preloaded process that judges draws.

    Args:
        deadline_s: Time limit of the ranks of a layout.
        defect: Defect that ranks inject, see `fuzz.ranks.run_rank`.
        only_read: Whether valid recipes get the verdict "read" and are not run.
    """

    def __init__(
        self, deadline_s: float = 120.0, defect: str = "", only_read: bool = False
    ) -> None:
        self._jobs = shared_server().call("fuzz.server:serve", deadline_s, defect, only_read)

    def __call__(self, draw: Draw) -> Verdict:
        """Run a draw and return its verdict."""
        self._jobs.send(asdict(draw))
        return Verdict(**self._jobs.recv())

    def close(self) -> None:
        """Stop the process after the current draw."""
        with self._jobs, suppress(EOFError, OSError):  # if the process has died
            self._jobs.send(None)
            self._jobs.recv()  # until the process has deleted its files

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
