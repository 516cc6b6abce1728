"""Fast solver for memory tuning with Lagrangian relaxation, which takes milliseconds per rank.

The integer program of the paper (`benchmarks/support/integer_program.py`, HiGHS) takes 6 to 30 s
per rank for a step with 64 microbatches.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchmm.balance.numba_utils import Float64s, Int64s, cached_njit, internal_njit
from torchmm.balance.pipeweaver.activation_checkpointing.problem import (
    TuningProblem,
    TuningSolution,
)

# Note: Lagrangian relaxation
#
# The solver selects a candidate c for every pair n. It minimizes the sum of extra_NC[n, c], with at
# most free_T[t] bytes of all pairs at every position t. These limits couple the pairs, which makes
# the problem hard. The relaxation replaces each limit by a multiplier, the price per byte:
#
#     bytes  free_T  .............._______............        position t of the schedule
#     pair 0         |===== kept =====|                       start_N .. middle_N
#     pair 1              |======== kept ======|-later-|      middle_N + 1 .. end_N: only if the
#     pair 2                      |=== kept ==|                 backward pass is split
#     multiplier_T        0    0    2    5    5    1    0          high at positions with little
#     memory
#
#     bound(price) = sum over n of min over c of (extra_NC[n, c] + price of the bytes of (n, c))
#                    - sum over t of multiplier_T[t] * free_T[t]
#
# - For constant prices, pairs are independent. Each pair selects the candidate with the minimum of
#   time plus price of its bytes (`_select_candidates`). The bound above is a lower bound on the
#   time of any valid choice, because a valid choice uses at most free_T bytes.
# - Prices increase at positions with too many bytes, and otherwise decrease to at least 0
#   (`_update_multipliers`: subgradient with momentum and Polyak step size).
# - Every `REPAIR_EVERY` rounds, the selected choice is made valid (`_repair_choice`). From the
#   first to the last position, pairs change to candidates with less memory, at the minimum cost per
#   needed byte. Then pairs change to faster candidates that fit into the remaining memory
#   (`_restore_faster_candidates`).
#
# Pairs are intervals, so the relaxed problem is a covering of points by intervals. Its prices are
# good after a few rounds. The remaining gap is mostly due to integrality.
#
# Invariants: `best_N` is always valid. `bound` never decreases. used_T contains the bytes of
# choice_N if both are arguments. prefix_sum_T[t + 1] - prefix_sum_T[s] is the price of a byte from
# position s to t, both included.
# Shapes: N pairs, C candidates from the fastest to the lowest memory, T positions.

ROUNDS = 1000
"""Maximum number of price updates."""
REPAIR_EVERY = 20
"""Number of rounds between repairs of the selected choice."""
PATIENCE = 20
"""Number of rounds without a better bound before the step size is halved."""
MIN_STEP_SIZE = 1 / 64
"""Minimum step size. Smaller steps do not improve the bound, because of integrality."""
MOMENTUM = 0.8
"""Weight of the previous direction. It raises bounds by 1 to 3 %."""


class _Tables(NamedTuple):
    """Arrays of a `TuningProblem`."""

    start_N: Int64s
    middle_N: Int64s
    end_N: Int64s
    extra_NC: Float64s
    kept_NC: Int64s
    transient_NC: Int64s
    later_NC: Int64s
    free_T: Int64s


class _Multipliers(NamedTuple):
    """Memory prices in ms per byte."""

    multiplier_T: Float64s
    prefix_sum_T: Float64s
    """Prefix sums of the prices, with T + 1 elements."""
    direction_T: Float64s
    """Direction of the previous update."""


def solve_lagrangian(problem: TuningProblem, gap: float = 0.045) -> TuningSolution | None:
    """Return a choice and a lower bound, or None if no choice fits into memory.

    Args:
        problem: Problem of one rank.
        gap: Maximum excess time over the optimum, as a fraction. It is slightly below the 5 % of
            the paper, so that all ranks together satisfy 5 % even if a rank with few candidates
            does not.
    """
    if problem.fits(problem.fastest_N):
        extra_ms = problem.extra_ms(problem.fastest_N)
        return TuningSolution(problem.fastest_N, extra_ms, extra_ms)
    if not problem.fits(problem.min_memory_N):
        return None
    choice_N = problem.min_memory_N
    tables = _Tables(
        np.ascontiguousarray(problem.start_N),
        np.ascontiguousarray(problem.middle_N),
        np.ascontiguousarray(problem.end_N),
        problem.extra_ms_NC,
        problem.kept_bytes_NC,
        problem.transient_bytes_NC,
        problem.later_bytes_NC,
        problem.free_bytes_T,
    )
    bound_ms = _solve(tables, gap, choice_N)
    return TuningSolution(choice_N, problem.extra_ms(choice_N), bound_ms)


@internal_njit
def _add_bytes(pair, candidate, sign, tables, used_T):  # type: ignore[no-untyped-def]
    """Add the bytes of a candidate to `used_T`, or subtract them if `sign` is -1."""
    middle = tables.middle_N[pair]
    for position in range(tables.start_N[pair], middle + 1):
        used_T[position] += sign * tables.kept_NC[pair, candidate]
    used_T[middle] += sign * tables.transient_NC[pair, candidate]
    for position in range(middle + 1, tables.end_N[pair] + 1):
        used_T[position] += sign * tables.later_NC[pair, candidate]


@internal_njit
def _saved_bytes(pair, old, new, position, tables):  # type: ignore[no-untyped-def]
    """Return the bytes at a position that candidate `new` saves compared with `old`."""
    if position > tables.middle_N[pair]:
        return tables.later_NC[pair, old] - tables.later_NC[pair, new]
    saved = tables.kept_NC[pair, old] - tables.kept_NC[pair, new]
    if position == tables.middle_N[pair]:
        saved += tables.transient_NC[pair, old] - tables.transient_NC[pair, new]
    return saved


@internal_njit
def _penalized_cost(pair, candidate, tables, multipliers):  # type: ignore[no-untyped-def]
    """Return the extra time of a candidate plus the price of its bytes."""
    middle = tables.middle_N[pair]
    prefix_sum_T = multipliers.prefix_sum_T
    first = prefix_sum_T[middle + 1] - prefix_sum_T[tables.start_N[pair]]
    later = prefix_sum_T[tables.end_N[pair] + 1] - prefix_sum_T[middle + 1]
    return (
        tables.extra_NC[pair, candidate]
        + tables.kept_NC[pair, candidate] * first
        + tables.transient_NC[pair, candidate] * multipliers.multiplier_T[middle]
        + tables.later_NC[pair, candidate] * later
    )


@internal_njit
def _cheapest_change(position, open_pairs, tables, multipliers, choice_N, used_T):  # type: ignore[no-untyped-def]
    """Return the pair and candidate with the minimum cost per byte at a position, or -1, -1.

    Ties are resolved in favor of the pair with the latest end.
    """
    needed = used_T[position] - tables.free_T[position]
    best = np.inf
    best_pair = -1
    best_candidate = -1
    for pair in open_pairs:
        old = choice_N[pair]
        middle = tables.middle_N[pair]
        old_cost = _penalized_cost(pair, old, tables, multipliers)
        for new in range(old + 1, tables.extra_NC.shape[1]):
            saved = _saved_bytes(pair, old, new, position, tables)
            if saved <= 0:
                continue
            if position > middle:  # earlier positions must stay valid
                added = -_saved_bytes(pair, old, new, middle, tables)
                if added > 0 and used_T[middle] + added > tables.free_T[middle]:
                    continue
            rate = (_penalized_cost(pair, new, tables, multipliers) - old_cost) / min(saved, needed)
            equal = best_pair >= 0 and abs(rate - best) <= 1e-12 * abs(best)
            if (rate < best and not equal) or (
                equal and tables.end_N[pair] > tables.end_N[best_pair]
            ):
                best, best_pair, best_candidate = rate, pair, new
    return best_pair, best_candidate


@internal_njit
def _repair_choice(tables, multipliers, choice_N, used_T, open_N):  # type: ignore[no-untyped-def]
    """Make a choice valid in place and return True on success. `open_N` is a scratch buffer."""
    opened, next_pair = 0, 0
    for position in range(len(tables.free_T)):
        still_open = 0
        for index in range(opened):
            if tables.end_N[open_N[index]] >= position:
                open_N[still_open] = open_N[index]
                still_open += 1
        opened = still_open
        while next_pair < len(choice_N) and tables.start_N[next_pair] <= position:
            open_N[opened] = next_pair
            opened += 1
            next_pair += 1
        while used_T[position] > tables.free_T[position]:
            pair, candidate = _cheapest_change(
                position, open_N[:opened], tables, multipliers, choice_N, used_T
            )
            if pair < 0:
                return False
            _add_bytes(pair, choice_N[pair], -1, tables, used_T)
            choice_N[pair] = candidate
            _add_bytes(pair, candidate, 1, tables, used_T)
    return True


@internal_njit
def _restore_faster_candidates(tables, order_N, choice_N, used_T):  # type: ignore[no-untyped-def]
    """Change pairs to faster candidates that fit into the free memory, in the order `order_N`."""
    free_T = tables.free_T
    for pair in order_N:
        old = choice_N[pair]
        middle = tables.middle_N[pair]
        if old == 0:
            continue
        free = later_free = np.int64(1) << 62
        for position in range(tables.start_N[pair], middle):
            free = min(free, free_T[position] - used_T[position])
        for position in range(middle + 1, tables.end_N[pair] + 1):
            later_free = min(later_free, free_T[position] - used_T[position])
        middle_free = free_T[middle] - used_T[middle]
        for new in range(old):
            added = tables.kept_NC[pair, new] - tables.kept_NC[pair, old]
            passing = tables.transient_NC[pair, new] - tables.transient_NC[pair, old]
            later = tables.later_NC[pair, new] - tables.later_NC[pair, old]
            if added <= free and added + passing <= middle_free and later <= later_free:
                _add_bytes(pair, old, -1, tables, used_T)
                choice_N[pair] = new
                _add_bytes(pair, new, 1, tables, used_T)
                break


@internal_njit
def _select_candidates(tables, multipliers, choice_N, used_T):  # type: ignore[no-untyped-def]
    """Select candidates at constant prices, update `used_T`, and return the lower bound."""
    used_T[:] = 0
    bound = 0.0
    for pair in range(len(choice_N)):
        middle = tables.middle_N[pair]
        end = tables.end_N[pair]
        min_cost = np.inf
        picked = 0
        for candidate in range(tables.extra_NC.shape[1]):
            cost = _penalized_cost(pair, candidate, tables, multipliers)
            if cost < min_cost:
                min_cost, picked = cost, candidate
        bound += min_cost
        choice_N[pair] = picked
        used_T[tables.start_N[pair]] += tables.kept_NC[pair, picked]
        used_T[middle + 1] += tables.later_NC[pair, picked] - tables.kept_NC[pair, picked]
        used_T[end + 1] -= tables.later_NC[pair, picked]
    for position in range(len(tables.free_T)):
        used_T[position + 1] += used_T[position]
        bound -= multipliers.multiplier_T[position] * tables.free_T[position]
    for pair in range(len(choice_N)):
        used_T[tables.middle_N[pair]] += tables.transient_NC[pair, choice_N[pair]]
    return bound


@internal_njit
def _update_multipliers(tables, used_T, distance, step_size, multipliers):  # type: ignore[no-untyped-def]
    """Update prices in the direction of the violation plus momentum (Polyak step).

    Args:
        tables: Arrays of the problem.
        used_T: Bytes of the selected candidates.
        distance: Distance between the best choice and the current bound in ms.
        step_size: Step size factor.
        multipliers: Multipliers, updated in place.

    Returns:
        False if there is no direction or no distance.
    """
    multiplier_T, prefix_sum_T, direction_T = multipliers
    size = 0.0
    for position in range(len(multiplier_T)):
        over = MOMENTUM * direction_T[position] + (used_T[position] - tables.free_T[position])
        direction_T[position] = over if over > 0 or multiplier_T[position] > 0 else 0.0
        size += direction_T[position] * direction_T[position]
    if size == 0 or distance <= 0:
        return False
    for position in range(len(multiplier_T)):
        price = multiplier_T[position] + step_size * distance / size * direction_T[position]
        multiplier_T[position] = max(0.0, price)
        prefix_sum_T[position + 1] = prefix_sum_T[position] + multiplier_T[position]
    return True


@cached_njit
def _solve(tables: _Tables, gap: float, best_N: Int64s) -> float:
    """Improve the valid choice `best_N` in place, and return the lower bound on the added time."""
    pairs = len(tables.start_N)
    positions = len(tables.free_T)
    multipliers = _Multipliers(np.zeros(positions), np.zeros(positions + 1), np.zeros(positions))
    choice_N = np.zeros(pairs, np.int64)
    open_N = np.zeros(pairs, np.int64)
    used_T = np.zeros(positions + 1, np.int64)
    gain_N = np.zeros(pairs)
    best = _total_extra_ms(tables, best_N)
    bound = 0.0
    step_size = 1.0
    stalled = 0
    for round_ in range(ROUNDS):
        round_bound = _select_candidates(tables, multipliers, choice_N, used_T)
        stalled = 0 if round_bound > bound else stalled + 1
        bound = max(bound, round_bound)
        if stalled >= PATIENCE:
            step_size, stalled = step_size / 2, 0
        if round_ % REPAIR_EVERY == 0:
            trial_N = choice_N.copy()
            fixed_T = used_T.copy()
            if _repair_choice(tables, multipliers, trial_N, fixed_T, open_N):
                for pair in range(pairs):
                    gain_N[pair] = -tables.extra_NC[pair, trial_N[pair]]
                _restore_faster_candidates(tables, np.argsort(gain_N), trial_N, fixed_T)
                if _total_extra_ms(tables, trial_N) < best:
                    best = _total_extra_ms(tables, trial_N)
                    best_N[:] = trial_N
        near = best - bound <= gap * best
        if (
            near
            or step_size < MIN_STEP_SIZE
            or not _update_multipliers(tables, used_T, best - round_bound, step_size, multipliers)
        ):
            break
    return bound


@internal_njit
def _total_extra_ms(tables, choice_N):  # type: ignore[no-untyped-def]
    """Return the time that a choice adds."""
    total = 0.0
    for pair in range(len(choice_N)):
        total += tables.extra_NC[pair, choice_N[pair]]
    return total
