"""The one attention function of all layers: attention within packed segments, never across.

Hugging Face layers look their attention up by name, so registering "packed" is enough: no layer
is patched. `Segments` travels through the layers' keyword arguments as `cu_seq_lens_q` (Hugging
Face's own name for it) or, where a layer forwards no keyword arguments, as its attention mask.

- CUDA, bf16/fp16: `torch.nn.attention.varlen.varlen_attn`, one kernel for all segments.
- CPU: a custom operator that calls the flash kernel once per run of equally long segments. The
  loop stays out of autograd and out of torch.compile, so a layer compiles with fullgraph=True
  and the number of segments does not recompile it.
- Elsewhere (fp32 on CUDA): scaled_dot_product_attention per segment.

Rejected: Hugging Face's "sdpa", whose mask is dense (T x T) and which lets samples see each other
whenever a cache or an all-ones mask is passed; flex_attention, which has no backward on CPU.

Shape legend: B batch, T tokens of all segments, S tokens of one segment, H query heads, G key and
value heads (G divides H), D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

PACKED = "packed"
"""Name under which the attention function is registered."""
PACKED_UNSPLIT = "packed_flash"
"""Same function. Qwen's vision layers split their input themselves, with a device
synchronisation per layer, unless "flash" is in the name of the attention function."""

_UNSUPPORTED = ("softcap", "sliding_window", "s_aux", "position_bias")


@dataclass(frozen=True)
class Segments:
    """Where the segments of a packed row begin; made once per forward, without a device sync."""

    cu_seqlens: Tensor
    """int32 (segments + 1,) on the device of the activations: [0, ..., T]."""
    cu_seqlens_host: Tensor
    """The same on the CPU."""
    max_length: int
    """Longest segment."""

    @classmethod
    def from_starts(cls, cu_seqlens: list[int], device: torch.device) -> Segments:
        """Segments from their starts and the total length, [0, ..., T].

        Raises:
            ValueError: the numbers do not rise from 0.
        """
        lengths = [stop - start for start, stop in pairwise(cu_seqlens)]
        if not lengths or cu_seqlens[0] != 0 or min(lengths) <= 0:
            raise ValueError(f"cu_seqlens must rise from 0, got {cu_seqlens}")
        host = torch.tensor(cu_seqlens, dtype=torch.int32)
        return cls(to_device(host, device), host, max(lengths))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small CPU tensor to `device` without waiting for the device."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _equal_runs(cu_seqlens: Tensor) -> Iterator[tuple[int, int, int]]:
    """(start, segments, length) of every run of equally long neighbours."""
    start = 0
    for length, run in groupby(b - a for a, b in pairwise(cu_seqlens.tolist())):
        segments = len(list(run))
        yield start, segments, length
        start += segments * length


def _view(x_THD: Tensor, start: int, segments: int, length: int) -> Tensor:
    """(segments, H, length, D) view of a run."""
    part = x_THD[start : start + segments * length]
    return part.unflatten(0, (segments, length)).transpose(1, 2)


@torch.library.custom_op("torchmm::packed_attention", mutates_args=(), device_types="cpu")
def packed_attention(
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Attention within segments on CPU.

    Returns:
        Output (T, H, D) and the log-sum-exp of the scores (T, H), fp32, for backward.
    """
    out_THD = torch.empty_like(query_THD, memory_format=torch.contiguous_format)
    lse_TH = query_THD.new_empty(query_THD.shape[:2], dtype=_lse_dtype(query_THD))
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for run in _equal_runs(cu_seqlens):
        q, k, v = (_view(x, *run) for x in (query_THD, key_TGD, value_TGD))
        out, lse = forward(q, k, v, 0.0, causal, scale=scale)
        _view(out_THD, *run).copy_(out)
        _view(lse_TH[..., None], *run).copy_(lse[..., None])
    return out_THD, lse_TH


def _lse_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


@packed_attention.register_fake
def _(query_THD, key_TGD, value_TGD, cu_seqlens, scale, causal):  # type: ignore[no-untyped-def]
    lse_TH = query_THD.new_empty(query_THD.shape[:2], dtype=_lse_dtype(query_THD))
    return torch.empty_like(query_THD, memory_format=torch.contiguous_format), lse_TH


@torch.library.custom_op("torchmm::packed_attention_backward", mutates_args=(), device_types="cpu")
def packed_attention_backward(
    grad_THD: Tensor,
    inputs: list[Tensor],
    out_THD: Tensor,
    lse_TH: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    causal: bool,
) -> list[Tensor]:
    """Gradients of `packed_attention`'s `inputs`: query, key and value."""
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    for run in _equal_runs(cu_seqlens):
        grad, q, k, v, out = (_view(x, *run) for x in (grad_THD, *inputs, out_THD))
        lse = _view(lse_TH[..., None], *run)[..., 0].contiguous()
        parts = backward(grad, q, k, v, out, lse, 0.0, causal, scale=scale)
        for whole, part in zip(grads, parts, strict=True):
            _view(whole, *run).copy_(part)
    return grads


@packed_attention_backward.register_fake
def _(grad_THD, inputs, out_THD, lse_TH, cu_seqlens, scale, causal):  # type: ignore[no-untyped-def]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, cu_seqlens, ctx.scale, ctx.causal = inputs
    ctx.save_for_backward(query, key, value, *output, cu_seqlens)


def _backward(ctx: Any, grad_THD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, out_THD, lse_TH, cu_seqlens = ctx.saved_tensors
    # The kernel needs a gradient with unit stride; an expanded one has stride 0.
    grads = packed_attention_backward(
        grad_THD.contiguous(), inputs, out_THD, lse_TH, cu_seqlens, ctx.scale, ctx.causal
    )
    return *grads, None, None, None


packed_attention.register_autograd(_backward, setup_context=_save_for_backward)


# torch 2.11 groups heads unasked and has no such argument.
_GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
)


def _attend_segments(
    query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, s: Segments, scale: float, causal: bool
) -> Tensor:
    if query_THD.device.type == "cpu":
        return packed_attention(query_THD, key_TGD, value_TGD, s.cu_seqlens_host, scale, causal)[0]
    if query_THD.device.type == "cuda" and query_THD.dtype in (torch.bfloat16, torch.float16):
        out = varlen_attn(
            query_THD.contiguous(),  # no copy: layers compute in this layout
            key_TGD.contiguous(),
            value_TGD.contiguous(),
            s.cu_seqlens,
            s.cu_seqlens,
            s.max_length,
            s.max_length,
            scale=scale,
            window_size=(-1, 0) if causal else (-1, -1),
            **_GROUPED,
        )
        assert isinstance(out, Tensor)
        return out
    outs = []
    for run in _equal_runs(s.cu_seqlens_host):
        q, k, v = (_view(x, *run) for x in (query_THD, key_TGD, value_TGD))
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=True
        )
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs)


def attention(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BGTD: Tensor,
    value_BGTD: Tensor,
    attention_mask: Tensor | Segments | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention with the signature Hugging Face layers call.

    Args:
        attention_mask: a dense mask, `Segments`, or None.
        kwargs: what the layer was called with; `cu_seq_lens_q` may hold `Segments`.

    Returns:
        Output (B, T, H, D) and no attention weights.

    Raises:
        ValueError: the layer asks for something this function does not do.
    """
    asked = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    asked += ["attention_dropout"] if dropout else []
    if asked:
        raise ValueError(
            f"{type(module).__name__} uses {', '.join(asked)}, which packed attention does not "
            "implement; switch it off in the model's config"
        )
    causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True)) if causal is None else bool(causal)
    scale = query_BHTD.shape[-1] ** -0.5 if scaling is None else scaling
    segments = kwargs.get("cu_seq_lens_q")
    if isinstance(attention_mask, Segments):
        segments, attention_mask = attention_mask, None
    if segments is None:
        out_BHTD = functional.scaled_dot_product_attention(
            query_BHTD,
            key_BGTD,
            value_BGTD,
            attn_mask=attention_mask,
            is_causal=causal and attention_mask is None,
            scale=scale,
            enable_gqa=query_BHTD.shape[1] != key_BGTD.shape[1],
        )
        return out_BHTD.transpose(1, 2), None
    if attention_mask is not None or query_BHTD.shape[0] != 1:
        raise ValueError("packed segments need a single row and no attention mask")
    q, k, v = (x[0].transpose(0, 1) for x in (query_BHTD, key_BGTD, value_BGTD))
    return _attend_segments(q, k, v, segments, scale, causal)[None], None


def padding_mask(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """Mask for the layers: none, unless the caller gave a padding mask, which is honoured."""
    if attention_mask is None:
        return None
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(attention_mask=attention_mask, **kwargs)


for _name in (PACKED, PACKED_UNSPLIT):
    AttentionInterface.register(_name, attention)
    AttentionMaskInterface.register(_name, padding_mask)
