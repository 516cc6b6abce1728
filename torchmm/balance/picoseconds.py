"""Times in whole picoseconds, in which the simulator and the searches count to agree to the bit."""

from __future__ import annotations

from collections.abc import Sequence

PICOSECONDS_PER_MS = 10**9


LONGEST_MS = 4e9
"""What all operators of a graph may take together: 46 days, half of what 63 bits can count."""


class SimulationError(ValueError):
    """What is to be simulated has impossible costs or dependencies.

    Args:
        problems: every problem found; the message lists the first ones.
    """

    listed = 20

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        count, more = len(self.problems), len(self.problems) - self.listed
        lines = [
            "cannot simulate, 1 problem:" if count == 1 else f"cannot simulate, {count} problems:"
        ]
        lines += [f"  - {problem}" for problem in self.problems[: self.listed]]
        super().__init__("\n".join(lines + ([f"  ... and {more} more"] if more > 0 else [])))


def to_picoseconds(duration_ms: float) -> int:
    """Milliseconds as the whole picoseconds that simulations count in."""
    return round(duration_ms * PICOSECONDS_PER_MS)


def duration_problem(duration_ms: float) -> str:
    """Why a number is no duration; empty if it is one."""
    if 0 <= duration_ms <= LONGEST_MS:
        return ""
    limit = f"0 to {LONGEST_MS:g} ms"
    return f"a duration of {duration_ms} ms; give a number from {limit}"
