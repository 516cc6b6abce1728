"""Orders of segment groups that are worth trying first.

Where encoders run in front of the LLM, three things decide most of a step's time: which
microbatches come first and last (few images there shorten warm-up and cool-down), how far encoders
run ahead, and whether the LLM or the encoders have the say. A few dozen combinations cost
milliseconds, and the best of them often is within a few tenths of a percent of the lower bound,
where the natural order misses it by several percent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchmm.balance.order_search.dispatch import Dispatcher

LEADS = (0, 1, 2, 4, 8)
"""Microbatches by which other modules run ahead of the trunk."""


def constructed_orders(dispatcher: Dispatcher) -> list[np.ndarray]:
    """Orders of groups, each once; the natural one is not among them unless by chance."""
    members = _groups_by_microbatch(dispatcher)
    others = np.array([sum(cost for _, cost in other) for _, other in members])
    natural = np.arange(len(members))
    rising = np.argsort(others, kind="stable")
    hill = np.concatenate([rising[::2], rising[1::2][::-1]])
    found: dict[bytes, np.ndarray] = {}
    for microbatches in (natural, rising[::-1], hill, rising):
        chosen = [members[index] for index in microbatches]
        trunk = [group for own, _ in chosen for group in own]
        rest = [group for _, other in chosen for group, _ in other]
        candidates = [trunk + rest, rest + trunk, *(_leading(chosen, lead) for lead in LEADS)]
        for groups in candidates:
            order = np.array(groups)
            found.setdefault(order.tobytes(), order)
    return list(found.values())


_Members = tuple[list[int], list[tuple[int, int]]]
"""Of a microbatch: groups of the trunk, and (group, cost) of other modules."""


def _groups_by_microbatch(dispatcher: Dispatcher) -> list[_Members]:
    """The trunk is the module that all microbatches go through, with whole microbatches."""
    tables = dispatcher.tables
    cost = np.bincount(tables.unit, weights=tables.duration_ps, minlength=len(dispatcher.segments))
    parts = dispatcher.graph.layout.sub_microbatched
    members: dict[int, _Members] = {}
    for index, group in enumerate(dispatcher.groups):
        first = dispatcher.segments[group[0]]
        trunk, other = members.setdefault(first.microbatch, ([], []))
        if first.module in parts:
            other.append((index, int(cost[list(group)].sum())))
        else:
            trunk.append(index)
    return [members[microbatch] for microbatch in sorted(members)]


def _leading(chosen: Sequence[_Members], lead: int) -> list[int]:
    """Other modules of a microbatch in front of the trunk of the one `lead` before."""
    order = []
    for index in range(len(chosen) + lead):
        if index < len(chosen):
            order += [group for group, _ in chosen[index][1]]
        if index >= lead:
            order += chosen[index - lead][0]
    return order
