"""Times in integer picoseconds, with which the simulator and searches agree exactly."""

from __future__ import annotations

from collections.abc import Sequence

from torchmm.common.errors import count_problems, list_problems

PICOSECONDS_PER_MS = 10**9
MAX_DURATION_MS = 4e9
"""Maximum total duration of the operators of a graph: 46 days, half of the 63-bit range."""


class SimulationError(ValueError):
    """Error that lists invalid costs or dependencies of a simulation.

    Args:
        problems: All problems. The message lists the first ones.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__(list_problems(f"cannot simulate, {count_problems(problems)}:", problems))


def to_picoseconds(duration_ms: float) -> int:
    """Convert milliseconds to integer picoseconds."""
    return round(duration_ms * PICOSECONDS_PER_MS)


def duration_problem(duration_ms: float) -> str:
    """Return a message if a number is not a valid duration. Empty if it is valid."""
    if 0 <= duration_ms <= MAX_DURATION_MS:
        return ""
    limit = f"0 to {MAX_DURATION_MS:g} ms"
    return f"a duration of {duration_ms} ms; use a number from {limit}"
