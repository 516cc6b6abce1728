"""Choosing what every task of a rank keeps: the problem, as arrays, and what a choice comes to.

A *stage pair* is a task's forward and backward. It has candidates, each a way to run its layers:
how much longer its backward takes, and what the pair keeps. On one rank the order of actions is
given, so it is known which pairs overlap, and every action is a limit on what may be kept
together. Ranks share neither memory nor costs: each is a problem of its own. PipeWeaver §6.3, whose
memory constraint has no rank and must have one.

The objective is the paper's, the sum of all times. It is not the makespan: a rank that waits
anyway may recompute for nothing, which the sum does not see.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchmm.balance.compiled import Float64s, Int64s


@dataclass(frozen=True, eq=False)
class TuningProblem:
    """One rank. N pairs with C candidates each, T positions: its compute actions in order.

    Pairs are sorted by start, and there from `start` to `end`, both included. Candidates go from
    the fastest to the leanest; pairs with fewer than C repeat their last.

    Attributes:
        start_N: position of the forward.
        middle_N: position of the backward, or of its half for inputs.
        end_N: position where the last of it is let go: `middle_N`, or that of the other half.
        extra_ms_NC: what a candidate adds to the pair's time.
        kept_bytes_NC: kept from `start` to `middle`.
        passing_bytes_NC: more, at `middle` only.
        later_bytes_NC: kept after `middle`, to `end`.
        free_bytes_T: what all pairs together may keep at a position.

    Raises:
        ValueError: shapes or positions do not fit each other, or a candidate takes less time or
            keeps more than the one before it.
    """

    start_N: Int64s
    middle_N: Int64s
    end_N: Int64s
    extra_ms_NC: Float64s
    kept_bytes_NC: Int64s
    passing_bytes_NC: Int64s
    later_bytes_NC: Int64s
    free_bytes_T: Int64s

    def __post_init__(self) -> None:
        shape = self.extra_ms_NC.shape
        tables = (self.kept_bytes_NC, self.passing_bytes_NC, self.later_bytes_NC)
        spans = (self.start_N, self.middle_N, self.end_N)
        if any(t.shape != shape for t in tables) or any(s.shape != shape[:1] for s in spans):
            raise ValueError(f"tables of other shapes than {shape}, or other numbers of positions")
        if not len(self):
            return
        if shape[1] == 0:
            raise ValueError(
                "pairs without candidates; pass at least the candidate that saves all activations"
            )
        rising = (self.start_N <= self.middle_N) & (self.middle_N <= self.end_N)
        sorted_ = (np.diff(self.start_N) >= 0).all() and self.start_N[0] >= 0
        if not rising.all() or not sorted_ or self.end_N.max() >= self.positions:
            raise ValueError(
                "pairs are not sorted by start, or one does not start, turn and end in this order "
                f"within {self.positions} positions"
            )
        if (np.diff(self.extra_ms_NC) < 0).any() or (np.diff(self.kept_bytes_NC) > 0).any():
            raise ValueError("sort candidates by increasing time and decreasing saved bytes")

    def __len__(self) -> int:
        return len(self.start_N)

    @property
    def positions(self) -> int:
        """How many there are."""
        return len(self.free_bytes_T)

    @property
    def fastest_N(self) -> Int64s:
        """The choice of what takes the least time."""
        return np.zeros(len(self), np.int64)

    @property
    def leanest_N(self) -> Int64s:
        """The choice of what keeps the least."""
        return np.full(len(self), self.extra_ms_NC.shape[1] - 1, np.int64)

    def extra_ms(self, choice_N: Int64s) -> float:
        """Time that a choice adds."""
        return float(self.extra_ms_NC[np.arange(len(self)), choice_N].sum())

    def used_bytes_T(self, choice_N: Int64s) -> Int64s:
        """What all pairs keep under a choice, by position."""
        pairs = np.arange(len(self))
        kept_N = self.kept_bytes_NC[pairs, choice_N]
        later_N = self.later_bytes_NC[pairs, choice_N]
        change = np.zeros(self.positions + 1, np.int64)
        np.add.at(change, self.start_N, kept_N)
        np.add.at(change, self.middle_N + 1, later_N - kept_N)
        np.add.at(change, self.end_N + 1, -later_N)
        used_T = np.cumsum(change)[: self.positions]
        np.add.at(used_T, self.middle_N, self.passing_bytes_NC[pairs, choice_N])
        return used_T

    def fits(self, choice_N: Int64s) -> bool:
        """Whether a choice stays within what is free, everywhere."""
        return bool((self.used_bytes_T(choice_N) <= self.free_bytes_T).all())


@dataclass(frozen=True, eq=False)
class TuningSolution:
    """A choice for one rank.

    Attributes:
        choice_N: by pair: its candidate.
        extra_ms: time it adds.
        bound_ms: no choice that fits adds less than this.
    """

    choice_N: Int64s
    extra_ms: float
    bound_ms: float

    @property
    def gap(self) -> float:
        """How much more time it may add than the best one, as a share of its own; 0..1."""
        return (self.extra_ms - self.bound_ms) / self.extra_ms if self.extra_ms > 0 else 0.0
