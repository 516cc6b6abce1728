"""Balanced packing: sequences with similar encoder work, attention and number of tokens.

`FILLED_SEQUENCES` sequences are filled together. Samples are placed in descending order of size. A
sample is added to the sequence with the smallest dot product of loads, the dot-product heuristic of
vector bin packing (Panigrahy et al. 2011, "Heuristics for Vector Bin Packing", section 2.2). The
sizes of a sample are tokens, patches of all encoders and generators, and squared tokens
(attention).

Samples that do not fit start the next sequences. All filled sequences are then closed, so a sample
is in one of the next 2 x `FILLED_SEQUENCES` closed sequences. Integer arithmetic makes the result
equal on all machines.
"""

from __future__ import annotations

import numpy as np

from torchmm.data.steps.packing import PackerBase, group_by_sequence
from torchmm.data.steps.shuffling import Int64s, compile_kernel

FILLED_SEQUENCES = 64
"""Number of sequences that are filled together."""
SWAP_PASSES = 2
"""Number of passes that swap samples between sequences with many and few patches."""
UNIT_BITS = 20
"""Binary fraction digits of a load. A load of 2^20 is the mean of the sequences."""
TOKENS, TILES, PATCHES, ATTENTION = range(4)


class BalancedPacker(PackerBase):
    """Packer of samples into sequences of similar work.

    Args:
        sequence_length: Number of tokens of a sequence.
        max_tiles: Maximum number of images and tiles of a sequence. None for no limit. A sample
            with more of them is packed only with samples that have none.
    """

    def __init__(self, sequence_length: int, max_tiles: int | None = None) -> None:
        super().__init__()
        self.sequence_length = sequence_length
        self.max_tiles = np.iinfo(np.int64).max if max_tiles is None else max_tiles
        self._numbers_O = np.zeros(0, np.int64)
        self._sizes_4O = np.zeros((4, 0), np.int64)

    @property
    def open(self) -> list[int]:
        """Numbers of open sequences, with samples that did not fit into closed sequences."""
        return self._numbers_O.tolist()

    @property
    def opened_at(self) -> list[int]:
        """Opening times of open sequences, which are not used and always 0."""
        return [0] * len(self._numbers_O)

    @property
    def missing_tokens(self) -> int:
        """Number of tokens that fill the next sequences."""
        count = max(FILLED_SEQUENCES, len(self._numbers_O))
        return count * self.sequence_length - int(self._sizes_4O[TOKENS].sum())

    def fill(self, tokens_N: Int64s, tiles_N: Int64s, patches_N: Int64s) -> Int64s:
        """Fill and close sequences, and return the sequence number of each sample.

        Args:
            tokens_N: At least 1 and at most `sequence_length` each, in total `missing_tokens`.
            tiles_N: Images and tiles of each sample.
            patches_N: Patches of each sample.
        """
        closing = max(FILLED_SEQUENCES, len(self._numbers_O))
        return self._place_samples(
            self._sizes(tokens_N, tiles_N, patches_N), closing, FILLED_SEQUENCES
        )

    def finish(self, tokens_N: Int64s, tiles_N: Int64s, patches_N: Int64s) -> Int64s:
        """Pack the last samples, and close all sequences. See `fill` for the arguments."""
        sizes_4N = self._sizes(tokens_N, tiles_N, patches_N)
        tokens = int(sizes_4N[TOKENS].sum() + self._sizes_4O[TOKENS].sum())
        closing = max(len(self._numbers_O), -(-tokens // self.sequence_length))
        packs_N = self._place_samples(sizes_4N, closing, spread=0)
        self.closed.extend(self.open)
        self._numbers_O, self._sizes_4O = self._numbers_O[:0], self._sizes_4O[:, :0]
        return packs_N

    def begin(self, tokens_N: Int64s, tiles_N: Int64s, patches_N: Int64s) -> Int64s:
        """Start the next sequences with samples. See `fill` for the arguments."""
        assert not len(self._numbers_O)
        return self._place_samples(self._sizes(tokens_N, tiles_N, patches_N), 0, FILLED_SEQUENCES)

    def restore(self, tokens: Int64s, tiles: Int64s, patches: Int64s) -> int:
        """Open a sequence with these samples, and return its number."""
        sizes_41 = self._sizes(tokens, tiles, patches).sum(1, keepdims=True)
        self._sizes_4O = np.hstack([self._sizes_4O, sizes_41])
        self._numbers_O = np.append(self._numbers_O, self.next)
        self.next += 1
        return self.next - 1

    def _sizes(self, tokens_N: Int64s, tiles_N: Int64s, patches_N: Int64s) -> Int64s:
        attention_N = tokens_N**2 // self.sequence_length
        return np.array([tokens_N, tiles_N, patches_N, attention_N], np.int64)

    def _place_samples(self, sizes_4N: Int64s, closing: int, spread: int) -> Int64s:
        """Place samples in sequences, close them, and return the sequence number of each sample.

        Args:
            sizes_4N: Tokens, tiles, patches and attention of each sample.
            closing: Number of sequences to fill and close, including the open sequences.
            spread: Number of further sequences that get one sample before any gets several.
        """
        count = sizes_4N.shape[1]
        opened = len(self._numbers_O)
        used_4B = np.zeros((4, closing + count), np.int64)
        used_4B[:, :opened] = self._sizes_4O
        total_4 = sizes_4N.sum(1) + self._sizes_4O.sum(1)
        means_4 = np.maximum(1, -(-total_4 // max(1, closing)))
        means_4[TOKENS] = self.sequence_length
        scaled = [TOKENS, PATCHES, ATTENTION]
        means_31 = means_4[scaled][:, None]
        # Rounded up, so that a sequence with samples always has a larger product than an empty one.
        loads_3N = -(-(sizes_4N[scaled] << UNIT_BITS) // means_31)
        loads_3B = -(-(used_4B[scaled] << UNIT_BITS) // means_31)
        order_N = np.argsort(-np.maximum(loads_3N[0], loads_3N[1]), kind="stable")
        bins_N = np.empty(count, np.int64)
        limits_4 = np.array([self.sequence_length, self.max_tiles, closing, spread])
        used = closing + _place_samples(
            sizes_4N, loads_3N, order_N, limits_4, used_4B, loads_3B, bins_N
        )
        members_N, starts_B1 = group_by_sequence(bins_N, np.arange(closing))
        for _ in range(SWAP_PASSES):
            ranked_B = np.argsort(loads_3B[1, :closing], kind="stable")
            half = closing // 2
            pairs_2P = np.array([ranked_B[::-1][:half], ranked_B[:half]])
            _swap_samples(
                sizes_4N, loads_3N, limits_4, used_4B, loads_3B, starts_B1, members_N, pairs_2P
            )
        bins_N[members_N] = np.repeat(np.arange(closing), np.diff(starts_B1))
        numbers_B = np.arange(self.next, self.next + used) - opened
        numbers_B[:opened] = self._numbers_O
        self.next += max(0, used - opened)
        # Sort sequences by their first sample, a random order, so that steps have similar sizes.
        first_B = np.full(used, -1)
        first_B[bins_N[order_N[::-1]]] = order_N[::-1]
        for number in np.argsort(first_B[:closing], kind="stable").tolist():
            if used_4B[TOKENS, number]:
                self.closed.append(int(numbers_B[number]))
        self._numbers_O = numbers_B[closing:]
        self._sizes_4O = used_4B[:, closing:used].copy()
        return numbers_B[bins_N]


@compile_kernel
def _place_samples(
    sizes_4N: Int64s,
    loads_3N: Int64s,
    order_N: Int64s,
    limits_4: Int64s,
    used_4B: Int64s,
    loads_3B: Int64s,
    bins_N: Int64s,
) -> int:
    """Place samples, and return the number of further sequences that were opened.

    Args:
        sizes_4N: Tokens, tiles, patches and attention of each sample.
        loads_3N: Tokens, patches and attention in fractions of the mean sequence.
        order_N: Order in which samples are placed.
        limits_4: Maximum tokens and tiles of a sequence, number of sequences to fill, and number of
            further sequences that get one sample before any gets several.
        used_4B: Total sizes of each sequence. Changed in place.
        loads_3B: Total loads of each sequence. Changed in place.
        bins_N: Output for the sequence of each sample.
    """
    _, _, closing, spread = limits_4
    further = 0
    for i in order_N:
        sizes_4 = sizes_4N[:, i]
        loads_3 = loads_3N[:, i]
        best = _find_best_bin(sizes_4, loads_3, limits_4, used_4B, loads_3B, 0, closing)
        if best < 0:
            stop = closing + min(further + 1, max(further, spread))
            best = _find_best_bin(sizes_4, loads_3, limits_4, used_4B, loads_3B, closing, stop)
        if best < 0:
            best = closing + further
        further = max(further, best + 1 - closing)
        bins_N[i] = best
        for k in range(4):
            used_4B[k, best] += sizes_4[k]
        for k in range(3):
            loads_3B[k, best] += loads_3[k]
    return further


@compile_kernel
def _swap_samples(
    sizes_4N: Int64s,
    loads_3N: Int64s,
    limits_4: Int64s,
    used_4B: Int64s,
    loads_3B: Int64s,
    starts_B1: Int64s,
    members_N: Int64s,
    pairs_2P: Int64s,
) -> None:
    """Swap two samples of each pair of sequences if this balances patches and attention.

    The remaining arguments are those of `_place_samples`.

    Args:
        starts_B1: Start of each sequence in `members_N`.
        members_N: Samples grouped by sequence. Changed in place.
        pairs_2P: Pairs of sequences.
    """
    for p in range(pairs_2P.shape[1]):
        a, b = pairs_2P[:, p]
        chosen_a, chosen_b, least = -1, -1, 0
        for at_a in range(starts_B1[a], starts_B1[a + 1]):
            i = members_N[at_a]
            for at_b in range(starts_B1[b], starts_B1[b + 1]):
                j = members_N[at_b]
                fits = True
                for k in range(2):  # tokens and tiles
                    more = sizes_4N[k, j] - sizes_4N[k, i]
                    limit = limits_4[k]
                    fits &= more <= 0 or used_4B[k, a] + more <= limit
                    fits &= more >= 0 or used_4B[k, b] - more <= limit
                if not fits:
                    continue
                change = 0  # half of the change of the sum of squared loads
                for k in range(1, 3):
                    moved = loads_3N[k, i] - loads_3N[k, j]
                    change += moved * (moved - loads_3B[k, a] + loads_3B[k, b])
                if change < least:
                    chosen_a, chosen_b, least = at_a, at_b, change
        if chosen_a < 0:
            continue
        i = members_N[chosen_a]
        j = members_N[chosen_b]
        members_N[chosen_a] = j
        members_N[chosen_b] = i
        used_4B[:, a] += sizes_4N[:, j] - sizes_4N[:, i]
        used_4B[:, b] += sizes_4N[:, i] - sizes_4N[:, j]
        loads_3B[:, a] += loads_3N[:, j] - loads_3N[:, i]
        loads_3B[:, b] += loads_3N[:, i] - loads_3N[:, j]


@compile_kernel
def _find_best_bin(
    sizes_4: Int64s,
    loads_3: Int64s,
    limits_4: Int64s,
    used_4B: Int64s,
    loads_3B: Int64s,
    first: int,
    stop: int,
) -> int:
    """Return the sequence with the smallest dot product of loads, or -1 if no sequence fits.

    The remaining arguments are those of `_place_samples`.

    Args:
        sizes_4: Sizes of the sample.
        loads_3: Loads of the sample.
        first: First candidate sequence.
        stop: End of the candidate sequences.
    """
    best, min_product = -1, 0
    for b in range(first, stop):
        if used_4B[0, b] + sizes_4[0] > limits_4[0]:
            continue
        shares_tiles = sizes_4[1] > 0 and used_4B[1, b] > 0
        if shares_tiles and used_4B[1, b] + sizes_4[1] > limits_4[1]:
            continue
        product = 0
        for k in range(3):
            product += loads_3B[k, b] * loads_3[k]
        if best < 0 or product < min_product:
            best, min_product = b, product
    return best
