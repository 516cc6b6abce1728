"""Layer tuning as PipeWeaver §6.3 has it: an integer linear program, solved by HiGHS.

One binary variable per pair and candidate, one candidate per pair, one row per position that can
run out of memory. A row is left out where another one has all its pairs and no more room. HiGHS,
as SciPy offers it, takes no starting solution; a known one becomes a bound on the objective.
"""

from __future__ import annotations

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from torchmm.balance.compiled import Int64s
from torchmm.balance.pipeweaver.recomputation.problem import TuningProblem, TuningSolution


def solve_exactly(
    problem: TuningProblem,
    known: TuningSolution | None = None,
    *,
    gap: float = 0.0,
    time_limit_s: float = 60.0,
) -> TuningSolution | None:
    """The best choice within `gap`; None if there is none, or none was found in time.

    Args:
        problem: of one rank.
        known: a choice that fits; what is returned is not slower.
        gap: may stop when the choice adds at most this share more time than the best one.
        time_limit_s: may stop when this has passed.
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
    found = TuningSolution(choice_N, problem.extra_ms(choice_N), max(0.0, result.mip_dual_bound))
    return known if known is not None and known.extra_ms <= found.extra_ms else found


def _memory_rows(problem: TuningProblem) -> tuple[sparse.csr_matrix, np.ndarray]:
    """Bytes of every pair and candidate at positions that matter, in units of the largest limit."""
    tight = np.flatnonzero(_most_bytes_T(problem) > problem.free_bytes_T)
    scale = float(max(1, np.abs(problem.free_bytes_T[tight]).max(initial=1)))
    rows = []
    for position in tight.tolist():
        first_N = (problem.start_N <= position) & (position <= problem.middle_N)
        later_N = (problem.middle_N < position) & (position <= problem.end_N)
        here_N = problem.middle_N == position
        own_NC = (
            first_N[:, None] * problem.kept_bytes_NC
            + later_N[:, None] * problem.later_bytes_NC
            + here_N[:, None] * problem.passing_bytes_NC
        )
        rows.append(sparse.csr_matrix(own_NC.ravel()[None] / scale))
    kept = _not_implied(problem, tight)
    matrix = sparse.vstack([rows[i] for i in kept], format="csr")
    return matrix, problem.free_bytes_T[tight[kept]] / scale


def _most_bytes_T(problem: TuningProblem) -> Int64s:
    """At least what any choice keeps, by position."""
    most = TuningProblem(
        problem.start_N,
        problem.middle_N,
        problem.end_N,
        problem.extra_ms_NC[:, :1],
        problem.kept_bytes_NC[:, :1],
        problem.passing_bytes_NC.max(1, keepdims=True),
        problem.later_bytes_NC.max(1, keepdims=True),
        problem.free_bytes_T,
    )
    return most.used_bytes_T(most.fastest_N)


def _not_implied(problem: TuningProblem, tight: Int64s) -> list[int]:
    """Rows that do not follow from the next or the one before: the same pairs, or fewer of them."""
    turns = set(problem.middle_N[(problem.passing_bytes_NC > 0).any(1)].tolist())
    turns |= set((problem.middle_N[problem.end_N > problem.middle_N] + 1).tolist())
    begins = set(problem.start_N.tolist())
    ends = set((problem.end_N + 1).tolist())
    found = []
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
            found.append(index)
    return found
