"""1F1B with an uneven first rank: the makespan in closed form, and a good order by it.

An encoder's time differs between microbatches, an LLM's hardly does, and the encoder comes first.
If only the first of P ranks is uneven, the others act as one server that takes `a` = f + b of any
of them per microbatch: the gradient of microbatch i reaches the first rank when the server is
through with microbatch i + P - 2. First rank and server wait for each other at every microbatch, so
with f, b of the first rank in the order of execution

    makespan = max_{k < P} (f_0 + ... + f_k + (P - 1 - k) a)
             + sum_{i < M - P} max(b_i + f_{i + P}, a)
             + max_{k < P} (k a + b_{M - P + k} + ... + b_{M - 1})

(tests compare it with the simulation). So a backward and the forward P places later form a pair
that should last `a`, and a swap of two microbatches changes four pairs: it takes 25 ns instead of
the microseconds of a simulation. Where other ranks are uneven too, `a` is the mean of the slowest
of them, and the result is a start for a search on the real makespan.

DistTrain (§6.2) fills the same intervals greedily. Rejected: an optimal matching of forwards and
backwards; it yields no order, because a microbatch's forward and backward come as one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchmm.balance.compiled import (
    Float64s,
    Index,
    Int64s,
    acceptable_rise,
    compiled,
    cooling_factor,
    next_random,
    random_index,
    without_nans,
)


@compiled
def first_rank_makespans(
    forward_GM: Float64s,
    backward_GM: Float64s,
    others_G: Float64s,
    ranks: int,
    orders_GM: Int64s,
) -> Float64s:
    """The formula above, for each group; arguments as those of `anneal_first_rank`."""
    groups, slots = orders_GM.shape
    makespans = np.zeros(groups)
    for group in range(groups):
        order = orders_GM[group]
        others = others_G[group]
        pairs = _pair_up(forward_GM[group][order], backward_GM[group][order], others, ranks)
        for pair in range(ranks, slots):
            makespans[group] += _longer(pairs, pair)
        makespans[group] += _start(pairs, others, ranks) + _end(pairs, others, ranks)
    return makespans


class _Pairs(NamedTuple):
    """Forwards and the backwards before them on the first rank: Q = M + P pairs.

    The first P forwards have no backward before them, the last P backwards no forward after them.
    """

    forward_Q: Float64s
    backward_Q: Float64s
    least_Q: Float64s
    """What a pair lasts at least. Of those that are no pairs, which the sum leaves out, so much
    that they always last the same and no swap changes them: cheaper than a branch."""


@compiled
def _pair_up(forward_M: Float64s, backward_M: Float64s, others: float, ranks: int) -> _Pairs:
    slots = len(forward_M)
    forward = np.zeros(slots + ranks)
    backward = np.zeros(slots + ranks)
    forward[:slots] = forward_M
    backward[ranks:] = backward_M
    least = np.full(slots + ranks, 1.0 + 2.0 * max(forward_M.max(), backward_M.max()))
    least[ranks:slots] = others
    return _Pairs(forward, backward, least)


@without_nans
def _longer(pairs: _Pairs, pair: Index) -> float:
    """A forward and the backward before it, or what the others do meanwhile."""
    own = pairs.forward_Q[pair] + pairs.backward_Q[pair]
    least = pairs.least_Q[pair]
    return own if own > least else least


@without_nans
def _around(pairs: _Pairs, ranks: int, one: Index, other: Index) -> float:
    """Sum of the pairs of two slots, one < other, up to a constant."""
    total = _longer(pairs, one) + _longer(pairs, one + ranks) + _longer(pairs, other + ranks)
    return total + _longer(pairs, other) if other != one + ranks else total


@without_nans
def _start(pairs: _Pairs, others: float, ranks: int) -> float:
    """Until the first backward."""
    behind = pairs.forward_Q[0]
    most = behind
    for k in range(1, min(ranks, len(pairs.forward_Q) - ranks)):
        behind += pairs.forward_Q[k] - others
        most = behind if behind > most else most
    return most + (ranks - 1) * others


@without_nans
def _end(pairs: _Pairs, others: float, ranks: int) -> float:
    """From the first of the backwards that no forward follows."""
    last = len(pairs.backward_Q) - 1
    first = max(ranks, last + 1 - ranks)
    behind = pairs.backward_Q[last] + (last - first) * others
    most = behind
    for i in range(last - 1, first - 1, -1):
        behind += pairs.backward_Q[i] - others
        most = behind if behind > most else most
    return most


@compiled
def _swap(pairs: _Pairs, ranks: int, one: Index, other: Index) -> None:
    forward = pairs.forward_Q
    backward = pairs.backward_Q
    forward[one], forward[other] = forward[other], forward[one]
    one, other = one + ranks, other + ranks
    backward[one], backward[other] = backward[other], backward[one]


@compiled
def anneal_first_rank(
    forward_GM: Float64s,
    backward_GM: Float64s,
    others_G: Float64s,
    ranks: int,
    orders_GM: Int64s,
    steps: int,
    seed: int,
) -> Int64s:
    """Improve each group's order by swaps; worse orders are accepted ever more seldom.

    Args:
        forward_GM, backward_GM: on the first rank, by microbatch.
        others_G: `a` of each group; of no consequence with one rank.
        ranks: P.
        orders_GM: microbatch of each slot.
        steps: swaps tried per group.
        seed: of the random numbers; groups have different ones.

    Returns:
        (G, M): the best orders.
    """
    groups, slots = orders_GM.shape
    orders_GM = orders_GM.copy()
    for group in range(groups if slots > 1 else 0):
        order = orders_GM[group]
        others = others_G[group]
        forward = forward_GM[group][order]
        backward = backward_GM[group][order]
        pairs = _pair_up(forward, backward, others, ranks)
        # At first a tenth of what a microbatch takes is accepted, in the end a 500th.
        heat = 0.1 * max(others, (forward.sum() + backward.sum()) / slots)
        state = np.uint64(seed * groups + group + 1) * np.uint64(0x9E3779B97F4A7C15)
        _anneal_order(pairs, others, ranks, order, heat, steps, state)
    return orders_GM


@without_nans
def _anneal_order(
    pairs: _Pairs,
    others: float,
    ranks: int,
    order_M: Int64s,
    heat: float,
    steps: int,
    state: np.uint64,
) -> None:
    """Improve one group's order, in place; the pairs are swapped along."""
    slots = len(order_M)
    current_M = order_M.copy()
    start = _start(pairs, others, ranks)
    end = _end(pairs, others, ranks)
    change = best = 0.0  # of the makespan, since the beginning
    cooling = cooling_factor(steps)
    least = 1e-9 * heat  # below it, a gain is a rounding error and not worth a copy
    for _ in range(steps):
        state = next_random(state)
        heat *= cooling
        one = random_index(state, slots)
        other = random_index(state >> np.uint64(16), slots)
        if one == other:
            continue
        one, other = min(one, other), max(one, other)
        before = start + end + _around(pairs, ranks, one, other)
        _swap(pairs, ranks, one, other)
        new_start = _start(pairs, others, ranks) if one < ranks else start
        new_end = _end(pairs, others, ranks) if other >= slots - ranks else end
        rise = new_start + new_end + _around(pairs, ranks, one, other) - before
        if rise <= 0 or rise < acceptable_rise(state, heat):
            start, end = new_start, new_end
            change += rise
            current_M[one], current_M[other] = current_M[other], current_M[one]
            if change < best - least:
                best = change
                order_M[:] = current_M
        else:
            _swap(pairs, ranks, one, other)
