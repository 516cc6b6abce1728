"""Problems that validation reports."""

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
"""Kinds of problems, the most serious first. Later kinds can be consequences of earlier kinds."""


@dataclass(frozen=True)
class PlanProblem:
    """An error in a plan.

    Attributes:
        kind: Kind of the problem.
        rank: Rank of the plan.
        position: Index of the action in the program of the rank. -1 if the action is missing.
        action: Action that is wrong or missing. None for specs that belong to no message.
        text: Description of the problem.
        fix: Change that fixes it.
    """

    kind: ProblemKind
    rank: int
    position: int
    action: Action | None
    text: str
    fix: str

    def __str__(self) -> str:
        where = f", action {self.position}" if self.position >= 0 else ""
        named = "" if self.action is None else f" ({self.action})"
        return f"rank {self.rank}{where}{named}: {self.text}; {self.fix}"


@dataclass(frozen=True)
class PlanReport:
    """Result of `validate_plan`.

    Attributes:
        problems: Problems, the most serious first.
    """

    problems: tuple[PlanProblem, ...]

    def raise_for_problems(self) -> None:
        """Raise an error if there are problems.

        Raises:
            PlanError: The plan has problems. The error message lists them.
        """
        if self.problems:
            raise PlanError([str(problem) for problem in self.problems])
