"""Selective recomputation as an integer linear program (PipeWeaver §6.3), solved by HiGHS.

The program has one binary variable per (pair, candidate) and selects one candidate per pair. It has
one memory constraint per position that can run out of memory. A constraint is omitted if another
constraint has all its pairs and at most the same free memory. HiGHS in SciPy accepts no initial
solution, so a known solution becomes an upper bound on the objective.
"""

from __future__ import annotations

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from torchmm.balance.numba_utils import Int64s
from torchmm.balance.pipeweaver.activation_checkpointing.problem import (
    TuningProblem,
    TuningSolution,
)


def solve_exactly(
    problem: TuningProblem,
    known: TuningSolution | None = None,
    *,
    gap: float = 0.0,
    time_limit_s: float = 60.0,
) -> TuningSolution | None:
    """Return the fastest solution within `gap`, or None if HiGHS finds none in time.

    Args:
        problem: Problem of one rank.
        known: Solution that fits into memory. The returned solution is not slower.
        gap: Relative gap between the added time and its lower bound at which HiGHS may stop.
        time_limit_s: Time limit of HiGHS in seconds.
    """
    if problem.fits(problem.fastest_N):
        return TuningSolution(problem.fastest_N, problem.extra_ms(problem.fastest_N), 0.0)
    pairs, candidates = problem.extra_ms_NC.shape
    usage, free = _memory_rows(problem)
    single = sparse.kron(sparse.eye(pairs), np.ones((1, candidates)), format="csr")
    cost = problem.extra_ms_NC.ravel()
    constraints = [LinearConstraint(single, 1, 1), LinearConstraint(usage, -np.inf, free)]
    if known is not None:
        constraints.append(LinearConstraint(cost[None], -np.inf, known.extra_ms * (1 + 1e-9)))
    result = milp(
        cost,
        constraints=constraints,
        integrality=np.ones(len(cost)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": gap, "time_limit": time_limit_s},
    )
    if result.x is None:
        return known
    choice_N = result.x.reshape(pairs, candidates).argmax(1)
    if not problem.fits(choice_N):  # within HiGHS' tolerance, but not within memory
        return known
    solution = TuningSolution(choice_N, problem.extra_ms(choice_N), max(0.0, result.mip_dual_bound))
    return known if known is not None and known.extra_ms <= solution.extra_ms else solution


def _memory_rows(problem: TuningProblem) -> tuple[sparse.csr_matrix, np.ndarray]:
    """Return the memory constraints: a matrix and its upper bounds, relative to the largest limit.

    Each matrix row has the bytes of every (pair, candidate) at one position.
    """
    tight = np.flatnonzero(_max_bytes_T(problem) > problem.free_bytes_T)
    scale = float(max(1, np.abs(problem.free_bytes_T[tight]).max(initial=1)))
    rows = []
    for position in tight.tolist():
        first_N = (problem.start_N <= position) & (position <= problem.middle_N)
        later_N = (problem.middle_N < position) & (position <= problem.end_N)
        here_N = problem.middle_N == position
        bytes_NC = (
            first_N[:, None] * problem.kept_bytes_NC
            + later_N[:, None] * problem.later_bytes_NC
            + here_N[:, None] * problem.transient_bytes_NC
        )
        rows.append(sparse.csr_matrix(bytes_NC.ravel()[None] / scale))
    kept = _not_implied(problem, tight)
    matrix = sparse.vstack([rows[i] for i in kept], format="csr")
    return matrix, problem.free_bytes_T[tight[kept]] / scale


def _max_bytes_T(problem: TuningProblem) -> Int64s:
    """Return an upper bound on the used bytes of all solutions at each position."""
    bound = TuningProblem(
        problem.start_N,
        problem.middle_N,
        problem.end_N,
        problem.extra_ms_NC[:, :1],
        problem.kept_bytes_NC[:, :1],
        problem.transient_bytes_NC.max(1, keepdims=True),
        problem.later_bytes_NC.max(1, keepdims=True),
        problem.free_bytes_T,
    )
    return bound.used_bytes_T(bound.fastest_N)


def _not_implied(problem: TuningProblem, tight: Int64s) -> list[int]:
    """Return indices of constraints that the constraint of an adjacent position does not imply.

    An adjacent constraint implies another one if it has at least the same pairs and at most the
    same free memory.
    """
    turns = set(problem.middle_N[(problem.transient_bytes_NC > 0).any(1)].tolist())
    turns |= set((problem.middle_N[problem.end_N > problem.middle_N] + 1).tolist())
    begins = set(problem.start_N.tolist())
    ends = set((problem.end_N + 1).tolist())
    indices = []
    for index, position in enumerate(tight.tolist()):
        free = problem.free_bytes_T[position]
        after, before = position + 1, position - 1
        implied = (
            position not in turns
            and after < problem.positions
            and after not in ends | turns
            and problem.free_bytes_T[after] <= free
        ) or (
            position not in turns
            and before >= 0
            and position not in begins
            and before not in turns
            and problem.free_bytes_T[before] < free  # not both by each other
        )
        if not implied:
            indices.append(index)
    return indices
