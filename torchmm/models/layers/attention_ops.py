"""Attention within packed segments as custom operators, which are opaque to torch.compile.

`packed_attention` calls the flash kernel of torch for CPUs once per run of equally long segments.

`capped_attention` supports logit soft capping (Gemma 2) and attention sinks (GPT-OSS), which no
kernel of torch supports. Compiled layers also use it on devices without a variable-length kernel.
It consists of matmuls, runs on any device, and stores the scores of one run only. A sink is an
additional score of each head that increases the softmax denominator and has no value.

Masks. Causal attention may have a sliding window. Attention may be bidirectional within a block of
tokens (an image or a prompt). As in Gemma 3 of Hugging Face, a window also limits the distance to
preceding tokens of the same block.

Shape legend: T tokens of all segments, N segments of a run, S tokens of one segment, H query heads,
G key and value heads (G divides H), R = H / G, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor


class SegmentRun(NamedTuple):
    """A run of consecutive segments of the same length."""

    start: int
    segments: int
    length: int

    def view(self, x_THD: Tensor) -> Tensor:
        """Return the view (N, H, S, D) of the run in a packed tensor (T, H, D)."""
        part = x_THD[self.start : self.start + self.segments * self.length]
        return part.unflatten(0, (self.segments, self.length)).transpose(1, 2)

    def visible_keys(
        self, causal: bool, window: int, blocks_T: Tensor | None, device: torch.device
    ) -> Tensor:
        """Return the mask of visible keys, bool: (S, S), or (N, 1, S, S) with blocks.

        Args:
            causal: Whether attention is causal.
            window: Maximum number of visible keys, including the token itself. Use 0 for all.
            blocks_T: (T,), int64. Tokens with the same nonnegative value see each other.
            device: Device of the mask.
        """
        at_S = torch.arange(self.length, device=device)
        behind_SS = at_S[:, None] - at_S
        visible = behind_SS >= 0 if causal else torch.ones_like(behind_SS, dtype=torch.bool)
        if blocks_T is not None:
            part = blocks_T[self.start : self.start + self.segments * self.length]
            blocks = part.view(self.segments, 1, self.length)
            same = blocks[..., :, None] == blocks[..., None, :]
            visible = visible | (same & (blocks[..., :, None] >= 0))
        return visible & (behind_SS < window) if window else visible


def iter_segment_runs(cu_seqlens: Tensor) -> Iterator[SegmentRun]:
    """Yield the runs of all segments.

    Args:
        cu_seqlens: (segments + 1,), int32, starts and total length, on the CPU.
    """
    start = 0
    for length, run in groupby(b - a for a, b in pairwise(cu_seqlens.tolist())):
        segments = len(list(run))
        yield SegmentRun(start, segments, length)
        start += segments * length


def _bias(
    run: SegmentRun, example: Tensor, causal: bool, window: int, blocks: Tensor | None
) -> Tensor | None:
    """Return the bias of the scores, or None if the causal mask of the kernel suffices."""
    if blocks is None and (not window or window >= run.length):
        return None  # a window as long as the segment masks no key
    visible = run.visible_keys(causal, window, blocks, example.device)
    return torch.zeros(visible.shape, dtype=example.dtype).masked_fill_(~visible, -torch.inf)


@torch.library.custom_op("torchmm::packed_attention", mutates_args=(), device_types="cpu")
def packed_attention(
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    causal: bool,
    window: int = 0,
    blocks_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the attention within segments on CPU.

    Args:
        query_THD: (T, H, D), queries.
        key_TGD: (T, G, D), keys.
        value_TGD: (T, G, D), values. The features may be fewer than those of keys.
        cu_seqlens: (segments + 1,), int32, starts and total length, on the CPU.
        scale: Factor of the scores.
        causal: Whether attention is causal.
        window: Maximum number of visible keys, including the token itself. Use 0 for all.
        blocks_T: (T,), int64. Tokens of a segment with the same nonnegative value attend to each
            other in both directions.

    Returns:
        Output (T, H, D) and the log-sum-exp of the scores (T, H), float32, for the backward pass.
    """
    width = value_TGD.shape[2]
    value_TGD = _pad_features(value_TGD, query_THD)
    out_THD = torch.empty_like(query_THD, memory_format=torch.contiguous_format)
    lse_TH = query_THD.new_empty(query_THD.shape[:2], dtype=_lse_dtype(query_THD))
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for run in iter_segment_runs(cu_seqlens):
        q, k, v = (run.view(x) for x in (query_THD, key_TGD, value_TGD))
        bias = _bias(run, q, causal, window, blocks_T)
        out, lse = forward(q, k, v, 0.0, causal and bias is None, attn_mask=bias, scale=scale)
        run.view(out_THD).copy_(out)
        run.view(lse_TH[..., None]).copy_(lse[..., None])
    return _drop_padding(out_THD, width), lse_TH


def _pad_features(x_THD: Tensor, like_THD: Tensor) -> Tensor:
    """Pad features with zeros to the size of `like_THD`, which the kernel requires of values."""
    missing = like_THD.shape[2] - x_THD.shape[2]
    return torch.nn.functional.pad(x_THD, (0, missing)) if missing else x_THD


def _drop_padding(x_THD: Tensor, width: int) -> Tensor:
    return x_THD if x_THD.shape[2] == width else x_THD[..., :width].contiguous()


def _empty_output(query_THD: Tensor, value_TGD: Tensor) -> Tensor:
    return query_THD.new_empty((*query_THD.shape[:2], value_TGD.shape[2]))


def _lse_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


@packed_attention.register_fake
def _(query_THD, key_TGD, value_TGD, cu_seqlens, scale, causal, window=0, blocks_T=None):  # type: ignore[no-untyped-def]
    lse_TH = query_THD.new_empty(query_THD.shape[:2], dtype=_lse_dtype(query_THD))
    return _empty_output(query_THD, value_TGD), lse_TH


@torch.library.custom_op("torchmm::packed_attention_backward", mutates_args=(), device_types="cpu")
def packed_attention_backward(
    grad_THD: Tensor,
    inputs: list[Tensor],
    outputs: list[Tensor],
    cu_seqlens: Tensor,
    scale: float,
    causal: bool,
    window: int = 0,
    blocks_T: Tensor | None = None,
) -> list[Tensor]:
    """Return the gradients of query, key and value of `packed_attention`.

    Args:
        grad_THD: (T, H, D), gradient of the output.
        inputs: Query, key and value.
        outputs: Results of `packed_attention`.
        cu_seqlens: As in `packed_attention`, like all other arguments.
        scale: Factor of the scores.
        causal: Whether attention is causal.
        window: Maximum number of visible keys.
        blocks_T: Bidirectional blocks.
    """
    out_THD, lse_TH = outputs
    width = inputs[2].shape[2]
    wide = [inputs[2], out_THD, grad_THD]
    value_TGD, out_THD, grad_THD = (_pad_features(x_THD, inputs[0]) for x_THD in wide)
    inputs = [*inputs[:2], value_TGD]
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    for run in iter_segment_runs(cu_seqlens):
        grad, q, k, v, out = (run.view(x) for x in (grad_THD, *inputs, out_THD))
        lse = run.view(lse_TH[..., None])[..., 0].contiguous()
        bias = _bias(run, q, causal, window, blocks_T)
        masked = causal and bias is None
        parts = backward(grad, q, k, v, out, lse, 0.0, masked, attn_mask=bias, scale=scale)
        for grad_of_all, part in zip(grads, parts, strict=True):
            run.view(grad_of_all).copy_(part)
    return [*grads[:2], _drop_padding(grads[2], width)]


def _empty_gradients(grad_THD, inputs, *_, **__):  # type: ignore[no-untyped-def]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]


packed_attention_backward.register_fake(_empty_gradients)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, cu_seqlens, ctx.scale, ctx.causal, ctx.window, blocks_T = inputs
    ctx.save_for_backward(query, key, value, *output, cu_seqlens, blocks_T)


def _backward(ctx: Any, grad_THD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, cu_seqlens, blocks_T = ctx.saved_tensors
    # The kernel needs a gradient with unit stride; an expanded one has stride 0.
    grads = packed_attention_backward(
        grad_THD.contiguous(),
        tensors[:3],
        tensors[3:],
        cu_seqlens,
        ctx.scale,
        ctx.causal,
        ctx.window,
        blocks_T,
    )
    return *grads, None, None, None, None, None


packed_attention.register_autograd(_backward, setup_context=_save_for_backward)


@torch.library.custom_op("torchmm::capped_attention", mutates_args=())
def capped_attention(
    inputs: list[Tensor],
    cu_seqlens: Tensor,
    scale: float,
    softcap: float | None,
    causal: bool,
    window: int,
    blocks_T: Tensor | None,
) -> Tensor:
    """Return the attention within segments, with soft capping and attention sinks.

    Scores s become `softcap` tanh(s / `softcap`).

    Args:
        inputs: Query (T, H, D), key (T, G, D), value (T, G, D) and optionally sinks (H,), an
            additional score of each head whose weight is dropped.
        cu_seqlens: (segments + 1,), int32, starts and total length, on the CPU.
        scale: Factor of the scores before the cap.
        softcap: Bound of the scores, or None without a cap.
        causal: Whether attention is causal.
        window: As for `packed_attention`.
        blocks_T: As for `packed_attention`.

    Returns:
        Output (T, H, D).
    """
    out_THD = _empty_output(inputs[0], inputs[2])
    for run in iter_segment_runs(cu_seqlens):
        q, k, v = _group_heads(run, *inputs[:3])
        hidden = _masked_keys(run, q, causal, window, blocks_T)
        _, weights, _ = _attention_weights(q, k, hidden, scale, softcap, _sinks(inputs))
        run.view(out_THD).copy_((weights.to(v.dtype) @ v).flatten(1, 2))
    return out_THD


def _sinks(inputs: list[Tensor]) -> Tensor | None:
    return inputs[3] if len(inputs) > 3 else None


def _group_heads(run: SegmentRun, query: Tensor, *keys_values: Tensor) -> tuple[Tensor, ...]:
    """Return (N, G, R, S, D) of the query, and (N, G, 1, S, D) of keys and values."""
    groups = keys_values[0].shape[1]
    return run.view(query).unflatten(1, (groups, -1)), *(
        run.view(x)[:, :, None] for x in keys_values
    )


def _masked_keys(
    run: SegmentRun, q: Tensor, causal: bool, window: int, blocks_T: Tensor | None
) -> Tensor:
    """Return the mask of hidden keys, bool: (S, S) or (N, 1, 1, S, S)."""
    visible = run.visible_keys(causal, window, blocks_T, q.device)
    return ~(visible if blocks_T is None else visible[:, :, None])


def _attention_weights(
    q: Tensor,
    k: Tensor,
    hidden: Tensor,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return attention weights and the derivative of the cap.

    Returns:
        Derivative of the cap (N, G, R, S, S), or a scalar without a cap. Softmax weights
        (N, G, R, S, S), float32. Weights of the sinks (N, G, R, S), or None without sinks.
    """
    scores = (q @ k.transpose(-1, -2)) * scale
    slope = torch.ones((), device=q.device, dtype=q.dtype)
    if softcap is not None:
        capped = torch.tanh(scores / softcap)
        scores = capped * softcap
        slope = 1 - capped.square()
    scores = scores.masked_fill(hidden, -torch.inf)
    dtype = _lse_dtype(q)
    if sinks_H is None:
        return slope, scores.softmax(-1, dtype=dtype), None
    sinks = sinks_H.to(scores.dtype).view(1, *q.shape[1:3], 1, 1)
    with_sinks = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
    weights = with_sinks.softmax(-1, dtype=dtype)
    return slope, weights[..., :-1], weights[..., -1]


@capped_attention.register_fake
def _(inputs, cu_seqlens, scale, softcap, causal, window, blocks_T):  # type: ignore[no-untyped-def]
    return _empty_output(inputs[0], inputs[2])


@torch.library.custom_op("torchmm::capped_attention_backward", mutates_args=())
def capped_attention_backward(
    grad_THD: Tensor,
    inputs: list[Tensor],
    cu_seqlens: Tensor,
    scale: float,
    softcap: float | None,
    causal: bool,
    window: int,
    blocks_T: Tensor | None,
) -> list[Tensor]:
    """Return the gradients of the `inputs` of `capped_attention`. The scores are recomputed."""
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:3]]
    sinks_H = _sinks(inputs)
    of_sinks = [] if sinks_H is None else [torch.zeros_like(sinks_H)]
    for run in iter_segment_runs(cu_seqlens):
        q, k, v = _group_heads(run, *inputs[:3])
        grad = run.view(grad_THD).unflatten(1, (k.shape[1], -1))
        hidden = _masked_keys(run, q, causal, window, blocks_T)
        # Recomputed, because saved scores would need S x S values per head and segment.
        slope, weights, sink_weights = _attention_weights(q, k, hidden, scale, softcap, sinks_H)
        of_weights = (grad @ v.transpose(-1, -2)).to(weights.dtype)
        # Gradient of softmax, then of c tanh(s / c), whose derivative is 1 - tanh(s / c)**2.
        mean = (weights * of_weights).sum(-1, keepdim=True)
        of_scores = (weights * (of_weights - mean)).to(q.dtype) * slope * scale
        if sink_weights is not None:
            of_sinks[0] -= (
                (sink_weights * mean.squeeze(-1)).sum((0, 3)).flatten().to(of_sinks[0].dtype)
            )
        parts = (  # R query heads share each key and value head, whose gradients are sums
            of_scores @ k,
            (of_scores.transpose(-1, -2) @ q).sum(2, keepdim=True),
            (weights.to(grad.dtype).transpose(-1, -2) @ grad).sum(2, keepdim=True),
        )
        for grad_of_all, part in zip(grads, parts, strict=True):
            run.view(grad_of_all).copy_(part.flatten(1, 2))
    return grads + of_sinks


capped_attention_backward.register_fake(_empty_gradients)


def _save_capped(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors, cu_seqlens, ctx.scale, ctx.softcap, ctx.causal, ctx.window, blocks_T = inputs
    ctx.save_for_backward(cu_seqlens, blocks_T, *tensors)


def _capped_backward(ctx: Any, grad_THD: Tensor) -> tuple[list[Tensor] | None, ...]:
    cu_seqlens, blocks_T, *inputs = ctx.saved_tensors
    grads = capped_attention_backward(
        grad_THD, inputs, cu_seqlens, ctx.scale, ctx.softcap, ctx.causal, ctx.window, blocks_T
    )
    return grads, None, None, None, None, None, None


capped_attention.register_autograd(_capped_backward, setup_context=_save_capped)
