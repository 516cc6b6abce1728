"""Search for the best assignment of tasks to places when an assignment's cost is a black box.

Small spaces are enumerated. In others, simulated annealing moves one task or exchanges two; a cost
is the longest of several sums, so descent alone stops where two tasks would have to change places
with one. Seeded: the same input gives the same assignment.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import product
from math import exp, prod

import numpy as np

from torchmm.balance.compiled import Int32s

TEMPERATURE = 0.02
"""At the begin, as a share of the cost; it falls to 0."""
REPEATS = 4
"""Moves per evaluation that may lead to an assignment seen before."""


def search_assignment(
    starts: Sequence[Int32s],
    choices: Sequence[range],
    cost: Callable[[Int32s], int],
    *,
    evaluations: int,
    enough: int = 0,
    seed: int = 0,
) -> Int32s:
    """The cheapest assignment found.

    Args:
        starts: assignments to begin from; at least one. Never worse than the best of them.
        choices: by task: its possible places.
        cost: of an assignment; positive.
        evaluations: how many assignments beside the first ones may be evaluated.
        enough: a cost at which to stop.
    """
    best = min(starts, key=cost)
    least = cost(best)
    if least <= enough:
        return best
    if prod(map(len, choices)) <= evaluations:
        every = (np.array(found, np.int32) for found in product(*choices))
        return min([best, *every], key=cost)
    free = [task for task, places in enumerate(choices) if len(places) > 1]
    if not free:
        return best
    rng, costs = random.Random(seed), {best.tobytes(): least}
    current, height = best, least
    steps = evaluations * REPEATS
    for step in range(steps):
        if len(costs) > evaluations or least <= enough:
            break
        tried = _moved(current, free, choices, rng)
        key = tried.tobytes()
        if key not in costs:
            costs[key] = cost(tried)
        rise = costs[key] - height
        temperature = TEMPERATURE * least * (1 - step / steps)
        if rise <= 0 or rng.random() < exp(-rise / temperature):
            current, height = tried, costs[key]
            if height < least:
                best, least = current, height
    return best


def _moved(
    current: Int32s, free: Sequence[int], choices: Sequence[range], rng: random.Random
) -> Int32s:
    """One task elsewhere, or two of the same choices exchanged."""
    tried, one, other = current.copy(), rng.choice(free), rng.choice(free)
    if rng.random() < 0.5 or choices[one] != choices[other]:
        tried[one] = rng.choice(choices[one])
    else:
        tried[[one, other]] = current[[other, one]]
    return tried
