"""One plan across replicas: packs change places after a first plan of every replica.

Groups of equal work (`groups.py`) do not end together where orders are made from the batch: how
much of a plan is idle depends on which microbatches it has. So every group is planned, as a run
plans it, and the group that ends last gives one of its packs for one of another group, so that
both end before it did; again and again, as long as that helps and there are trials left.

Tried are the exchanges that move about half of the gap between two groups, among them packs of
equal work but other modules: of the groups that end first, first.

Rejected: work by module as a second size to balance: how it changes a plan's idle time is not known
before it is planned. Rejected: the natural order's time instead of a short search's: it differs
between groups of equal work by ten times as much as searched orders do.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from torchmm.balance.compiled import Float64s, Int64s

TRIALS = 24
"""Exchanges that are planned for a step, at most: two plans each."""
PARTNERS = 2
"""Groups that the last one exchanges packs with before it is left as it is."""
PER_PARTNER = 3
"""Exchanges that are tried with each of them."""
Lasts = Callable[[Int64s], float]
"""How long a group's plan takes, of its packs by microbatch and place in it."""


def exchanged(places_GMB: Int64s, sizes_N: Float64s, lasts: Lasts) -> Int64s:
    """The same packs, in groups of which the last one ends no later, and sooner where possible.

    Args:
        places_GMB: packs by group, microbatch and place in it.
        sizes_N: how much work each pack is, in the unit of `lasts`.
    """
    places_GMB = places_GMB.copy()
    ends_G = np.array([lasts(own) for own in places_GMB])
    ranks = float((sizes_N.sum() / ends_G.sum()) if ends_G.sum() else 1.0)
    left = TRIALS
    while left > 0:
        slow = int(ends_G.argmax())
        for give, take, fast in _trials(places_GMB, sizes_N, ends_G, slow, ranks):
            if left == 0:
                return places_GMB
            left -= 1
            pair = places_GMB[[slow, fast]]
            pair[0].flat[give], pair[1].flat[take] = pair[1].flat[take], pair[0].flat[give]
            ends = [lasts(own) for own in pair]
            if max(ends) < ends_G[slow]:
                places_GMB[[slow, fast]] = pair
                ends_G[[slow, fast]] = ends
                break
        else:
            return places_GMB
    return places_GMB


def _trials(
    places_GMB: Int64s, sizes_N: Float64s, ends_G: Float64s, slow: int, ranks: float
) -> list[tuple[int, int, int]]:
    """(place in the slow group, place in the other one, other group), the most promising first.

    Args:
        ranks: work that a group does at a time.
    """
    mine_P = sizes_N[places_GMB[slow].ravel()]
    found = []
    for fast in np.argsort(ends_G, kind="stable")[:PARTNERS].tolist():
        if fast == slow:
            continue
        theirs_P = sizes_N[places_GMB[fast].ravel()]
        wanted = (ends_G[slow] - ends_G[fast]) / 2 * ranks
        off_PP = np.abs(mine_P[:, None] - theirs_P[None, :] - wanted)
        best = np.argsort(off_PP, axis=None, kind="stable")[:PER_PARTNER].tolist()
        found += [(*divmod(place, len(theirs_P)), fast) for place in best]
    return found
