"""Times in whole picoseconds, in which the simulator and the searches count to agree to the bit."""

from __future__ import annotations

from collections.abc import Sequence

from torchmm.common.errors import count_problems, list_problems

PICOSECONDS_PER_MS = 10**9
LONGEST_MS = 4e9
"""What all operators of a graph may take together: 46 days, half of what 63 bits can count."""


class SimulationError(ValueError):
    """What is to be simulated has impossible costs or dependencies.

    Args:
        problems: every problem found; the message lists the first ones.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__(list_problems(f"cannot simulate, {count_problems(problems)}:", problems))


def to_picoseconds(duration_ms: float) -> int:
    """Milliseconds as the whole picoseconds that simulations count in."""
    return round(duration_ms * PICOSECONDS_PER_MS)


def duration_problem(duration_ms: float) -> str:
    """Why a number is no duration; empty if it is one."""
    if 0 <= duration_ms <= LONGEST_MS:
        return ""
    limit = f"0 to {LONGEST_MS:g} ms"
    return f"a duration of {duration_ms} ms; use a number from {limit}"
