"""Memory tuning of one rank as an optimization problem in arrays (PipeWeaver, section 6.3).

A stage pair is the forward and backward pass of a task. Each candidate of a pair has an extra time
and saved bytes. The schedule of the rank is constant, so the pairs that overlap are known, and
every action is a limit on the sum of saved bytes:

    minimize    sum over n of extra_ms_NC[n, c_n]
    subject to  sum over pairs n that overlap t of bytes(n, c_n, t) <= free_bytes_T[t]  for all t

    bytes(n, c, t) = kept     for start <= t <= middle
                     passing  in addition, at t = middle
                     later    for middle < t <= end

    F ================ I - - - - - W         positions t
    start            middle       end

Ranks share neither memory nor costs, so each rank is a separate problem. The memory constraint of
the paper has no rank index, but requires one.

The objective of the paper is the sum of times, not the makespan. A rank that is idle could
recompute without extra time, which the sum does not consider.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchmm.balance.numba_utils import Float64s, Int64s


@dataclass(frozen=True, eq=False)
class TuningProblem:
    """Problem of one rank: N pairs with C candidates each, and T positions (compute actions).

    Pairs are sorted by start, and use memory from `start` to `end`, both included. Candidates are
    sorted from the fastest to the lowest memory. Pairs with fewer candidates repeat the last one.

    Attributes:
        start_N: Position of F.
        middle_N: Position of B or I.
        end_N: Position after which all memory is free: `middle_N`, or the position of W.
        extra_ms_NC: Time that a candidate adds.
        kept_bytes_NC: Bytes saved from `start` to `middle`.
        transient_bytes_NC: Additional bytes at `middle`.
        later_bytes_NC: Bytes saved after `middle` until `end`.
        free_bytes_T: Maximum bytes of all pairs at a position.

    Raises:
        ValueError: Shapes or positions are inconsistent, or candidates are not sorted.
    """

    start_N: Int64s
    middle_N: Int64s
    end_N: Int64s
    extra_ms_NC: Float64s
    kept_bytes_NC: Int64s
    transient_bytes_NC: Int64s
    later_bytes_NC: Int64s
    free_bytes_T: Int64s

    def __post_init__(self) -> None:
        shape = self.extra_ms_NC.shape
        tables = (self.kept_bytes_NC, self.transient_bytes_NC, self.later_bytes_NC)
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
        """Number of positions T."""
        return len(self.free_bytes_T)

    @property
    def fastest_N(self) -> Int64s:
        """Choice of the fastest candidate for each pair."""
        return np.zeros(len(self), np.int64)

    @property
    def min_memory_N(self) -> Int64s:
        """Choice of the candidate with the lowest memory for each pair."""
        return np.full(len(self), self.extra_ms_NC.shape[1] - 1, np.int64)

    def extra_ms(self, choice_N: Int64s) -> float:
        """Return the time that a choice adds."""
        return float(self.extra_ms_NC[np.arange(len(self)), choice_N].sum())

    def used_bytes_T(self, choice_N: Int64s) -> Int64s:
        """Return the bytes that all pairs use with a choice, by position."""
        pairs = np.arange(len(self))
        kept_N = self.kept_bytes_NC[pairs, choice_N]
        later_N = self.later_bytes_NC[pairs, choice_N]
        change = np.zeros(self.positions + 1, np.int64)
        np.add.at(change, self.start_N, kept_N)
        np.add.at(change, self.middle_N + 1, later_N - kept_N)
        np.add.at(change, self.end_N + 1, -later_N)
        used_T = np.cumsum(change)[: self.positions]
        np.add.at(used_T, self.middle_N, self.transient_bytes_NC[pairs, choice_N])
        return used_T

    def fits(self, choice_N: Int64s) -> bool:
        """Return True if a choice is within `free_bytes_T` at all positions."""
        return bool((self.used_bytes_T(choice_N) <= self.free_bytes_T).all())


@dataclass(frozen=True, eq=False)
class TuningSolution:
    """Choice of candidates for one rank.

    Attributes:
        choice_N: Index of the candidate of each pair.
        extra_ms: Time that the choice adds.
        bound_ms: Lower bound on the time that any valid choice adds.
    """

    choice_N: Int64s
    extra_ms: float
    bound_ms: float

    @property
    def gap(self) -> float:
        """Upper bound on the excess time over the optimum, as a fraction of `extra_ms`, 0 to 1."""
        return (self.extra_ms - self.bound_ms) / self.extra_ms if self.extra_ms > 0 else 0.0
