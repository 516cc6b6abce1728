"""Runs a drawn recipe and says whether it is equal to the reference, refused, or neither.

    with Judge() as judge:
        verdict = judge(draw)

The judge is a warm process without threads, which has everything imported; ranks and the reference
are forks of it, so a rank that crashes or hangs costs its recipe and nothing else. A recipe is
refused where reading it, or building its model, raises a `ConfigError`: that is before any process
group; only that a step does not fit into `activation_checkpoint.memory_limit` cannot be known
before its images are. Whatever else goes wrong later is a failure: a wrong number, a crash, a hang,
a late refusal.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from fuzz.draw import Draw

Kind = Literal["equal", "refused", "failed", "read"]


@dataclass(frozen=True)
class Verdict:
    """What became of a draw."""

    kind: Kind
    how: str
    """Of failures: "different", "crash", "hang", "late refusal", "nameless refusal"."""
    problems: list[str] = field(default_factory=list)
    then: str = ""
    """What became of going on in another layout: "equal", "refused", or "" without it."""
    seconds: float = 0.0


class Judge:
    """The warm process.

    Args:
        deadline_s: longest that the ranks of a layout may take.
        spoil: what ranks do wrong on purpose, see `fuzz.ranks.run_rank`.
        only_read: whether recipes that are not refused are left at that ("read"), and none is run.
    """

    def __init__(self, deadline_s: float = 120.0, spoil: str = "", only_read: bool = False) -> None:
        ours, its = get_context().Pipe()
        tests = Path(__file__).parents[1]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONSAFEPATH": "1",  # the tree under test is the one that is found here
            "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(tests)]),
        }
        given = [str(its.fileno()), str(deadline_s), spoil, "only read" if only_read else ""]
        command = [sys.executable, "-m", "fuzz.server", *given]
        self._process = subprocess.Popen(command, env=environment, pass_fds=[its.fileno()])
        its.close()
        self._jobs: Connection = ours

    def __call__(self, draw: Draw) -> Verdict:
        """Runs it."""
        self._jobs.send(asdict(draw))
        return Verdict(**self._jobs.recv())

    def close(self) -> None:
        """Ends the process, after what it is at."""
        self._jobs.close()
        self._process.wait()

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
