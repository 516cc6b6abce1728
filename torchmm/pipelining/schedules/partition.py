"""Cutting a chain of layers into consecutive parts whose largest is as small as possible.

The dynamic programming of Optimus (appendix B), a simple form of Alpa's: F(l, m), the least
possible largest part when the first l layers form m parts, is the minimum over j < l of
max(F(j, m - 1), cost of layers j..l). Many cuts share the least maximum, and the paper does not say
which it takes; here it is the one with the least sum of squares, which evens out the other parts
too, and among equal ones the one whose last parts are largest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_TIE = 1e-9  # relative; sums of floats in different orders differ by less


def balanced_cuts(
    costs: Sequence[float], parts: int, loads: Sequence[float] | None = None
) -> list[int]:
    """Number of layers of each part, in order; at least 1.

    O(layers^2 * parts).

    Args:
        costs: by layer, in any unit, not negative. If all are 0, layers are counted.
        parts: how many; at most as many as layers.
        loads: what each part's rank has to do besides, in the same unit. Counts in the sum of
            squares only: the largest part is the least possible with and without.

    Raises:
        ValueError: there are fewer layers than parts, no parts, or a negative cost.
    """
    layers = len(costs)
    if not 1 <= parts <= layers:
        raise ValueError(f"{layers} layers cannot form {parts} parts of at least one layer")
    if min(costs) < 0:
        raise ValueError(f"negative cost {min(costs)} of a layer")
    if not any(costs):  # a module that the typical microbatch does not use
        costs, loads = [1.0] * layers, None
    ends = np.concatenate([[0.0], np.cumsum(costs)])
    sums = ends[None, :] - ends[:, None]  # of layers [row, column)
    sums[np.tril_indices(layers + 1)] = np.inf  # no empty parts
    largest = sums[0]
    for _ in range(parts - 1):
        largest = np.maximum(largest[:, None], sums).min(axis=0)
    allowed = np.where(sums <= largest[layers] * (1 + _TIE), sums, np.inf)
    before = loads or [0.0] * parts
    best, starts = (allowed[0] + before[0]) ** 2, []
    for load in before[1:]:
        total = best[:, None] + (allowed + load) ** 2
        starts.append(_first_least(total))
        best = total.min(axis=0)
    sizes, stop = [], layers
    for start in reversed(starts):
        sizes.append(stop - int(start[stop]))
        stop = int(start[stop])
    return [stop, *reversed(sizes)]


def _first_least(total: np.ndarray) -> np.ndarray:
    """By column: the first row that is the least up to rounding."""
    return np.asarray((total <= total.min(axis=0) * (1 + _TIE)).argmax(axis=0))
