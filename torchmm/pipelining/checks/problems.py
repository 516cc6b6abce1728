"""What validation reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchmm.common.errors import PlanError
from torchmm.pipelining.plan.actions import Action

ProblemKind = Literal[
    "specs",
    "unknown",
    "wrong_rank",
    "wrong_peer",
    "missing",
    "duplicate",
    "dependency",
    "collective",
    "channel",
    "deadlock",
    "recompute",
]
"""The most serious first: later kinds may be consequences of earlier ones."""


@dataclass(frozen=True)
class PlanProblem:
    """Something in a plan that must not be.

    Attributes:
        kind: what sort of problem.
        rank: of the plan.
        position: of the action in the rank's program; -1 if it is not there.
        action: that is wrong or missing; None for specs that belong to no message.
        text: what is wrong with it.
        remedy: what to do.
    """

    kind: ProblemKind
    rank: int
    position: int
    action: Action | None
    text: str
    remedy: str

    def __str__(self) -> str:
        where = f", action {self.position}" if self.position >= 0 else ""
        what = "" if self.action is None else f" ({self.action})"
        return f"rank {self.rank}{where}{what}: {self.text}; {self.remedy}"


@dataclass(frozen=True)
class PlanReport:
    """What `validate_plan` found.

    Attributes:
        problems: the most serious first.
    """

    problems: tuple[PlanProblem, ...]

    def raise_for_problems(self) -> None:
        """Does nothing if there are no problems.

        Raises:
            PlanError: it lists them.
        """
        if self.problems:
            raise PlanError([str(problem) for problem in self.problems])
