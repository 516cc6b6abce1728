"""The gated delta rule within packed segments, as a custom operator with a separate backward.

The rule (arXiv 2412.06464) updates a state S for each token. It decays the state, then moves the
value that the key reads towards v by the rate beta:

    S <- exp(g) S        S <- S + k beta (v - k S)        out = q S

Chunks. As in the training implementation of Hugging Face, tokens form chunks. The work inside
chunks is a few matmuls and a triangular solve for all chunks at once. Only the state is sequential
over chunks. Chunks have 64 tokens, or fewer if all segments are short, because the work inside a
chunk is quadratic in its length.

Rounds. Each segment is padded to full chunks and starts with a zero state, so that no chunk has
tokens of two samples. Round r computes chunk r of all segments that have this chunk, in one batch
of matmuls. Segments are sorted by their number of chunks, longest first:

    segment A   round 0   round 1   round 2
    segment B   round 0   round 1
    segment C   round 0

Token positions are computed on the CPU from the starts, without a device synchronization.

Backward. The values inside chunks are recomputed from the inputs. Saved values would be about 20
times as large as the inputs. Autograd through the loop would save them and would recompile for each
number of chunks.

Text generation also needs the state after each segment, and no backward pass.
`delta_rule_with_states` and `delta_rule_next_token` are separate functions for this.

Shape legend: T tokens, S segments, G key heads, H value heads (G divides H), K key features, V
value features, D any features, C chunks, L tokens of a chunk, R rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

SHORTEST_CHUNK, LONGEST_CHUNK = 16, 64
"""Minimum and maximum number of tokens of a chunk, powers of 2."""
NORM_EPSILON = 1e-6
"""Added to the sum of squares of a query or key, before the square root."""


class ChunkLayout(NamedTuple):
    """The chunk and the position in the chunk of each token."""

    slots_T: Tensor
    """(T,), int64, chunk * L + position in the chunk, on the device of the tokens."""
    rounds: list[int]
    """Number of chunks of each round, in nonincreasing order."""
    length: int
    """Number of tokens L of a chunk."""
    ranks_S: Tensor
    """(S,), int64, on the CPU: index of each segment after sorting by length, longest first."""

    @classmethod
    def from_starts(cls, cu_seqlens: Tensor, device: torch.device) -> ChunkLayout:
        """Build the layout.

        Args:
            cu_seqlens: (S + 1,), starts of segments and total length, on the CPU.
            device: Device of the tokens.
        """
        starts_S = cu_seqlens[:-1].long()
        lengths_S = cu_seqlens.diff().long()
        length = chunk_length(int(lengths_S.max()))
        chunks_S = (lengths_S + length - 1) // length
        order_S = chunks_S.argsort(descending=True, stable=True)
        rank_S = torch.empty_like(order_S)
        rank_S[order_S] = torch.arange(len(order_S))
        longest = int(chunks_S.max())
        # Number of segments with more than r chunks.
        rounds_R = (chunks_S[:, None] > torch.arange(longest)).sum(0)
        first_R = rounds_R.cumsum(0) - rounds_R
        segment_T = torch.repeat_interleave(torch.arange(len(lengths_S)), lengths_S)
        at_T = torch.arange(int(cu_seqlens[-1])) - starts_S[segment_T]
        chunk_T = first_R[at_T // length] + rank_S[segment_T]
        slots_T = chunk_T * length + at_T % length
        if device.type == "cuda":
            slots_T = slots_T.pin_memory().to(device, non_blocking=True)
        return cls(slots_T, rounds_R.tolist(), length, rank_S)

    def split(self, x_THD: Tensor) -> Tensor:
        """Return the tokens (T, H, D) in chunks, (C, H, L, D), float32, padded with zeros."""
        shape = (sum(self.rounds) * self.length, *x_THD.shape[1:])
        x = x_THD.new_zeros(shape, dtype=_compute_dtype(x_THD)).index_copy_(
            0, self.slots_T, x_THD.to(_compute_dtype(x_THD))
        )
        return x.unflatten(0, (-1, self.length)).transpose(1, 2).contiguous()

    def join(self, x_CHLD: Tensor) -> Tensor:
        """Return the tokens of chunks (C, H, L, D) in packed order, (T, H, D)."""
        return x_CHLD.transpose(1, 2).flatten(0, 1).index_select(0, self.slots_T)

    def slices(self) -> Iterator[slice]:
        """Yield the slice of chunks of each round."""
        start = 0
        for count in self.rounds:
            yield slice(start, start + count)
            start += count


def chunk_length(longest: int) -> int:
    """Return the chunk length for a sequence whose longest segment has `longest` tokens."""
    length = LONGEST_CHUNK
    while length > SHORTEST_CHUNK and longest <= length // 2:
        length //= 2
    return length


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _Chunks(NamedTuple):
    """Values of all chunks that do not depend on the state."""

    query: Tensor
    """(C, H, L, K), normalized and scaled queries."""
    key: Tensor
    """(C, H, L, K), normalized keys."""
    value: Tensor
    """(C, H, L, V), values."""
    beta: Tensor
    """(C, H, L, 1), update rates."""
    decay: Tensor
    """(C, H, L, 1), logarithm of the decay from the chunk start, including that of the token."""
    pairs: Tensor
    """(C, H, L, L), decay from token j to token i; zero above the diagonal."""
    overlap: Tensor
    """(C, H, L, L), inner products of keys."""
    system: Tensor
    """(C, H, L, L), the triangular system. Only the part below the diagonal is used."""
    scores: Tensor
    """(C, H, L, L), inner products of queries and keys, with decay."""
    new: Tensor
    """(C, H, L, V), written values for a zero initial state."""
    read: Tensor
    """(C, H, L, K), keys that read the replaced content of the initial state."""

    @property
    def decay_from_start(self) -> Tensor:
        """Decay from the start of the chunk, (C, H, L, 1)."""
        return self.decay.exp()

    @property
    def decay_to_end(self) -> Tensor:
        """Decay to the end of the chunk, (C, H, L, 1)."""
        return (self.decay[:, :, -1:] - self.decay).exp()


def _chunks(layout: ChunkLayout, inputs: Sequence[Tensor]) -> _Chunks:
    query, key, value, decay, beta = (
        layout.split(x[..., None] if x.ndim == 2 else x) for x in inputs
    )
    shared = value.shape[1] // key.shape[1]
    query = _normalized(query)[0] * query.shape[-1] ** -0.5
    query = query.repeat_interleave(shared, dim=1)
    key = _normalized(key)[0].repeat_interleave(shared, dim=1)
    decay = decay.cumsum(2)
    square = layout.length, layout.length
    hidden = torch.ones(square, dtype=torch.bool, device=key.device).triu(1)
    pairs = (decay - decay.transpose(-1, -2)).masked_fill_(hidden, -torch.inf).exp_()
    overlap = key @ key.transpose(-1, -2)
    system = overlap * pairs * beta
    scores = (query @ key.transpose(-1, -2)).mul_(pairs)
    new = _solve(system, value * beta)
    read = _solve(system, key * (beta * decay.exp()))
    return _Chunks(query, key, value, beta, decay, pairs, overlap, system, scores, new, read)


def _solve(system: Tensor, right: Tensor, *, transposed: bool = False) -> Tensor:
    """Solve a unit triangular system. Other stored elements are ignored.

    Args:
        system: Lower triangular matrices.
        right: Right-hand sides.
        transposed: Whether to solve the transposed system.
    """
    matrix = system.transpose(-1, -2) if transposed else system
    return torch.linalg.solve_triangular(matrix, right, upper=transposed, unitriangular=True)


def _normalized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the vectors with unit norm and the factors of the normalization."""
    factor = (x.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt()
    return x * factor, factor


class _Scan(NamedTuple):
    """Results of the sequential pass of the state over chunks."""

    states: Tensor
    """(C, H, K, V), the state before each chunk."""
    written: Tensor
    """(C, H, L, V), values written into the state."""
    last: list[Tensor]
    """Final states of the segments that end before each round, and after the last one.

    Each has the shape (segments, H, K, V).
    """


def _scan(layout: ChunkLayout, c: _Chunks) -> _Scan:
    decayed_key = c.key * c.decay_to_end
    chunk_decay = c.decay_from_start[:, :, -1:]
    states = c.key.new_empty(*c.key.shape[:2], c.key.shape[-1], c.value.shape[-1])
    written = torch.empty_like(c.value)
    state = torch.zeros_like(states[: layout.rounds[0]])
    last = []
    for part in layout.slices():
        count = part.stop - part.start
        last.append(state[count:])
        state = state[:count]
        states[part] = state
        written[part] = c.new[part] - c.read[part] @ state
        state = state * chunk_decay[part] + decayed_key[part].transpose(-1, -2) @ written[part]
    return _Scan(states, written, [*last, state])


@torch.library.custom_op("torchmm::packed_delta_rule", mutates_args=())
def packed_delta_rule(
    query_TGK: Tensor,
    key_TGK: Tensor,
    value_THV: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    """Return the output of the gated delta rule within segments, computed in float32.

    Each segment starts with a zero state.

    Args:
        query_TGK: (T, G, K), queries. They are normalized and scaled by K ** -0.5.
        key_TGK: (T, G, K), keys. They are normalized.
        value_THV: (T, H, V), values.
        decay_TH: (T, H), logarithms of the decay, at most 0.
        beta_TH: (T, H), update rates in [0, 1].
        cu_seqlens: (S + 1,), starts of segments and total length, on the CPU.

    Returns:
        Output (T, H, V), dtype of the values.
    """
    inputs = [query_TGK, key_TGK, value_THV, decay_TH, beta_TH]
    return _rule(inputs, cu_seqlens)[0]


def _rule(inputs: Sequence[Tensor], cu_seqlens: Tensor) -> tuple[Tensor, ChunkLayout, _Scan]:
    value_THV = inputs[2]
    layout = ChunkLayout.from_starts(cu_seqlens, value_THV.device)
    c = _chunks(layout, inputs)
    scan = _scan(layout, c)
    out = (c.query * c.decay_from_start) @ scan.states + c.scores @ scan.written
    return layout.join(out).to(value_THV.dtype), layout, scan


def delta_rule_with_states(inputs: Sequence[Tensor], cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of `packed_delta_rule` and the final states (S, H, K, V), float32.

    Args:
        inputs: Queries, keys, values, decay and beta of `packed_delta_rule`.
        cu_seqlens: (S + 1,), starts of segments and total length, on the CPU.
    """
    out_THV, layout, scan = _rule(inputs, cu_seqlens)
    by_rank = torch.cat(scan.last[::-1])  # longest segments first
    return out_THV, by_rank[layout.ranks_S.to(by_rank.device)]


def delta_rule_next_token(inputs: Sequence[Tensor], states_SHKV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output (S, H, V) of one new token per segment, and the new states.

    Args:
        inputs: Queries, keys, values, decay and beta of S tokens, as for `packed_delta_rule`.
        states_SHKV: (S, H, K, V), float32, states before the tokens.
    """
    query, key, value, decay, beta = (x.to(states_SHKV.dtype) for x in inputs)
    shared = value.shape[1] // key.shape[1]
    query, key = (
        _normalized(x)[0].repeat_interleave(shared, dim=1)[:, :, None] for x in (query, key)
    )
    states = states_SHKV * decay.exp()[..., None, None]
    new = (value[:, :, None] - key @ states) * beta[..., None, None]
    states = states + key.transpose(-1, -2) @ new
    out = query * query.shape[-1] ** -0.5 @ states
    return out[:, :, 0].to(inputs[2].dtype), states


@packed_delta_rule.register_fake
def _(query_TGK, key_TGK, value_THV, decay_TH, beta_TH, cu_seqlens):  # type: ignore[no-untyped-def]
    return torch.empty_like(value_THV, memory_format=torch.contiguous_format)


@torch.library.custom_op("torchmm::packed_delta_rule_backward", mutates_args=())
def packed_delta_rule_backward(
    grad_THV: Tensor, inputs: list[Tensor], cu_seqlens: Tensor
) -> list[Tensor]:
    """Return the gradients of the five inputs of `packed_delta_rule`, each in the input dtype."""
    layout = ChunkLayout.from_starts(cu_seqlens, grad_THV.device)
    c = _chunks(layout, inputs)
    scan = _scan(layout, c)
    parts = _gradients(layout, c, scan, layout.split(grad_THV))
    query, key, value, decay, beta = parts
    scale = query.shape[-1] ** -0.5
    query = _through_norm(layout, inputs[0], query * scale)
    key = _through_norm(layout, inputs[1], key)
    flat = (x[..., 0] for x in (layout.join(decay), layout.join(beta)))
    grads = [query, key, layout.join(value), *flat]
    return [grad.to(x.dtype) for grad, x in zip(grads, inputs, strict=True)]


def _through_norm(layout: ChunkLayout, x_TGK: Tensor, grad_CHLK: Tensor) -> Tensor:
    """Return the gradient before normalization, (T, G, K), summed over heads that share a key."""
    groups = x_TGK.shape[1]
    grad = layout.join(grad_CHLK).unflatten(1, (groups, -1)).sum(2)
    unit, factor = _normalized(x_TGK.to(_compute_dtype(x_TGK)))
    return factor * (grad - unit * (grad * unit).sum(-1, keepdim=True))


def _gradients(layout: ChunkLayout, c: _Chunks, scan: _Scan, grad: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients (C, H, L, ...) of query, key, value, decay per token, and beta."""
    of_written, of_states = _scan_backward(layout, c, grad)
    grown_query = c.query * c.decay_from_start
    rest_key = c.key * c.decay_to_end
    of_grown_query = grad @ scan.states.transpose(-1, -2)
    of_rest_key = scan.written @ of_states.transpose(-1, -2)
    of_scores = (grad @ scan.written.transpose(-1, -2)).tril_()
    # Gradients of the right-hand sides of the solves, and of the system below its diagonal.
    right_new = _solve(c.system, of_written, transposed=True)
    of_read = -of_written @ scan.states.transpose(-1, -2)
    right_read = _solve(c.system, of_read, transposed=True)
    of_system = -(right_new @ c.new.transpose(-1, -2)) - right_read @ c.read.transpose(-1, -2)
    of_system = of_system.tril_(-1)

    paired = of_scores * c.pairs
    of_query = paired @ c.key + of_grown_query * c.decay_from_start
    of_overlap = of_system * c.pairs * c.beta
    read_key = _row_sums(right_read, c.key) * c.decay_from_start
    of_key = paired.transpose(-1, -2) @ c.query + of_rest_key * c.decay_to_end
    of_key += (of_overlap + of_overlap.transpose(-1, -2)) @ c.key
    of_key += right_read * (c.beta * c.decay_from_start)
    of_beta = _row_sums(right_new, c.value) + read_key
    of_beta += _row_sums(of_system * c.pairs, c.overlap)

    # The gradient of a logarithm is the gradient of the product times the product, at both ends of
    # the decay interval. Most of these terms cancel, so sums are in float64.
    exact = torch.float64
    between = of_scores * c.scores + of_system * c.system
    to_end = (of_rest_key * rest_key).sum(-1, keepdim=True, dtype=exact)
    of_decay = (
        between.sum(-1, keepdim=True, dtype=exact)
        - between.sum(-2, dtype=exact)[..., None]
        - to_end
    )
    of_decay += (of_grown_query * grown_query).sum(
        -1, keepdim=True, dtype=exact
    ) + read_key * c.beta
    of_chunk_decay = (of_states * scan.states).sum((-2, -1), dtype=exact)[
        ..., None
    ] * c.decay_from_start[:, :, -1]
    of_decay[:, :, -1] += of_chunk_decay + to_end.sum(2)
    of_decay = of_decay.flip(2).cumsum(2).flip(2)
    return of_query, of_key, right_new * c.beta, of_decay, of_beta


def _row_sums(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1, keepdim=True)


def _scan_backward(layout: ChunkLayout, c: _Chunks, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradients of written values (C, H, L, V) and of states after chunks (C, H, K, V)."""
    rest_key = c.key * c.decay_to_end
    grown_query = c.query * c.decay_from_start
    chunk_decay = c.decay_from_start[:, :, -1:]
    of_written = c.scores.transpose(-1, -2) @ grad
    of_states = c.key.new_zeros(*c.key.shape[:2], c.key.shape[-1], c.value.shape[-1])
    before: Tensor | None = None
    for part in reversed(list(layout.slices())):
        if before is not None:  # for segments with a chunk in the next round
            of_states[part.start : part.start + len(before)] = before
        of_next_state = of_states[part]
        of_written[part] += rest_key[part] @ of_next_state
        before = (
            grown_query[part].transpose(-1, -2) @ grad[part] + of_next_state * chunk_decay[part]
        )
        before -= c.read[part].transpose(-1, -2) @ of_written[part]
    return of_written, of_states


def _empty_gradients(grad_THV, inputs, cu_seqlens):  # type: ignore[no-untyped-def]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]


packed_delta_rule_backward.register_fake(_empty_gradients)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_THV: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, cu_seqlens = ctx.saved_tensors
    return *packed_delta_rule_backward(grad_THV.contiguous(), inputs, cu_seqlens), None


packed_delta_rule.register_autograd(_backward, setup_context=_save_for_backward)
