"""Samples into packs: bounded best fit over arrays of lengths.

Every sample goes into the fullest open pack that still has room for it. If none has, a new one is
opened; if too many are open, the fullest is closed first. Unlike sorting by length this keeps the
stream's order to within `max_open` sequences, so that the state to save is small and mixtures stay
mixed.

A pack that nothing fits into would stay open for ever, with the samples in it: `close_older` ends
that. Rejected: closing the oldest pack instead of the fullest when too many are open, which wastes
the room of packs that had only just been opened.

Packs are numbers, in the order in which they are opened; who is in which is said by an array with
an entry per sample. A loop of plain numbers, because a planner places all samples of a step of the
whole run: 20 us each in Python, 0.1 us so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from torchmm.data.steps.shuffling import Int64s, compiled

UNLIMITED = -1


class SequenceNumbers:
    """Numbers of the sequences of a packer, in the order in which they are opened."""

    def __init__(self) -> None:
        self.closed: deque[int] = deque()
        """Numbers of closed sequences that no step has taken, in the order of closing."""
        self.next = 0
        """Number of the next sequence."""

    def restore_closed(self) -> int:
        """Add a closed sequence; return its number."""
        self.closed.append(self.next)
        self.next += 1
        return self.next - 1


class Packer(SequenceNumbers):
    """Packs samples by their sizes.

    Args:
        sequence_length: tokens of a pack.
        max_open: packs kept open.
        max_tiles: most pictures and tiles of a pack; None: any number. A sample with more of them
            shares its pack with none that has any.
    """

    def __init__(self, sequence_length: int, max_open: int, max_tiles: int | None = None) -> None:
        super().__init__()
        self.sequence_length = sequence_length
        self.max_open = max_open
        self.max_tiles = UNLIMITED if max_tiles is None else max_tiles
        # Of open packs, the oldest first: number, free tokens, tiles, time of opening.
        self._open_4O = np.zeros((4, max_open), np.int64)
        self._open_count = 0

    @property
    def open(self) -> list[int]:
        """Open packs, oldest first."""
        return self._open_4O[0, : self._open_count].tolist()

    @property
    def opened_at(self) -> list[int]:
        """When each open pack was opened."""
        return self._open_4O[3, : self._open_count].tolist()

    def add(
        self, tokens_N: Int64s, tiles_N: Int64s, wanted: int | None = None, now: int = 0
    ) -> Int64s:
        """Places samples in their order; returns the pack of each of those placed.

        Args:
            tokens_N: at least 1, at most `sequence_length` each.
            tiles_N: pictures and tiles of each.
            wanted: stop once so many packs are closed and not yet taken; None: place all samples.
            now: the time, for `close_older`.
        """
        room = 2 * len(tokens_N) if wanted is None else max(0, wanted - len(self.closed))
        packs_N = np.empty(len(tokens_N), np.int64)
        closed_C = np.empty(room + 2, np.int64)  # one sample closes at most two
        limits_4 = np.array([self.sequence_length, self.max_tiles, room, now])
        counts_2 = np.array([self._open_count, self.next])
        sizes_2N = np.array([tokens_N, tiles_N], np.int64)
        placed, closed = _place(sizes_2N, limits_4, self._open_4O, counts_2, packs_N, closed_C)
        self._open_count, self.next = counts_2.tolist()
        self.closed.extend(closed_C[:closed].tolist())
        return packs_N[:placed]

    def restore(self, tokens: int, tiles: int, opened_at: int) -> int:
        """Opens a pack that already has so many tokens and tiles; returns its number."""
        assert self._open_count < self.max_open
        column = self.next, self.sequence_length - tokens, tiles, opened_at
        self._open_4O[:, self._open_count] = column
        self._open_count += 1
        self.next += 1
        return self.next - 1

    def close_older(self, time: int) -> None:
        """Closes packs that were opened at `time` or before, the oldest first."""
        count = int((self._open_4O[3, : self._open_count] <= time).sum())
        self.closed.extend(self.open[:count])
        rest = self._open_count - count
        self._open_4O[:, :rest] = self._open_4O[:, count : self._open_count].copy()
        self._open_count = rest

    def flush(self) -> None:
        """Closes all packs, oldest first (at the end of a validation epoch)."""
        self.closed.extend(self.open)
        self._open_count = 0


def pack_all(
    tokens_N: Sequence[int],
    sequence_length: int,
    max_open: int,
    tiles_N: Sequence[int] | None = None,
    max_tiles: int | None = None,
    *,
    flush: bool = True,
) -> list[list[int]]:
    """Packs of known samples, in the order in which they are closed, as indices.

    Args:
        tokens_N: of each sample; the other arguments are those of `Packer`.
        flush: whether the packs that are open in the end are packs, too.
    """
    packer = Packer(sequence_length, max_open, max_tiles)
    tiles = tiles_N if tiles_N is not None else np.zeros(len(tokens_N))
    packs_N = packer.add(np.asarray(tokens_N, np.int64), np.asarray(tiles, np.int64))
    if flush:
        packer.flush()
    chosen, starts = members(packs_N, np.array(packer.closed, np.int64))
    return [chosen[start:stop].tolist() for start, stop in pairwise(starts)]


def members(packs_N: Int64s, wanted: Int64s) -> tuple[Int64s, Int64s]:
    """Who is in which pack.

    Args:
        packs_N: pack of each sample.
        wanted: numbers of P packs, in any order.

    Returns:
        indices into `packs_N` of the samples in these packs, one pack after another, each in the
        order of `packs_N`; and where each pack begins among them, and the last one ends: (P + 1,).
    """
    if not len(packs_N) or not len(wanted):
        return np.zeros(0, np.int64), np.zeros(len(wanted) + 1, np.int64)
    first = min(int(packs_N.min()), int(wanted.min()))
    places = np.full(max(int(packs_N.max()), int(wanted.max())) - first + 1, -1, np.int64)
    places[wanted - first] = np.arange(len(wanted))
    return _grouped(places[packs_N - first], len(wanted))


@compiled
def _remove(open_4O: Int64s, which: int, open_count: int) -> None:
    for i in range(which, open_count - 1):
        for row in range(4):
            open_4O[row, i] = open_4O[row, i + 1]


@compiled
def _place(
    sizes_2N: Int64s,
    limits_4: Int64s,
    open_4O: Int64s,
    counts_2: Int64s,
    packs_N: Int64s,
    closed_C: Int64s,
) -> tuple[int, int]:
    """Samples placed, and packs closed.

    Args:
        sizes_2N: tokens and tiles of samples.
        limits_4: tokens of a pack; its tiles; packs to close; the time.
        open_4O: open packs: number, free tokens, tiles, time of opening; changed.
        counts_2: how many these are, and the number of the next one; changed.
        packs_N: to be filled with the samples' packs.
        closed_C: to be filled with closed packs.
    """
    length, max_tiles, wanted, now = limits_4
    open_count, next_pack = counts_2
    max_open = open_4O.shape[1]
    closed = 0
    placed = 0
    while placed < sizes_2N.shape[1] and closed < wanted:
        tokens, tiles = sizes_2N[:, placed]
        best, fullest = -1, 0
        for i in range(open_count):
            free = open_4O[1, i]
            if free < open_4O[1, fullest]:
                fullest = i
            if free < tokens or (best >= 0 and free >= open_4O[1, best]):
                continue
            shares_tiles = tiles > 0 and open_4O[2, i] > 0
            if max_tiles < 0 or not shares_tiles or open_4O[2, i] + tiles <= max_tiles:
                best = i
        if best < 0:
            if open_count == max_open:
                closed_C[closed] = open_4O[0, fullest]
                closed += 1
                _remove(open_4O, fullest, open_count)
                open_count -= 1
            best = open_count
            open_4O[0, best], open_4O[1, best] = next_pack, length
            open_4O[2, best], open_4O[3, best] = 0, now
            open_count += 1
            next_pack += 1
        packs_N[placed] = open_4O[0, best]
        placed += 1
        open_4O[1, best] -= tokens
        open_4O[2, best] += tiles
        if open_4O[1, best] == 0:
            closed_C[closed] = open_4O[0, best]
            closed += 1
            _remove(open_4O, best, open_count)
            open_count -= 1
    counts_2[0], counts_2[1] = open_count, next_pack
    return placed, closed


@compiled
def _grouped(places_N: Int64s, count: int) -> tuple[Int64s, Int64s]:
    """Indices of those with a place, by place, and where each place begins; stable."""
    starts = np.zeros(count + 1, np.int64)
    for place in places_N:
        if place >= 0:
            starts[place + 1] += 1
    for place in range(count):
        starts[place + 1] += starts[place]
    result = np.empty(starts[count], np.int64)
    at = starts[:-1].copy()
    for i in range(len(places_N)):
        place = places_N[i]
        if place >= 0:
            result[at[place]] = i
            at[place] += 1
    return result, starts
