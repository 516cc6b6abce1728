"""Candidates of layer tuning: ways to run a stage's layers worth choosing from.

A multiple-choice knapsack: each layer takes one mode, times and bytes add up, and what is neither
faster nor leaner than something else is dropped (the Pareto front). Equal layers are counted
instead of told apart, so the front of a stage is exact and small. Of a long front, the fastest and
the leanest stay, and of each of K - 2 equal ranges of bytes the fastest (PipeWeaver §6.3).

The front is that of a stage's mean task, which gives each task of the stage the same candidates, at
its own times and bytes: tasks differ in size, hardly in what their layers' modes cost per byte.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from torchmm.balance.compiled import Float64s, Int64s
from torchmm.balance.recomputation.costs import ALL_MODES, Modes, StageRecompute

MOST_CANDIDATES = 16
"""K of the paper, which does not print it."""
MOST_PARTIAL = 256
"""Points of a front of some of the layers."""
FROM_THE_FRONT = tuple(map(ALL_MODES.index, ("full", "offload", "selective", "none")))
"""Which of equal layers have which mode. Those in front recompute more; the first one may be given
by the stage before, and then gains nothing from being offloaded."""


class _Point(NamedTuple):
    """Modes of some layers."""

    extra_ms: float
    kept_bytes: float
    counts: tuple[tuple[int, ...], ...]
    """By kind of layer: how many have which mode."""


def stage_candidates(choices: StageRecompute, most: int = MOST_CANDIDATES) -> list[Modes]:
    """Modes of all layers of a stage, from the fastest to the leanest.

    Args:
        choices: of the stage.
        most: how many at most; at least 2.

    Raises:
        ValueError: `most` is less than 2.
    """
    if most < 2:
        raise ValueError(f"{most} candidates: the fastest and the leanest are 2")
    front = [_Point(0.0, 0.0, ())]
    kinds, extra_ms_KMN = len(choices.again_ms_KMN), choices.forward_ms_KMN + choices.again_ms_KMN
    for kind in range(kinds):
        again, kept = extra_ms_KMN[kind].mean(1), choices.kept_bytes_KMN[kind].mean(1)
        own = _kind_front(_counts(choices.kinds.count(kind), len(again)), again, kept)
        sums = [
            _Point(a.extra_ms + b.extra_ms, a.kept_bytes + b.kept_bytes, a.counts + b.counts)
            for a in front
            for b in own
        ]
        front = _thinned(_front(sums), most if kind == kinds - 1 else MOST_PARTIAL)
    return [_modes(choices.kinds, point.counts) for point in front]


def ordered(extra_ms_NC: Float64s, kept_bytes_NC: Int64s) -> Int64s:
    """By pair: indices of its candidates, so that times rise and bytes fall.

    What is neither faster nor leaner than another candidate of the same pair is left out; the last
    one then stands there again.
    """
    pairs, candidates = extra_ms_NC.shape
    found_NC = np.tile(np.arange(candidates), (pairs, 1))
    wrong_N = (np.diff(extra_ms_NC) < 0).any(1) | (np.diff(kept_bytes_NC) > 0).any(1)
    for pair in np.flatnonzero(wrong_N).tolist():
        own = zip(extra_ms_NC[pair].tolist(), kept_bytes_NC[pair].tolist(), strict=True)
        kept: list[int] = []
        for _, nbytes, index in sorted((ms, n, i) for i, (ms, n) in enumerate(own)):
            if not kept or nbytes < kept_bytes_NC[pair, kept[-1]]:
                kept.append(index)
        found_NC[pair] = kept + kept[-1:] * (candidates - len(kept))
    return found_NC


@cache
def _counts(layers: int, modes: int) -> Int64s:
    """All ways to give each of some equal layers a mode, as counts by mode: a row for each."""
    rest = np.indices((layers + 1,) * (modes - 1)).reshape(modes - 1, -1).T
    rest = rest[rest.sum(1) <= layers]
    return np.concatenate([layers - rest.sum(1, keepdims=True), rest], axis=1)


def _kind_front(counts: Int64s, extra_ms_M: Float64s, kept_bytes_M: Float64s) -> list[_Point]:
    """Of all ways to run layers of one kind, those that are faster or leaner than any other."""
    times, nbytes = counts @ extra_ms_M, counts @ kept_bytes_M
    order = np.lexsort((nbytes, times))
    least = np.minimum.accumulate(nbytes[order])
    better = np.append(True, least[1:] < least[:-1])
    return [
        _Point(float(times[i]), float(nbytes[i]), (tuple(counts[i].tolist()),))
        for i in order[better].tolist()
    ]


def _front(points: list[_Point]) -> list[_Point]:
    """Those that are faster or leaner than any other, from the fastest to the leanest."""
    found: list[_Point] = []
    for point in sorted(points, key=lambda p: (p.extra_ms, p.kept_bytes)):
        if not found or point.kept_bytes < found[-1].kept_bytes:
            found.append(point)
    return found


def _thinned(front: list[_Point], most: int) -> list[_Point]:
    """The first, the last, and the fastest of each of `most` - 2 equal ranges of bytes between."""
    if len(front) <= most:
        return front
    first, last = front[0], front[-1]
    width = (first.kept_bytes - last.kept_bytes) / max(1, most - 2)
    found: dict[int, _Point] = {}
    for point in front[1:-1]:  # the fastest of a range comes first
        found.setdefault(int((first.kept_bytes - point.kept_bytes) / width), point)
    return [first, *found.values(), last]


def _modes(kinds: tuple[int, ...], counts: tuple[tuple[int, ...], ...]) -> Modes:
    """Modes by layer, see `FROM_THE_FRONT`."""
    left = [list(own) for own in counts]
    found = []
    for kind in kinds:
        mode = next(m for m in FROM_THE_FRONT if m < len(left[kind]) and left[kind][m])
        left[kind][mode] -= 1
        found.append(ALL_MODES[mode])
    return tuple(found)
