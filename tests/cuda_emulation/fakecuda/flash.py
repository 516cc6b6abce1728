"""Matmul versions of attention kernels that exist only on CUDA, with the same input checks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

library = torch.library.Library("aten", "IMPL", "CUDA")


def _segments(cu_q: Tensor, cu_k: Tensor) -> Iterator[tuple[slice, slice]]:
    q, k = cu_q.tolist(), cu_k.tolist()
    for i in range(len(q) - 1):
        yield slice(q[i], q[i + 1]), slice(k[i], k[i + 1])


def _attention_mask(n: int, m: int, causal: bool, left: int | None, right: int | None) -> Tensor:
    i, j = torch.arange(n)[:, None] + (m - n), torch.arange(m)
    mask = torch.ones(n, m, dtype=torch.bool)
    if causal:
        mask &= j <= i
    if left is not None and left >= 0:
        mask &= j >= i - left
    if right is not None and right >= 0:
        mask &= j <= i + right
    return mask


def _scores(q, k, groups, scale, mask):
    k = k.repeat_interleave(groups, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    return scores.masked_fill(~mask, -torch.inf)


def _check(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None) -> None:
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        raise RuntimeError(f"head_size {q.shape[-1]} should be a multiple of 8, at most 256")
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if cu is None or cu.dtype != torch.int32 or cu.device.type != "cuda":
            raise RuntimeError(f"{name} must have dtype int32 and be on CUDA")
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        raise RuntimeError("Input tensor must have contiguous last dimension")


def forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask,
    *, scale=None, window_size_left=None, window_size_right=None, **_,
):  # fmt: skip
    _check(query, key, value, cum_seq_q, cum_seq_k)
    q, k, v = (t.cpu().float() for t in (query, key, value))
    cu_q, cu_k = cum_seq_q.cpu(), cum_seq_k.cpu()
    if int((cu_q[1:] - cu_q[:-1]).max()) > max_q:
        raise RuntimeError(f"max_seqlen_q = {max_q} is shorter than a segment")
    if int(cu_q[-1]) != len(q):
        raise RuntimeError(f"cu_seqlens_q ends at {int(cu_q[-1])}, there are {len(q)} rows")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out, lse, groups = (
        torch.empty_like(q),
        torch.empty(q.shape[1], len(q)),
        q.shape[1] // k.shape[1],
    )
    for a, b in _segments(cu_q, cu_k):
        mask = _attention_mask(
            a.stop - a.start, b.stop - b.start, is_causal, window_size_left, window_size_right
        )
        scores = _scores(q[a], k[b], groups, scale, mask)
        lse[:, a] = scores.logsumexp(-1)
        out[a] = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v[b].repeat_interleave(groups, 1))
    device = query.device
    rng = torch.zeros(2, dtype=torch.uint64).to(device)
    unused = torch.zeros((), dtype=torch.uint64).to(device)
    return out.to(query.dtype).to(device), lse.to(device), rng, unused, query.new_empty(0)


def backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
    is_causal, rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    _check(query, key, value, cum_seq_q, cum_seq_k)
    g, q, k, v, o = (t.cpu().float() for t in (grad_out, query, key, value, out))
    lse, groups = logsumexp.cpu(), q.shape[1] // k.shape[1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for a, b in _segments(cum_seq_q.cpu(), cum_seq_k.cpu()):
        mask = _attention_mask(
            a.stop - a.start, b.stop - b.start, is_causal, window_size_left, window_size_right
        )
        p = (_scores(q[a], k[b], groups, scale, mask) - lse[:, a, None]).exp()
        grad_p = torch.einsum("ihd,jhd->hij", g[a], v[b].repeat_interleave(groups, 1))
        ds = p * (grad_p - (g[a] * o[a]).sum(-1).T[..., None]) * scale
        dq[a] = torch.einsum("hij,jhd->ihd", ds, k[b].repeat_interleave(groups, 1))
        shape = (b.stop - b.start, k.shape[1], groups, -1)
        dk[b] = torch.einsum("hij,ihd->jhd", ds, q[a]).reshape(shape).sum(2)
        dv[b] = torch.einsum("hij,ihd->jhd", p, g[a]).reshape(shape).sum(2)
    return tuple(x.to(query.dtype).to(query.device) for x in (dq, dk, dv))


def as_one(function: Callable, name: str) -> Callable:
    """Log `function`, which returns a tuple of tensors, as one kernel."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        from fakecuda import ext

        logged = ext.logging_on()
        ext.stop_log()
        try:
            results = function(*args, **kwargs)
        finally:
            if logged:
                ext.start_log()
        ext.note_kernel(
            name, [t for t in results if t.numel()], [a for a in args if isinstance(a, Tensor)]
        )
        return results

    return call


library.impl("_flash_attention_forward", as_one(forward, "aten::_flash_attention_forward"))
library.impl("_flash_attention_backward", as_one(backward, "aten::_flash_attention_backward"))
