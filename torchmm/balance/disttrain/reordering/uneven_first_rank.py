"""Closed form of the 1F1B makespan with an uneven first rank, and annealing on it.

The encoder is on the first rank. Its time differs between microbatches, and the LLM time hardly
does. If only the first of P ranks is uneven, the other ranks behave like one server that needs `a`
= f + b of any of them per microbatch. The gradient of microbatch i reaches the first rank when the
server has finished microbatch i + P - 2:

    first rank   f0 f1 f2 |b0 f3|b1 f4|b2 f5| ...     pairs b_i + f_{i+P}
    server          | a  |  a  |  a  |  a  |          waits for and delays each pair

With f and b of the first rank in execution order:

    makespan = max_{k < P} (f_0 + ... + f_k + (P - 1 - k) a)
             + sum_{i < M - P} max(b_i + f_{i + P}, a)
             + max_{k < P} (k a + b_{M - P + k} + ... + b_{M - 1})

Tests compare it with the simulation. A backward pass and the forward pass P slots later are a pair
that should take `a`. A swap of two microbatches changes four pairs, which takes 25 ns instead of
microseconds for a simulation. If other ranks are uneven too, `a` is the mean of the slowest of
them, and the result is the start of a search on the real makespan.

DistTrain (§6.2) fills the same intervals greedily. An optimal matching of forward and backward
passes does not define an order, because both passes of a microbatch move together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchmm.balance.numba_utils import (
    Float64s,
    Index,
    Int64s,
    acceptance_threshold,
    cached_njit,
    cooling_factor,
    next_random,
    nonan_njit,
    random_index,
)


@cached_njit
def first_rank_makespans(
    forward_GM: Float64s,
    backward_GM: Float64s,
    other_ranks_G: Float64s,
    ranks: int,
    orders_GM: Int64s,
) -> Float64s:
    """Return the makespan of each group by the closed form.

    See `anneal_first_rank` for the arguments.
    """
    groups, slots = orders_GM.shape
    makespans = np.zeros(groups)
    for group in range(groups):
        order = orders_GM[group]
        other_ranks = other_ranks_G[group]
        pairs = _pair_up(forward_GM[group][order], backward_GM[group][order], other_ranks, ranks)
        for pair in range(ranks, slots):
            makespans[group] += _pair_time(pairs, pair)
        makespans[group] += _warmup_time(pairs, other_ranks, ranks) + _cooldown_time(
            pairs, other_ranks, ranks
        )
    return makespans


class _Pairs(NamedTuple):
    """Forward passes with the backward passes before them on the first rank: Q = M + P pairs.

    The first P forward passes have no backward pass before them, and the last P backward passes
    have no forward pass after them.
    """

    forward_Q: Float64s
    backward_Q: Float64s
    min_duration_Q: Float64s
    """Minimum duration of each pair. Incomplete pairs, which the sum omits, have a constant so
    large that no swap changes their duration. This avoids a branch."""


@cached_njit
def _pair_up(forward_M: Float64s, backward_M: Float64s, other_ranks: float, ranks: int) -> _Pairs:
    slots = len(forward_M)
    forward = np.zeros(slots + ranks)
    backward = np.zeros(slots + ranks)
    forward[:slots] = forward_M
    backward[ranks:] = backward_M
    min_duration = np.full(slots + ranks, 1.0 + 2.0 * max(forward_M.max(), backward_M.max()))
    min_duration[ranks:slots] = other_ranks
    return _Pairs(forward, backward, min_duration)


@nonan_njit
def _pair_time(pairs: _Pairs, pair: Index) -> float:
    """Return the duration of a pair, or `a` if that is longer."""
    duration = pairs.forward_Q[pair] + pairs.backward_Q[pair]
    min_duration = pairs.min_duration_Q[pair]
    return duration if duration > min_duration else min_duration


@nonan_njit
def _affected_pairs_time(pairs: _Pairs, ranks: int, one: Index, other: Index) -> float:
    """Return the sum of the pairs of two slots, one < other, up to a constant."""
    total = (
        _pair_time(pairs, one) + _pair_time(pairs, one + ranks) + _pair_time(pairs, other + ranks)
    )
    return total + _pair_time(pairs, other) if other != one + ranks else total


@nonan_njit
def _warmup_time(pairs: _Pairs, other_ranks: float, ranks: int) -> float:
    """Return the time until the first backward pass."""
    delay = pairs.forward_Q[0]
    max_delay = delay
    for k in range(1, min(ranks, len(pairs.forward_Q) - ranks)):
        delay += pairs.forward_Q[k] - other_ranks
        max_delay = delay if delay > max_delay else max_delay
    return max_delay + (ranks - 1) * other_ranks


@nonan_njit
def _cooldown_time(pairs: _Pairs, other_ranks: float, ranks: int) -> float:
    """Return the time from the first backward pass without a following forward pass."""
    last = len(pairs.backward_Q) - 1
    first = max(ranks, last + 1 - ranks)
    delay = pairs.backward_Q[last] + (last - first) * other_ranks
    max_delay = delay
    for i in range(last - 1, first - 1, -1):
        delay += pairs.backward_Q[i] - other_ranks
        max_delay = delay if delay > max_delay else max_delay
    return max_delay


@cached_njit
def _swap(pairs: _Pairs, ranks: int, one: Index, other: Index) -> None:
    forward = pairs.forward_Q
    backward = pairs.backward_Q
    forward[one], forward[other] = forward[other], forward[one]
    one, other = one + ranks, other + ranks
    backward[one], backward[other] = backward[other], backward[one]


@cached_njit
def anneal_first_rank(
    forward_GM: Float64s,
    backward_GM: Float64s,
    other_ranks_G: Float64s,
    ranks: int,
    orders_GM: Int64s,
    steps: int,
    seed: int,
) -> Int64s:
    """Improve the order of each group by simulated annealing with swaps.

    Args:
        forward_GM: Forward times on the first rank, by microbatch.
        backward_GM: Backward times on the first rank, by microbatch.
        other_ranks_G: `a` of each group. Not used with one rank.
        ranks: Number P of ranks.
        orders_GM: Microbatch of each slot.
        steps: Number of attempted swaps per group.
        seed: Random seed. Groups have different random numbers.

    Returns:
        (G, M): the best orders.
    """
    groups, slots = orders_GM.shape
    orders_GM = orders_GM.copy()
    for group in range(groups if slots > 1 else 0):
        order = orders_GM[group]
        other_ranks = other_ranks_G[group]
        forward = forward_GM[group][order]
        backward = backward_GM[group][order]
        pairs = _pair_up(forward, backward, other_ranks, ranks)
        # The temperature decreases from 1/10 to 1/500 of the time of a microbatch.
        temperature = 0.1 * max(other_ranks, (forward.sum() + backward.sum()) / slots)
        state = np.uint64(seed * groups + group + 1) * np.uint64(0x9E3779B97F4A7C15)
        _anneal_order(pairs, other_ranks, ranks, order, temperature, steps, state)
    return orders_GM


@nonan_njit
def _anneal_order(
    pairs: _Pairs,
    other_ranks: float,
    ranks: int,
    order_M: Int64s,
    temperature: float,
    steps: int,
    state: np.uint64,
) -> None:
    """Improve the order of one group in place. The pairs are swapped together with it."""
    slots = len(order_M)
    current_M = order_M.copy()
    start = _warmup_time(pairs, other_ranks, ranks)
    end = _cooldown_time(pairs, other_ranks, ranks)
    change = best = 0.0  # change of the makespan since the start
    cooling = cooling_factor(steps)
    min_gain = 1e-9 * temperature  # smaller gains are rounding errors and not worth a copy
    for _ in range(steps):
        state = next_random(state)
        temperature *= cooling
        one = random_index(state, slots)
        other = random_index(state >> np.uint64(16), slots)
        if one == other:
            continue
        one, other = min(one, other), max(one, other)
        before = start + end + _affected_pairs_time(pairs, ranks, one, other)
        _swap(pairs, ranks, one, other)
        new_start = _warmup_time(pairs, other_ranks, ranks) if one < ranks else start
        new_end = _cooldown_time(pairs, other_ranks, ranks) if other >= slots - ranks else end
        rise = new_start + new_end + _affected_pairs_time(pairs, ranks, one, other) - before
        if rise <= 0 or rise < acceptance_threshold(state, temperature):
            start, end = new_start, new_end
            change += rise
            current_M[one], current_M[other] = current_M[other], current_M[one]
            if change < best - min_gain:
                best = change
                order_M[:] = current_M
        else:
            _swap(pairs, ranks, one, other)
