"""Ends a rank whose device waits for a peer that is gone.

gloo raises an error where a peer is lost. NCCL does not: its kernel waits on the device, the host
for the device, and no Python of the main thread runs any more, no signal handler either, until
NCCL's own watchdog aborts the process or the launcher kills it. Then nobody has said why, and
STATUS.json still says "running". With gloo the same happens in saves, where ranks wait for half an
hour, as the slowest disk may take that long. So the thread that writes the heartbeat looks after
three things:

- Is the next rank silent? Every rank watches one other, by when its heartbeat last changed as seen
  from here, so clocks need not agree and nobody reads thousands of files.
- Has any rank left word that one is lost? Who notices writes it down for all.
- Has the device not come to the end of the step for as long as a rank waits for another?

Rejected: shorter time limits of NCCL, which abort without a word as well; heartbeats of all ranks
read by all (a million reads every two seconds on a thousand ranks).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torchmm.common.errors import PeerError
from torchmm.common.files import canonical_json, replace_atomically

SILENT_S = 30.0
"""A rank that has written no heartbeat for so long is taken for lost: file systems have pauses."""
GRACE_S = 10.0
"""A rank is left so long in what it is doing after a peer is lost: it may fail by itself, and then
says more."""
WORD = "lost.json"
FINISHED = "finished"
"""Phase of a rank that writes no more heartbeats, and is not missed."""


class PeerWatch:
    """What one rank looks after.

    Args:
        directory: of the heartbeats.
        rank: this one.
        size: of all ranks.
        timeout_s: how long a rank waits for another.
        heartbeat: file of a rank's heartbeat.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        size: int,
        timeout_s: float,
        heartbeat: Callable[[int], Path],
        silent_s: float = SILENT_S,
        grace_s: float = GRACE_S,
    ) -> None:
        self._word = directory / WORD
        self._timeout_s = timeout_s
        self._silent_s = silent_s
        self._grace_s = grace_s
        self._rank = rank
        self._next = (rank + 1) % size
        self._file = heartbeat(self._next) if size > 1 else None
        self._seen: bytes | None = None
        self._seen_at = time.monotonic()

    @staticmethod
    def forget(directory: Path) -> None:
        """Removes the word of an earlier start; one rank calls it before all others watch."""
        (directory / WORD).unlink(missing_ok=True)

    def look(self, step: int, phase: str, phase_s: float, of_device: bool) -> PeerError | None:
        """Why this rank has to end now, or None.

        Args:
            phase: what this rank is doing, since `phase_s` seconds.
            of_device: whether that is waiting for its device.
        """
        word: str | None = None
        with suppress(FileNotFoundError):  # no other rank has left word
            word = str(json.loads(self._word.read_bytes())["word"])
        if word is None and self._is_silent():
            who = f"rank {self._next}"
            if self._seen is not None:
                beat = json.loads(self._seen)
                who += f" (process {beat['process']} on {beat['host']})"
            word = f"{who} has not responded for more than {self._silent_s:.0f} s"
            replace_atomically(self._word, canonical_json({"by": self._rank, "word": word}))
        if word is None and of_device and phase_s >= self._timeout_s:
            word = (
                f"the device has not finished the step for {phase_s:.0f} s: a peer hangs, or "
                "parallel.timeout_s is too short"
            )
        if word is None or phase_s < min(self._grace_s, self._timeout_s):
            return None
        return PeerError(f"rank {self._rank} lost a peer at step {step} in {phase}: {word}")

    def _is_silent(self) -> bool:
        if self._file is None:
            return False
        try:
            beat = self._file.read_bytes()
        except FileNotFoundError:
            beat = None
        if beat != self._seen:
            self._seen = beat
            self._seen_at = time.monotonic()
        silent = time.monotonic() - self._seen_at > self._silent_s
        return silent and (beat is None or json.loads(beat)["phase"] != FINISHED)
