"""Search strategies that annealing is compared with.

- "natural": the order of microbatches.
- "random": permutations of segment groups.
- "dfs": permutations of segment groups in lexicographic order, starting with the natural order.
- "mcts": Monte Carlo tree search, as in PipeWeaver §6.1. The paper leaves details open. Here, an
  earlier group has a higher priority, groups are tried in natural order, and the score of a path
  is that of its best rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import log, sqrt

import numpy as np

from torchmm.balance.picoseconds import PICOSECONDS_PER_MS
from torchmm.balance.pipeweaver.schedule_search.annealing import Annealing, Evaluator, Strategy

ROLLOUTS = 10
"""Rollouts per expansion of the tree, as in the paper."""
ALPHA, BETA = 1.0, 0.05
"""Constants of UCB, which the paper does not report. Scores of good schedules differ by 0.01."""


class RandomSearch(Strategy):
    """Random permutations of groups."""

    def advance(self, evaluations: int, share: float) -> None:
        """Evaluate orders, as described in `Strategy`."""
        for _ in range(evaluations):
            groups = self.rng.permutation(len(self.dispatcher.groups))
            self.evaluator.score(self.dispatcher.order_of_groups(groups.tolist()))


class DepthFirst(Strategy):
    """Enumerate permutations of groups; workers begin with different first groups."""

    def __init__(self, evaluator: Evaluator, rng: np.random.Generator) -> None:
        super().__init__(evaluator, rng)
        self.groups = list(range(len(self.dispatcher.groups)))

    def advance(self, evaluations: int, share: float) -> None:
        """Evaluate orders, as described in `Strategy`."""
        for _ in range(evaluations):
            if not _next_permutation(self.groups):
                self.evaluator.exhausted = True
                return
            self.evaluator.score(self.dispatcher.order_of_groups(self.groups))


def _next_permutation(values: list[int]) -> bool:
    """Replace `values` by its next permutation and return True, or return False after the last."""
    pivot = len(values) - 2
    while pivot >= 0 and values[pivot] > values[pivot + 1]:
        pivot -= 1
    if pivot < 0:
        return False
    other = len(values) - 1
    while values[other] < values[pivot]:
        other -= 1
    values[pivot], values[other] = values[other], values[pivot]
    values[pivot + 1 :] = reversed(values[pivot + 1 :])
    return True


@dataclass
class _Node:
    """Tree node whose path fixes the first groups."""

    children: dict[int, _Node] = field(default_factory=dict)
    visits: int = 0
    score: float = 0.0


class TreeSearch(Strategy):
    """Monte Carlo tree search over groups. A node at depth d selects the d-th group."""

    def __init__(self, evaluator: Evaluator, rng: np.random.Generator) -> None:
        super().__init__(evaluator, rng)
        tables = self.dispatcher.tables
        ranks = len(tables.limit_bytes)
        self.busy_ms = float(tables.duration_ps.sum()) / PICOSECONDS_PER_MS / ranks
        self.root = _Node()

    def advance(self, evaluations: int, share: float) -> None:
        """Evaluate orders, as described in `Strategy`."""
        target = self.evaluator.evaluations + evaluations
        while self.evaluator.evaluations < target:
            prefix, path = self._select()
            rollouts = min(ROLLOUTS, target - self.evaluator.evaluations)
            score = max(self._roll_out(prefix) for _ in range(rollouts))
            for node in path:
                node.visits += 1
                node.score = max(node.score, score)

    def _select(self) -> tuple[list[int], list[_Node]]:
        """Return prefix and path of a new child, which is added to a node with a missing child."""
        node = self.root
        path = [self.root]
        prefix: list[int] = []
        count = len(self.dispatcher.groups)
        while len(prefix) < count:
            left = [g for g in range(count) if g not in set(prefix)]
            missing = [group for group in left if group not in node.children]
            if missing:
                group = missing[int(self.rng.integers(len(missing)))]
                node.children[group] = _Node()
                return [*prefix, group], [*path, node.children[group]]
            logarithm = log(node.visits)
            children = node.children
            group = max(left, key=lambda g: _upper_bound(children[g], logarithm))
            prefix.append(group)
            node = node.children[group]
            path.append(node)
        return prefix, path

    def _roll_out(self, prefix: list[int]) -> float:
        """Return the busy fraction of rank time with the remaining groups in random order."""
        rest = np.setdiff1d(np.arange(len(self.dispatcher.groups)), prefix)
        groups = [*prefix, *self.rng.permutation(rest).tolist()]
        return self.busy_ms / self.evaluator.score(self.dispatcher.order_of_groups(groups))


def _upper_bound(node: _Node, logarithm: float) -> float:
    return node.score**ALPHA + BETA * sqrt(logarithm / node.visits)


STRATEGIES: dict[str, Callable[[Evaluator, np.random.Generator], Strategy]] = {
    "natural": Strategy,
    "random": RandomSearch,
    "dfs": DepthFirst,
    "mcts": TreeSearch,
    "annealing": Annealing,
}
