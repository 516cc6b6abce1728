"""Fast solver for memory tuning with Lagrangian relaxation, which takes milliseconds per rank.

The integer program of the paper (`benchmarks/support/integer_program.py`, HiGHS) takes 6 to 30 s
per rank for a step with 64 microbatches.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchmm.balance.compiled import Float64s, Int64s, compiled, inner
from torchmm.balance.pipeweaver.recomputation.problem import TuningProblem, TuningSolution

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
#     price_T        0    0    2    5    5    1    0          high at positions with little memory
#
#     bound(price) = sum over n of min over c of (extra_NC[n, c] + price of the bytes of (n, c))
#                    - sum over t of price_T[t] * free_T[t]
#
# - For constant prices, pairs are independent. Each pair selects the candidate with the minimum of
#   time plus price of its bytes (`_answer`). The bound above is a lower bound on the time of any
#   valid choice, because a valid choice uses at most free_T bytes.
# - Prices increase at positions with too many bytes, and otherwise decrease to at least 0
#   (`_change_prices`: subgradient with momentum and Polyak step size).
# - Every `REPAIR_EVERY` rounds, the selected choice is made valid (`_repair`). From the first to
#   the last position, pairs change to candidates with less memory, at the minimum cost per needed
#   byte. Then pairs change to faster candidates that fit into the remaining memory (`_relax`).
#
# Pairs are intervals, so the relaxed problem is a covering of points by intervals. Its prices are
# good after a few rounds. The remaining gap is mostly due to integrality.
#
# Invariants: `best_N` is always valid. `bound` never decreases. used_T contains the bytes of
# choice_N if both are arguments. worth_T[t + 1] - worth_T[s] is the price of a byte from position s
# to t, both included.
# Shapes: N pairs, C candidates from the fastest to the lowest memory, T positions.

ROUNDS = 1000
"""Maximum number of price updates."""
REPAIR_EVERY = 20
"""Number of rounds between repairs of the selected choice."""
PATIENCE = 20
"""Number of rounds without a better bound before the step size is halved."""
SHORTEST = 1 / 64
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
    passing_NC: Int64s
    later_NC: Int64s
    free_T: Int64s


class _Prices(NamedTuple):
    """Memory prices in ms per byte."""

    price_T: Float64s
    worth_T: Float64s
    """Prefix sums of the prices, with T + 1 elements."""
    way_T: Float64s
    """Direction of the previous update."""


def solve_quickly(problem: TuningProblem, gap: float = 0.045) -> TuningSolution | None:
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
    if not problem.fits(problem.leanest_N):
        return None
    choice_N = problem.leanest_N
    tables = _Tables(
        problem.start_N,
        problem.middle_N,
        problem.end_N,
        problem.extra_ms_NC,
        problem.kept_bytes_NC,
        problem.passing_bytes_NC,
        problem.later_bytes_NC,
        problem.free_bytes_T,
    )
    bound_ms = _search(tables, gap, choice_N)
    return TuningSolution(choice_N, problem.extra_ms(choice_N), bound_ms)


@inner
def _use(pair, candidate, sign, tables, used_T):  # type: ignore[no-untyped-def]
    """Add the bytes of a candidate to `used_T`, or subtract them if `sign` is -1."""
    middle = tables.middle_N[pair]
    for position in range(tables.start_N[pair], middle + 1):
        used_T[position] += sign * tables.kept_NC[pair, candidate]
    used_T[middle] += sign * tables.passing_NC[pair, candidate]
    for position in range(middle + 1, tables.end_N[pair] + 1):
        used_T[position] += sign * tables.later_NC[pair, candidate]


@inner
def _relieves(pair, old, new, position, tables):  # type: ignore[no-untyped-def]
    """Return the bytes at a position that candidate `new` saves compared with `old`."""
    if position > tables.middle_N[pair]:
        return tables.later_NC[pair, old] - tables.later_NC[pair, new]
    less = tables.kept_NC[pair, old] - tables.kept_NC[pair, new]
    if position == tables.middle_N[pair]:
        less += tables.passing_NC[pair, old] - tables.passing_NC[pair, new]
    return less


@inner
def _cost(pair, candidate, tables, prices):  # type: ignore[no-untyped-def]
    """Return the extra time of a candidate plus the price of its bytes."""
    middle = tables.middle_N[pair]
    worth_T = prices.worth_T
    first = worth_T[middle + 1] - worth_T[tables.start_N[pair]]
    later = worth_T[tables.end_N[pair] + 1] - worth_T[middle + 1]
    return (
        tables.extra_NC[pair, candidate]
        + tables.kept_NC[pair, candidate] * first
        + tables.passing_NC[pair, candidate] * prices.price_T[middle]
        + tables.later_NC[pair, candidate] * later
    )


@inner
def _cheapest(position, open_pairs, tables, prices, choice_N, used_T):  # type: ignore[no-untyped-def]
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
        paid = _cost(pair, old, tables, prices)
        for new in range(old + 1, tables.extra_NC.shape[1]):
            less = _relieves(pair, old, new, position, tables)
            if less <= 0:
                continue
            if position > middle:  # earlier positions must stay valid
                more = -_relieves(pair, old, new, middle, tables)
                if more > 0 and used_T[middle] + more > tables.free_T[middle]:
                    continue
            rate = (_cost(pair, new, tables, prices) - paid) / min(less, needed)
            equal = best_pair >= 0 and abs(rate - best) <= 1e-12 * abs(best)
            if (rate < best and not equal) or (
                equal and tables.end_N[pair] > tables.end_N[best_pair]
            ):
                best, best_pair, best_candidate = rate, pair, new
    return best_pair, best_candidate


@inner
def _repair(tables, prices, choice_N, used_T, open_N):  # type: ignore[no-untyped-def]
    """Make a choice valid in place and return True on success. `open_N` is a scratch buffer."""
    opened, next_pair = 0, 0
    for position in range(len(tables.free_T)):
        still = 0
        for index in range(opened):
            if tables.end_N[open_N[index]] >= position:
                open_N[still] = open_N[index]
                still += 1
        opened = still
        while next_pair < len(choice_N) and tables.start_N[next_pair] <= position:
            open_N[opened] = next_pair
            opened += 1
            next_pair += 1
        while used_T[position] > tables.free_T[position]:
            pair, candidate = _cheapest(position, open_N[:opened], tables, prices, choice_N, used_T)
            if pair < 0:
                return False
            _use(pair, choice_N[pair], -1, tables, used_T)
            choice_N[pair] = candidate
            _use(pair, candidate, 1, tables, used_T)
    return True


@inner
def _relax(tables, order_N, choice_N, used_T):  # type: ignore[no-untyped-def]
    """Change pairs to faster candidates that fit into the free memory, in the order `order_N`."""
    free_T = tables.free_T
    for pair in order_N:
        old = choice_N[pair]
        middle = tables.middle_N[pair]
        if old == 0:
            continue
        room = later_room = np.int64(1) << 62
        for position in range(tables.start_N[pair], middle):
            room = min(room, free_T[position] - used_T[position])
        for position in range(middle + 1, tables.end_N[pair] + 1):
            later_room = min(later_room, free_T[position] - used_T[position])
        middle_room = free_T[middle] - used_T[middle]
        for new in range(old):
            more = tables.kept_NC[pair, new] - tables.kept_NC[pair, old]
            passing = tables.passing_NC[pair, new] - tables.passing_NC[pair, old]
            later = tables.later_NC[pair, new] - tables.later_NC[pair, old]
            if more <= room and more + passing <= middle_room and later <= later_room:
                _use(pair, old, -1, tables, used_T)
                choice_N[pair] = new
                _use(pair, new, 1, tables, used_T)
                break


@inner
def _answer(tables, prices, choice_N, used_T):  # type: ignore[no-untyped-def]
    """Select candidates at constant prices, update `used_T`, and return the lower bound."""
    used_T[:] = 0
    bound = 0.0
    for pair in range(len(choice_N)):
        middle = tables.middle_N[pair]
        end = tables.end_N[pair]
        least = np.inf
        picked = 0
        for candidate in range(tables.extra_NC.shape[1]):
            cost = _cost(pair, candidate, tables, prices)
            if cost < least:
                least, picked = cost, candidate
        bound += least
        choice_N[pair] = picked
        used_T[tables.start_N[pair]] += tables.kept_NC[pair, picked]
        used_T[middle + 1] += tables.later_NC[pair, picked] - tables.kept_NC[pair, picked]
        used_T[end + 1] -= tables.later_NC[pair, picked]
    for position in range(len(tables.free_T)):
        used_T[position + 1] += used_T[position]
        bound -= prices.price_T[position] * tables.free_T[position]
    for pair in range(len(choice_N)):
        used_T[tables.middle_N[pair]] += tables.passing_NC[pair, choice_N[pair]]
    return bound


@inner
def _change_prices(tables, used_T, aim, pace, prices):  # type: ignore[no-untyped-def]
    """Update prices in the direction of the violation plus momentum (Polyak step).

    Args:
        tables: Arrays of the problem.
        used_T: Bytes of the selected candidates.
        aim: Distance between the best choice and the current bound in ms.
        pace: Step size factor.
        prices: Prices, updated in place.

    Returns:
        False if there is no direction or no distance.
    """
    price_T, worth_T, way_T = prices
    size = 0.0
    for position in range(len(price_T)):
        over = MOMENTUM * way_T[position] + (used_T[position] - tables.free_T[position])
        way_T[position] = over if over > 0 or price_T[position] > 0 else 0.0
        size += way_T[position] * way_T[position]
    if size == 0 or aim <= 0:
        return False
    for position in range(len(price_T)):
        price = price_T[position] + pace * aim / size * way_T[position]
        price_T[position] = max(0.0, price)
        worth_T[position + 1] = worth_T[position] + price_T[position]
    return True


@compiled
def _search(tables: _Tables, gap: float, best_N: Int64s) -> float:
    """Improve the valid choice `best_N` in place, and return the lower bound on the added time."""
    pairs = len(tables.start_N)
    positions = len(tables.free_T)
    prices = _Prices(np.zeros(positions), np.zeros(positions + 1), np.zeros(positions))
    choice_N = np.zeros(pairs, np.int64)
    open_N = np.zeros(pairs, np.int64)
    used_T = np.zeros(positions + 1, np.int64)
    gain_N = np.zeros(pairs)
    best = _extra(tables, best_N)
    bound = 0.0
    pace = 1.0
    stalled = 0
    for round_ in range(ROUNDS):
        found = _answer(tables, prices, choice_N, used_T)
        stalled = 0 if found > bound else stalled + 1
        bound = max(bound, found)
        if stalled >= PATIENCE:
            pace, stalled = pace / 2, 0
        if round_ % REPAIR_EVERY == 0:
            trial_N = choice_N.copy()
            fixed_T = used_T.copy()
            if _repair(tables, prices, trial_N, fixed_T, open_N):
                for pair in range(pairs):
                    gain_N[pair] = -tables.extra_NC[pair, trial_N[pair]]
                _relax(tables, np.argsort(gain_N), trial_N, fixed_T)
                if _extra(tables, trial_N) < best:
                    best = _extra(tables, trial_N)
                    best_N[:] = trial_N
        near = best - bound <= gap * best
        if (
            near
            or pace < SHORTEST
            or not _change_prices(tables, used_T, best - found, pace, prices)
        ):
            break
    return bound


@inner
def _extra(tables, choice_N):  # type: ignore[no-untyped-def]
    """Return the time that a choice adds."""
    total = 0.0
    for pair in range(len(choice_N)):
        total += tables.extra_NC[pair, choice_N[pair]]
    return total
