"""Watchdog that stops a rank whose device waits for a lost peer.

gloo raises an error if a peer is lost. NCCL does not. Its kernel waits on the device, the host
waits for the device, and neither Python code nor signal handlers run in the main thread. Finally
the NCCL watchdog aborts the process, or the launcher kills it. No log has the reason, and
STATUS.json still has the state "running". With gloo, the same happens while a checkpoint is saved,
because ranks wait up to half an hour for the slowest disk. The heartbeat thread therefore checks
three conditions:

- Is the next rank silent? Each rank watches one other rank. It uses the local time at which the
  heartbeat last changed, so clocks need not be synchronized, and no rank reads all files.
- Has any rank reported a lost rank? The first rank that detects one writes it to a file for all.
- Has the device not finished the step within the timeout for peers?

Shorter NCCL timeouts would abort without a reason, too. Reading all heartbeats on all ranks would
be a million file reads every two seconds for a thousand ranks.
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
"""Time without a new heartbeat after which a rank is lost. File systems can have pauses."""
GRACE_S = 10.0
"""Time that a rank has to fail by itself after a peer is lost. Its own error has more details."""
REPORT_FILE = "lost.json"
FINISHED = "finished"
"""Phase of a rank that has finished. It writes no heartbeats and is not considered lost."""


class PeerWatchdog:
    """Checks of one rank.

    Args:
        directory: Directory of the heartbeats.
        rank: Rank of this process.
        size: Number of ranks.
        timeout_s: Maximum time that a rank waits for a peer, in seconds.
        heartbeat: Returns the heartbeat file of a rank.
        silent_s: See `SILENT_S`.
        grace_s: See `GRACE_S`.
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
        self._report_file = directory / REPORT_FILE
        self._timeout_s = timeout_s
        self._silent_s = silent_s
        self._grace_s = grace_s
        self._rank = rank
        self._next = (rank + 1) % size
        self._file = heartbeat(self._next) if size > 1 else None
        self._seen: bytes | None = None
        self._seen_at = time.monotonic()

    @staticmethod
    def clear_report(directory: Path) -> None:
        """Remove the report of an earlier start. One rank calls it before any rank watches."""
        (directory / REPORT_FILE).unlink(missing_ok=True)

    def check(
        self, step: int, phase: str, phase_s: float, waits_for_device: bool
    ) -> PeerError | None:
        """Return the error with which this rank must exit, or None.

        Args:
            step: Number of the current step.
            phase: Current phase of this rank.
            phase_s: Time since the start of the phase, in seconds.
            waits_for_device: Whether the phase is waiting for the device.
        """
        report: str | None = None
        with suppress(FileNotFoundError):  # no rank has reported a lost rank
            report = str(json.loads(self._report_file.read_bytes())["word"])
        if report is None and self._is_silent():
            lost_rank = f"rank {self._next}"
            if self._seen is not None:
                beat = json.loads(self._seen)
                lost_rank += f" (process {beat['process']} on {beat['host']})"
            report = f"{lost_rank} has not responded for more than {self._silent_s:.0f} s"
            replace_atomically(
                self._report_file, canonical_json({"by": self._rank, "word": report})
            )
        if report is None and waits_for_device and phase_s >= self._timeout_s:
            report = (
                f"the device has not finished the step for {phase_s:.0f} s: a peer hangs, or "
                "parallel.timeout_s is too short"
            )
        if report is None or phase_s < min(self._grace_s, self._timeout_s):
            return None
        return PeerError(f"rank {self._rank} lost a peer at step {step} in {phase}: {report}")

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
