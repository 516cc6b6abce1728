"""Pack samples into sequences by bounded best fit.

Each sample is added to the open sequence with the least free tokens that suffice:

    free tokens of open sequences    A 100, B 700, C 900
    sample of 600 tokens             -> B (100 left)
    sample of 950 tokens             -> new sequence D; if too many are open, close A first

At most `max_open` sequences are open. So samples stay close to their original order, mixtures stay
mixed, and the loader state is small. `close_older` closes sequences that have been open for long,
because no sample may fit into them. If too many are open, the one with the least free tokens is
closed and not the oldest, which may be nearly empty.

Sequences are numbered in the order in which they are opened. The result is the sequence number of
each sample. The loop is compiled, because each rank packs all samples of the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from torchmm.data.steps.shuffling import Int64s, compile_kernel

NO_LIMIT = -1


class PackerBase:
    """Sequence numbers of a packer, in the order in which sequences are opened."""

    def __init__(self) -> None:
        self.closed: deque[int] = deque()
        """Closed sequences that no step has used, in the order in which they were closed."""
        self.next = 0
        """Number of the next sequence."""

    def restore_closed(self) -> int:
        """Add a closed sequence, and return its number."""
        self.closed.append(self.next)
        self.next += 1
        return self.next - 1


class BestFitPacker(PackerBase):
    """Packer of samples by best fit.

    Args:
        sequence_length: Number of tokens of a sequence.
        max_open: Maximum number of open sequences.
        max_tiles: Maximum number of images and tiles of a sequence. None for no limit. A sample
            with more of them is packed only with samples that have none.
    """

    def __init__(self, sequence_length: int, max_open: int, max_tiles: int | None = None) -> None:
        super().__init__()
        self.sequence_length = sequence_length
        self.max_open = max_open
        self.max_tiles = NO_LIMIT if max_tiles is None else max_tiles
        # Columns are open sequences, oldest first: number, free tokens, tiles, opening time.
        self._open_4O = np.zeros((4, max_open), np.int64)
        self._open_count = 0

    @property
    def open(self) -> list[int]:
        """Numbers of open sequences, oldest first."""
        return self._open_4O[0, : self._open_count].tolist()

    @property
    def opened_at(self) -> list[int]:
        """Opening times of open sequences."""
        return self._open_4O[3, : self._open_count].tolist()

    def add(
        self, tokens_N: Int64s, tiles_N: Int64s, max_closed: int | None = None, now: int = 0
    ) -> Int64s:
        """Pack samples in order, and return the sequence number of each packed sample.

        Args:
            tokens_N: Number of tokens of each sample, from 1 to `sequence_length`.
            tiles_N: Number of images and tiles of each sample.
            max_closed: Number of closed sequences at which to stop. None to pack all samples.
            now: Opening time of new sequences, for `close_older`.
        """
        remaining = (
            2 * len(tokens_N) if max_closed is None else max(0, max_closed - len(self.closed))
        )
        packs_N = np.empty(len(tokens_N), np.int64)
        closed_C = np.empty(remaining + 2, np.int64)  # one sample closes at most two
        limits_4 = np.array([self.sequence_length, self.max_tiles, remaining, now])
        counts_2 = np.array([self._open_count, self.next])
        sizes_2N = np.array([tokens_N, tiles_N], np.int64)
        num_packed, closed = _pack_samples(
            sizes_2N, limits_4, self._open_4O, counts_2, packs_N, closed_C
        )
        self._open_count, self.next = counts_2.tolist()
        self.closed.extend(closed_C[:closed].tolist())
        return packs_N[:num_packed]

    def restore(self, tokens: int, tiles: int, opened_at: int) -> int:
        """Open a sequence with a number of used tokens and tiles, and return its number."""
        assert self._open_count < self.max_open
        column = self.next, self.sequence_length - tokens, tiles, opened_at
        self._open_4O[:, self._open_count] = column
        self._open_count += 1
        self.next += 1
        return self.next - 1

    def close_older(self, time: int) -> None:
        """Close sequences that were opened at `time` or before, oldest first."""
        count = int((self._open_4O[3, : self._open_count] <= time).sum())
        self.closed.extend(self.open[:count])
        rest = self._open_count - count
        self._open_4O[:, :rest] = self._open_4O[:, count : self._open_count].copy()
        self._open_count = rest

    def flush(self) -> None:
        """Close all sequences, oldest first, for the end of a validation epoch."""
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
    """Return sample indices of each sequence, in the order in which sequences are closed.

    Args:
        tokens_N: Number of tokens of each sample.
        sequence_length: See `BestFitPacker`.
        max_open: See `BestFitPacker`.
        tiles_N: Number of images and tiles of each sample. None for 0.
        max_tiles: See `BestFitPacker`.
        flush: Whether to include sequences that are still open at the end.
    """
    packer = BestFitPacker(sequence_length, max_open, max_tiles)
    tiles = tiles_N if tiles_N is not None else np.zeros(len(tokens_N))
    packs_N = packer.add(np.asarray(tokens_N, np.int64), np.asarray(tiles, np.int64))
    if flush:
        packer.flush()
    chosen, starts = group_by_sequence(packs_N, np.array(packer.closed, np.int64))
    return [chosen[start:stop].tolist() for start, stop in pairwise(starts)]


def group_by_sequence(packs_N: Int64s, sequences_P: Int64s) -> tuple[Int64s, Int64s]:
    """Return the samples of some sequences.

    Args:
        packs_N: Sequence number of each sample.
        sequences_P: (P,), sequence numbers in any order.

    Returns:
        Indices into `packs_N`, grouped by the sequences in `sequences_P` and ascending in each. And
        (P + 1,), the start of each group, followed by the end of the last group.
    """
    if not len(packs_N) or not len(sequences_P):
        return np.zeros(0, np.int64), np.zeros(len(sequences_P) + 1, np.int64)
    first = min(int(packs_N.min()), int(sequences_P.min()))
    places = np.full(max(int(packs_N.max()), int(sequences_P.max())) - first + 1, -1, np.int64)
    places[sequences_P - first] = np.arange(len(sequences_P))
    return _group_indices(places[packs_N - first], len(sequences_P))


@compile_kernel
def _remove_open(open_4O: Int64s, index: int, open_count: int) -> None:
    for i in range(index, open_count - 1):
        for row in range(4):
            open_4O[row, i] = open_4O[row, i + 1]


@compile_kernel
def _pack_samples(
    sizes_2N: Int64s,
    limits_4: Int64s,
    open_4O: Int64s,
    counts_2: Int64s,
    packs_N: Int64s,
    closed_C: Int64s,
) -> tuple[int, int]:
    """Pack samples, and return the number of packed samples and of closed sequences.

    Args:
        sizes_2N: Tokens and tiles of each sample.
        limits_4: Maximum tokens and tiles of a sequence, number of sequences to close, and time.
        open_4O: Number, free tokens, tiles and opening time of open sequences. Changed in place.
        counts_2: Number of open sequences, and number of the next sequence. Changed in place.
        packs_N: Output for the sequence number of each packed sample.
        closed_C: Output for the numbers of closed sequences.
    """
    length, max_tiles, max_closed, now = limits_4
    open_count, next_pack = counts_2
    max_open = open_4O.shape[1]
    closed = 0
    num_packed = 0
    while num_packed < sizes_2N.shape[1] and closed < max_closed:
        tokens, tiles = sizes_2N[:, num_packed]
        best, least_free = -1, 0
        for i in range(open_count):
            free = open_4O[1, i]
            if free < open_4O[1, least_free]:
                least_free = i
            if free < tokens or (best >= 0 and free >= open_4O[1, best]):
                continue
            shares_tiles = tiles > 0 and open_4O[2, i] > 0
            if max_tiles < 0 or not shares_tiles or open_4O[2, i] + tiles <= max_tiles:
                best = i
        if best < 0:
            if open_count == max_open:
                closed_C[closed] = open_4O[0, least_free]
                closed += 1
                _remove_open(open_4O, least_free, open_count)
                open_count -= 1
            best = open_count
            open_4O[0, best], open_4O[1, best] = next_pack, length
            open_4O[2, best], open_4O[3, best] = 0, now
            open_count += 1
            next_pack += 1
        packs_N[num_packed] = open_4O[0, best]
        num_packed += 1
        open_4O[1, best] -= tokens
        open_4O[2, best] += tiles
        if open_4O[1, best] == 0:
            closed_C[closed] = open_4O[0, best]
            closed += 1
            _remove_open(open_4O, best, open_count)
            open_count -= 1
    counts_2[0], counts_2[1] = open_count, next_pack
    return num_packed, closed


@compile_kernel
def _group_indices(places_N: Int64s, count: int) -> tuple[Int64s, Int64s]:
    """Return indices sorted by group, and the start of each group. Negative groups are omitted."""
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
