"""The one attention function of all layers: attention within packed segments, never across.

Hugging Face layers look their attention up by name, so registering "packed" is enough: no layer
is patched. `Segments` travels through the layers' keyword arguments as `cu_seq_lens_q` (Hugging
Face's own name for it) or, where a layer forwards no keyword arguments, as its attention mask.

- CUDA, bf16/fp16: `torch.nn.attention.varlen.varlen_attn`, one kernel for all segments.
- Encoders with images of one size have no segments: scaled_dot_product_attention, on CUDA with the
  kernel that was measured to be faster (see `image_kernels`).
- CPU: a custom operator that calls the flash kernel once per run of equally long segments. The
  loop stays out of autograd and out of torch.compile, so a layer compiles with fullgraph=True
  and the number of segments does not recompile it.
- Elsewhere (fp32 on CUDA, bidirectional blocks, heads of more than 256):
  scaled_dot_product_attention per run of equally long segments; in compiled layers the operator of
  the next line, as the loop would be compiled once more for all other lengths.
- Capped scores (Gemma 2) and attention sinks (GPT-OSS): a custom operator of plain matrix products,
  on any device.

Where several ranks share a row, each calls this with its own tokens; heads are exchanged for tokens
first, and back afterwards (`torchmm.parallel.context`).

When text is generated, rows of one token for each prompt attend to what a cache has kept of the
prompts (`token_cache`).

Rejected: Hugging Face's "sdpa", whose mask is dense (T x T) and which lets samples see each other
whenever a cache or an all-ones mask is passed; flex_attention, which has no backward on CPU.

Shape legend: B batch, T tokens of all segments, S tokens of one segment, H query heads, G key and
value heads (G divides H), D head size.

Some tokens see each other in both directions although attention is causal: Gemma 3 lets the tokens
of an image see each other, PaliGemma those of a prompt. With causal attention alone losses are off
by 1e-3 or less: little enough to miss.

Shape legend: T tokens of a microbatch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from torchmm.common.device_copies import to_device
from torchmm.models.layers.attention_ops import capped_attention, equal_runs, packed_attention
from torchmm.models.layers.shared_rows import RowHeads
from torchmm.models.layers.token_cache import PackedCache, cached_attention

PACKED = "packed"
"""Name under which the attention function is registered."""
PACKED_UNSPLIT = "packed_flash"
"""Same function. Qwen's vision layers split their input themselves, with a device
synchronisation per layer, unless "flash" is in the name of the attention function."""

_WIDEST_HEAD = 256
"""Features of a head that the kernel for all segments can take."""
_HEAD_MULTIPLE = 8
"""What their number has to be a multiple of."""
_UNSUPPORTED = ("position_bias",)
KERNELS_FILE = Path(__file__).with_name("attention_kernels.json")
"""Kernels of encoders with images of one size, by card and head width. Written by
`benchmarks/one_gpu.py --parts attention --save-kernels`."""
_WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, *_WITHOUT_CUDNN]


@dataclass(frozen=True)
class Segments:
    """Where the segments of a packed row begin; made once per forward, without a device sync."""

    cu_seqlens: Tensor
    """int32 (segments + 1,) on the device of the activations: [0, ..., T]."""
    cu_seqlens_host: Tensor
    """The same on the CPU."""
    longest: Tensor
    """No values, (length of the longest segment + 1, 0), on the CPU: torch.compile can be told that
    a size changes, while it makes a graph of its own for a number, and for a size of one."""
    blocks_T: Tensor | None = None
    """int64: tokens of a segment with the same number, not negative, see each other both ways."""
    only_windows: bool = False
    """Whether only layers with a window do so."""
    row_heads: RowHeads | None = None
    """What exchanges tokens for heads, where other ranks have the rest of the tokens."""
    cache: PackedCache | None = None
    """What layers keep for tokens to come; None: nothing."""

    @classmethod
    def from_starts(
        cls,
        cu_seqlens: list[int],
        device: torch.device,
        blocks_T: Tensor | None = None,
        only_windows: bool = False,
        row_heads: RowHeads | None = None,
        cache: PackedCache | None = None,
    ) -> Segments:
        """Segments from their starts and the total length, [0, ..., T].

        Raises:
            ValueError: the numbers do not rise from 0.
        """
        lengths = [stop - start for start, stop in pairwise(cu_seqlens)]
        if not lengths or cu_seqlens[0] != 0 or min(lengths) <= 0:
            raise ValueError(f"cu_seqlens must increase from 0, but is {cu_seqlens}")
        host = torch.tensor(cu_seqlens, dtype=torch.int32)
        device_starts = to_device(host, device)
        longest = torch.empty(max(lengths) + 1, 0)
        return cls(device_starts, host, longest, blocks_T, only_windows, row_heads, cache)

    @property
    def max_length(self) -> int:
        """Tokens of the longest segment."""
        return len(self.longest) - 1


# torch 2.11 groups heads unasked and has no such argument.
_GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
)


class _Rules(NamedTuple):
    """Which tokens attend to which within a segment, and what is done to scores."""

    causal: bool
    window: int
    """Keys that a query sees, itself included; 0: all."""
    softcap: float | None
    sinks_H: Tensor | None = None
    """A further score for every query, whose weight is of no value."""


def _attend_segments(
    query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, s: Segments, scale: float, rules: _Rules
) -> Tensor:
    causal, window, softcap, sinks_H = rules
    inputs = (query_THD, key_TGD, value_TGD)
    host = s.cu_seqlens_host
    if softcap is not None or sinks_H is not None:
        sinks = [] if sinks_H is None else [sinks_H]
        return capped_attention([*inputs, *sinks], host, scale, softcap, causal, window, s.blocks_T)
    if query_THD.device.type == "cpu":
        return packed_attention(*inputs, host, scale, causal, window, s.blocks_T)[0]
    half = query_THD.dtype in (torch.bfloat16, torch.float16)
    fits = query_THD.shape[-1] <= _WIDEST_HEAD and s.blocks_T is None
    if query_THD.device.type == "cuda" and half and fits:
        features = value_TGD.shape[2]
        # Values narrower than keys (latent attention) and heads that are no multiple of 8 features
        # are widened by zeros. All others are not copied: layers compute in this layout.
        width = -(-query_THD.shape[2] // _HEAD_MULTIPLE) * _HEAD_MULTIPLE
        q, k, v = (
            x.contiguous() if x.shape[2] == width else functional.pad(x, (0, width - x.shape[2]))
            for x in inputs
        )
        starts = s.cu_seqlens
        longest = s.max_length
        back = window - 1
        reach = (back, 0) if causal else (-1, -1)
        out = varlen_attn(
            q, k, v, starts, starts, longest, longest, scale=scale, window_size=reach, **_GROUPED
        )
        assert isinstance(out, Tensor)
        return out[..., :features]
    if torch.compiler.is_compiling():  # which would be told the lengths, and compile for each
        return capped_attention([*inputs], host, scale, None, causal, window, s.blocks_T)
    outs = []
    for run in equal_runs(host):
        q, k, v = (run.view(x) for x in inputs)
        plain = s.blocks_T is None and not window
        mask = None if plain else run.visible(causal, window, s.blocks_T, q.device)
        out = functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=causal and plain, scale=scale, enable_gqa=True
        )
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs)


def _attend_packed(
    query_1HTD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    segments: Segments,
    scale: float,
    rules: _Rules,
) -> Tensor:
    """Return the attention output (1, T, H, D) of a packed sequence or of a rank's slice of it.

    Keys and values are those of the sequence or of a cache.
    """
    cache = segments.cache
    if cache is not None and not cache.whole_prompts:
        assert rules.causal
        return cached_attention(
            query_1HTD,
            key_BGSD,
            value_BGSD,
            visible_BS=cache.visible(key_BGSD.shape[2], rules.window),
            scale=scale,
            softcap=rules.softcap,
            sinks_H=rules.sinks_H,
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query_1HTD, key_BGSD, value_BGSD))
    if segments.only_windows and not rules.window:
        segments = replace(segments, blocks_T=None)
    rules = rules._replace(window=_needed(rules.window, segments))
    heads = segments.row_heads
    if heads is None:
        return _attend_segments(q, k, v, segments, scale, rules)[None]
    if rules.sinks_H is not None:
        sinks_H = heads.own_heads(rules.sinks_H, len(rules.sinks_H))
        rules = rules._replace(sinks_H=sinks_H)
    whole_q, whole_k, whole_v = heads.whole_rows(q, k, v)
    out_THD = _attend_segments(whole_q, whole_k, whole_v, segments, scale, rules)
    return heads.own_tokens(out_THD, query_1HTD.shape[1])[None]


def _needed(window: int, segments: Segments) -> int:
    """0 for a window that hides nothing; a compiled layer would be compiled once more for that."""
    return window if torch.compiler.is_compiling() or window < segments.max_length else 0


@cache
def image_kernels(card: str) -> Mapping[str, str]:
    """Return the kernel of encoders with images of one size by head width.

    Values are "flash" and "cudnn". Head widths without a measurement use "flash": cuDNN builds a
    plan for every new number of images, in forward and in backward, and the host waits for it.

    Args:
        card: name of the GPU, as `torch.cuda.get_device_name` returns it.
    """
    kernels: dict[str, dict[str, str]] = json.loads(KERNELS_FILE.read_text())
    return kernels.get(card, {})


@torch.compiler.assume_constant_result
def _prefers_cudnn(head_width: int, device_index: int) -> bool:
    """Return True if encoders with heads of this width use cuDNN on a GPU."""
    return image_kernels(_card(device_index)).get(str(head_width)) == "cudnn"


@cache
def _card(device_index: int) -> str:
    return torch.cuda.get_device_name(device_index)


def _attend_images(
    query_BHTD: Tensor,
    key_BGTD: Tensor,
    value_BGTD: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> Tensor:
    """Return the attention output (B, H, T, D) of images of one size, or of dense masks."""
    attend = partial(
        functional.scaled_dot_product_attention,
        query_BHTD,
        key_BGTD,
        value_BGTD,
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=scale,
        enable_gqa=query_BHTD.shape[1] != key_BGTD.shape[1],
    )
    if mask is not None or query_BHTD.device.type != "cuda":
        return attend()
    if _prefers_cudnn(query_BHTD.shape[-1], query_BHTD.device.index):
        with sdpa_kernel(_CUDNN_FIRST, set_priority=True):
            return attend()
    if torch.compiler.is_compiling():
        with sdpa_kernel(_WITHOUT_CUDNN):
            return attend()
    # Not `sdpa_kernel`, which needs more host time than the attention call itself.
    allowed = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        return attend()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(allowed)


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
    segments = kwargs.get("cu_seq_lens_q")
    if isinstance(attention_mask, Segments):
        segments, attention_mask = attention_mask, None
    causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True)) if causal is None else bool(causal)
    window, softcap = kwargs.get("sliding_window") or 0, kwargs.get("softcap")
    sinks_H = kwargs.get("s_aux")
    if isinstance(sinks_H, DTensor):  # each tensor-parallel rank has those of its heads
        sinks_H = sinks_H.to_local()
    asked = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    asked += ["attention_dropout"] if dropout else []
    if segments is None or not causal:
        asked += [name for name in ("sliding_window", "softcap") if kwargs.get(name)]
        asked += ["s_aux"] if sinks_H is not None else []
    if asked:
        raise ValueError(
            f"{type(module).__name__} uses {', '.join(asked)}, which packed attention does "
            "not support; disable it in the config of the model"
        )
    scale = query_BHTD.shape[-1] ** -0.5 if scaling is None else scaling
    if segments is None:
        out_BHTD = _attend_images(query_BHTD, key_BGTD, value_BGTD, attention_mask, causal, scale)
        return out_BHTD.transpose(1, 2), None
    if attention_mask is not None or query_BHTD.shape[0] != 1:
        raise ValueError("packed sequences require a batch size of 1 and no attention mask")
    rules = _Rules(causal, window, softcap, sinks_H)
    return _attend_packed(query_BHTD, key_BGTD, value_BGTD, segments, scale, rules), None


# Not among Hugging Face's masks: it makes none for names that it does not know there. With one that
# gives None it would still look, in every forward, whether positions begin anew, and wait for the
# device to tell. So a padding mask given to a whole Hugging Face model has no effect.
for _name in (PACKED, PACKED_UNSPLIT):
    AttentionInterface.register(_name, attention)


def image_blocks(images_T: Tensor, cu_seqlens: list[int]) -> Tensor:
    """int64 (T,): which run of neighbouring image tokens a token belongs to; -1: to none.

    Args:
        images_T: bool: placeholders.
        cu_seqlens: starts of samples, and T; no run goes from one to the next.
    """
    begins_T = images_T & ~torch.cat([images_T.new_zeros(1), images_T[:-1]])
    begins_T |= images_T & _starts(cu_seqlens, images_T.device)
    return torch.where(images_T, begins_T.cumsum(0) - 1, -1)


def prompt_blocks(targets_T: Tensor, cu_seqlens: list[int]) -> Tensor:
    """int64 (T,): the sample whose prompt a token belongs to; -1: to none.

    The prompt ends with the first token that has a target.

    Args:
        targets_T: bool: which tokens have one.
    """
    before_T = targets_T.cumsum(0) - targets_T.long()
    sample_T = _starts(cu_seqlens, targets_T.device).cumsum(0) - 1
    first_S = to_device(torch.tensor(cu_seqlens[:-1]), targets_T.device)
    return torch.where(before_T == before_T[first_S][sample_T], sample_T, -1)


def _starts(cu_seqlens: list[int], device: torch.device) -> Tensor:
    """bool (T,): first tokens of samples."""
    starts_T = torch.zeros(cu_seqlens[-1], dtype=torch.bool)
    starts_T[[start for start, _ in pairwise(cu_seqlens)]] = True
    return to_device(starts_T, device)
