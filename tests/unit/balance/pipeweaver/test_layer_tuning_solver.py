"""Tests of layer tuning of one rank: both solvers against exhaustive search, bounds, limits."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from support.integer_program import solve_exactly

from torchmm.balance.pipeweaver.activation_checkpointing.lagrangian import solve_lagrangian
from torchmm.balance.pipeweaver.activation_checkpointing.problem import TuningProblem


def random_problem(seed: int, pairs: int, candidates: int, room: float, split: bool = False):
    """Return a problem of randomly overlapping pairs. With `room` 1, none needs recomputation."""
    rng = np.random.default_rng(seed)
    positions = 2 * pairs + (pairs if split else 0)
    spans = np.sort(
        np.stack([rng.choice(positions, 3, replace=False) for _ in range(pairs)]), axis=1
    )
    start_N, middle_N, end_N = spans[np.argsort(spans[:, 0])].T.astype(np.int64)
    if not split:
        end_N = middle_N.copy()
    shape = pairs, candidates
    extra_NC = np.cumsum(rng.integers(0, 9, shape), 1).astype(float)
    kept_NC = np.sort(rng.integers(5, 100, shape), 1)[:, ::-1].astype(np.int64)
    transient_NC = np.zeros(shape, np.int64)
    transient_NC[:, -1] = kept_NC[:, -2] - kept_NC[:, -1] if candidates > 1 else 0
    later_NC = np.zeros(shape, np.int64)
    if split:
        later_NC[:, 0] = kept_NC[:, 0] * 3 // 2
        transient_NC[:, 0] = later_NC[:, 0] - kept_NC[:, 0]
    zeros_T = np.zeros(positions, np.int64)
    problem = TuningProblem(
        start_N, middle_N, end_N, extra_NC, kept_NC, transient_NC, later_NC, zeros_T
    )
    max_T, min_T = (problem.used_bytes_T(c) for c in (problem.fastest_N, problem.min_memory_N))
    peak = round(min_T.max() + room * (max_T.max() - min_T.max()))
    wobble_T = rng.integers(0, 10, positions)
    return replace(problem, free_bytes_T=np.maximum(peak + wobble_T, min_T))


def best_by_exhaustive_search(problem: TuningProblem) -> float:
    candidates = range(problem.extra_ms_NC.shape[1])
    best_ms = float("inf")
    for choice in product(candidates, repeat=len(problem)):
        choice_N = np.array(choice)
        if problem.extra_ms(choice_N) < best_ms and problem.fits(choice_N):
            best_ms = problem.extra_ms(choice_N)
    return best_ms


def naive_usage(problem: TuningProblem, choice_N: np.ndarray) -> list[int]:
    used = [0] * problem.positions
    for pair, chosen in enumerate(choice_N):
        for t in range(problem.start_N[pair], problem.middle_N[pair] + 1):
            used[t] += problem.kept_bytes_NC[pair, chosen]
        used[problem.middle_N[pair]] += problem.transient_bytes_NC[pair, chosen]
        for t in range(problem.middle_N[pair] + 1, problem.end_N[pair] + 1):
            used[t] += problem.later_bytes_NC[pair, chosen]
    return used


@pytest.mark.parametrize("split", [False, True])
def test_usage_matches_naive_sum(split):
    for seed in range(20):
        problem = random_problem(seed, 9, 4, 0.5, split)
        choice_N = np.random.default_rng(seed).integers(0, 4, 9)
        assert problem.used_bytes_T(choice_N).tolist() == naive_usage(problem, choice_N)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("room", [0.0, 0.2, 0.5, 0.8])
def test_small_problems_match_exhaustive_search(room, split):
    quick_ms, best_ms = 0.0, 0.0
    for seed in range(12):
        problem = random_problem(seed, 6, 3, room, split)
        expected_ms = best_by_exhaustive_search(problem)
        exact = solve_exactly(problem)
        assert exact is not None and problem.fits(exact.choice_N)
        assert exact.extra_ms == pytest.approx(expected_ms)
        quick = solve_lagrangian(problem, gap=0.0)
        assert quick is not None and problem.fits(quick.choice_N)
        assert quick.bound_ms <= expected_ms + 1e-6 <= quick.extra_ms + 2e-6
        assert quick.extra_ms == pytest.approx(problem.extra_ms(quick.choice_N))
        warm_started = solve_exactly(problem, quick, gap=0.05)
        assert warm_started is not None and warm_started.extra_ms <= min(
            quick.extra_ms, expected_ms * 1.05 + 1e-6
        )
        quick_ms, best_ms = quick_ms + quick.extra_ms, best_ms + expected_ms
    assert quick_ms <= 1.12 * best_ms, "the quick solver is too far from the optimum"


def test_large_problems_are_near_the_bound():
    for seed in range(3):
        problem = random_problem(seed, 300, 8, 0.4)
        solution = solve_lagrangian(problem)
        assert solution is not None and problem.fits(solution.choice_N)
        assert solution.gap <= 0.05
        fewer = solve_lagrangian(problem, gap=1.0)
        assert fewer is not None and problem.fits(fewer.choice_N)


def test_more_memory_is_never_slower():
    problem = random_problem(3, 8, 3, 0.0)
    times = []
    for more in (0, 20, 40, 80, 160, 320, 1000):
        larger = replace(problem, free_bytes_T=problem.free_bytes_T + more)
        exact = solve_exactly(larger)
        assert exact is not None
        times.append(exact.extra_ms)
    assert times == sorted(times, reverse=True) and times[0] > times[-1]
    unlimited = solve_lagrangian(replace(problem, free_bytes_T=problem.free_bytes_T + 10**6))
    assert unlimited is not None and not unlimited.choice_N.any() and unlimited.gap == 0


def test_unsatisfiable_problems_have_no_solution():
    problem = random_problem(1, 6, 3, 0.0)
    short = problem.used_bytes_T(problem.min_memory_N) - (np.arange(problem.positions) == 4)
    impossible = replace(problem, free_bytes_T=np.minimum(problem.free_bytes_T, short))
    assert solve_lagrangian(impossible) is None and solve_exactly(impossible) is None


def test_invalid_problem_arrays_are_rejected():
    problem = random_problem(1, 6, 3, 0.5)
    with pytest.raises(ValueError, match="sort candidates by increasing time"):
        replace(problem, kept_bytes_NC=problem.kept_bytes_NC[:, ::-1])
    with pytest.raises(ValueError, match="sorted by start"):
        replace(problem, start_N=problem.middle_N + 1)
    with pytest.raises(ValueError, match="other shapes"):
        replace(problem, later_bytes_NC=problem.later_bytes_NC[:, :2])
