"""The attention function of all layers: attention within packed segments, never across segments.

Hugging Face layers select their attention function by name, so that registering "packed" needs no
patched layers. Layers receive `Segments` as the keyword argument `cu_seq_lens_q` (a name of Hugging
Face), or as the attention mask if a layer does not forward keyword arguments.

Kernels:

- CUDA, bf16 or fp16: `torch.nn.attention.varlen.varlen_attn`, one kernel for all segments.
- Encoders with images of one size, without segments: `scaled_dot_product_attention`, on CUDA with
  the kernel that was faster in measurements (see `image_kernels`).
- CPU: a custom operator that calls the flash kernel once per run of equally long segments. The
  loop is opaque to autograd and torch.compile. A layer therefore compiles with fullgraph=True, and
  different numbers of segments do not recompile it.
- Soft capping (Gemma 2) and attention sinks (GPT-OSS): a custom operator of matmuls.
- All other cases (fp32 on CUDA, bidirectional blocks, more than 256 features per head):
  `scaled_dot_product_attention` per run of equally long segments. Compiled layers use the custom
  operator of matmuls instead, because the loop would be recompiled for different lengths.

With context parallelism, each rank calls the function with its tokens. An all-to-all exchanges
tokens for heads before attention and back afterwards (`torchmm.parallel.context`).

During text generation, sequences of one new token per prompt attend to cached keys
(`kv_cache`).

Bidirectional blocks. In Gemma 3 the tokens of an image attend to each other, and in PaliGemma the
tokens of a prompt. Causal attention alone changes losses by at most 1e-3, which is easy to miss.

"sdpa" of Hugging Face is not used: its mask is dense (T x T), and samples attend to each other if a
cache or an all-ones mask is passed. flex_attention has no backward pass on CPU.

Shape legend: B batch, T tokens of all segments, S tokens of one segment, H query heads, G key and
value heads (G divides H), D head size.
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
from torchmm.models.layers.attention_ops import (
    capped_attention,
    iter_segment_runs,
    packed_attention,
)
from torchmm.models.layers.kv_cache import PackedCache, cached_attention
from torchmm.models.layers.sequence_exchange import HeadExchange

PACKED = "packed"
"""Name under which the attention function is registered."""
PACKED_FLASH = "packed_flash"
"""Second name of the same function, for Qwen vision layers.

These layers split their input with one device synchronization per layer, unless the name of the
attention function contains "flash".
"""

_WIDEST_HEAD = 256
"""Maximum number of features per head for `varlen_attn`."""
_HEAD_MULTIPLE = 8
"""Divisor of the number of features per head that `varlen_attn` requires."""
_UNSUPPORTED = ("position_bias",)
KERNELS_FILE = Path(__file__).with_name("attention_kernels.json")
"""File with the kernels of encoders with images of one size, by GPU name and head size.

`benchmarks/one_gpu.py --parts attention --save-kernels` writes it.
"""
_WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, *_WITHOUT_CUDNN]


@dataclass(frozen=True)
class Segments:
    """Boundaries of the segments of a packed sequence.

    They are built once per forward pass, without a device synchronization.
    """

    cu_seqlens: Tensor
    """(segments + 1,), int32: [0, ..., T], on the device of the activations."""
    cu_seqlens_host: Tensor
    """Copy of `cu_seqlens` on the CPU."""
    longest: Tensor
    """Empty CPU tensor of shape (length of the longest segment + 1, 0), which stores the length.

    torch.compile can mark a tensor dimension as dynamic, but specializes graphs for Python numbers
    and for dimensions of size 1.
    """
    blocks_T: Tensor | None = None
    """(T,), int64. Tokens of a segment with the same nonnegative value attend to each other."""
    blocks_in_windows_only: bool = False
    """Whether `blocks_T` applies only to layers with a sliding window."""
    head_exchange: HeadExchange | None = None
    """Exchange of tokens for heads with context-parallel ranks, or None."""
    cache: PackedCache | None = None
    """Cache for text generation, or None."""

    @classmethod
    def from_starts(
        cls,
        cu_seqlens: list[int],
        device: torch.device,
        blocks_T: Tensor | None = None,
        blocks_in_windows_only: bool = False,
        head_exchange: HeadExchange | None = None,
        cache: PackedCache | None = None,
    ) -> Segments:
        """Build segments from their starts and the total length.

        Args:
            cu_seqlens: [0, ..., T].
            device: Device of the activations.
            blocks_T: Value of the field, as all following arguments.
            blocks_in_windows_only: Whether blocks apply only to layers with a sliding window.
            head_exchange: Exchange of tokens for heads.
            cache: Cache for text generation.

        Raises:
            ValueError: The values do not increase from 0.
        """
        lengths = [stop - start for start, stop in pairwise(cu_seqlens)]
        if not lengths or cu_seqlens[0] != 0 or min(lengths) <= 0:
            raise ValueError(f"cu_seqlens must increase from 0, but is {cu_seqlens}")
        host = torch.tensor(cu_seqlens, dtype=torch.int32)
        device_starts = to_device(host, device)
        longest = torch.empty(max(lengths) + 1, 0)
        return cls(
            device_starts, host, longest, blocks_T, blocks_in_windows_only, head_exchange, cache
        )

    @property
    def max_length(self) -> int:
        """Number of tokens of the longest segment."""
        return len(self.longest) - 1


# torch 2.11 always supports grouped heads and has no such argument.
_GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
)


class _MaskRules(NamedTuple):
    """Mask and score modifications of attention within a segment."""

    causal: bool
    window: int
    """Maximum number of visible keys, including the token itself. 0 means all."""
    softcap: float | None
    """Bound of the scores, or None."""
    sinks_H: Tensor | None = None
    """(H,), additional score of each head, whose weight is dropped."""


def _attend_segments(
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    s: Segments,
    scale: float,
    rules: _MaskRules,
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
        # Values with fewer features than keys (latent attention) and heads whose features are not a
        # multiple of 8 are padded with zeros. Other tensors are not copied.
        width = -(-query_THD.shape[2] // _HEAD_MULTIPLE) * _HEAD_MULTIPLE
        q, k, v = (
            x.contiguous() if x.shape[2] == width else functional.pad(x, (0, width - x.shape[2]))
            for x in inputs
        )
        starts = s.cu_seqlens
        longest = s.max_length
        past_tokens = window - 1
        window_size = (past_tokens, 0) if causal else (-1, -1)
        out = varlen_attn(
            q,
            k,
            v,
            starts,
            starts,
            longest,
            longest,
            scale=scale,
            window_size=window_size,
            **_GROUPED,
        )
        assert isinstance(out, Tensor)
        return out[..., :features]
    if torch.compiler.is_compiling():  # the loop would be recompiled for different lengths
        return capped_attention([*inputs], host, scale, None, causal, window, s.blocks_T)
    outs = []
    for run in iter_segment_runs(host):
        q, k, v = (run.view(x) for x in inputs)
        is_maskless = s.blocks_T is None and not window
        mask = None if is_maskless else run.visible_keys(causal, window, s.blocks_T, q.device)
        out = functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=causal and is_maskless, scale=scale, enable_gqa=True
        )
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs)


def _attend_packed(
    query_1HTD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    segments: Segments,
    scale: float,
    rules: _MaskRules,
) -> Tensor:
    """Return the attention output (1, T, H, D) of a packed sequence or of a rank's slice of it.

    Keys and values are those of the sequence or of a cache.
    """
    cache = segments.cache
    if cache is not None and not cache.has_full_prompts:
        assert rules.causal
        return cached_attention(
            query_1HTD,
            key_BGSD,
            value_BGSD,
            visible_BS=cache.visible_keys(key_BGSD.shape[2], rules.window),
            scale=scale,
            softcap=rules.softcap,
            sinks_H=rules.sinks_H,
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query_1HTD, key_BGSD, value_BGSD))
    if segments.blocks_in_windows_only and not rules.window:
        segments = replace(segments, blocks_T=None)
    rules = rules._replace(window=_effective_window(rules.window, segments))
    heads = segments.head_exchange
    if heads is None:
        return _attend_segments(q, k, v, segments, scale, rules)[None]
    if rules.sinks_H is not None:
        sinks_H = heads.select_local_heads(rules.sinks_H, len(rules.sinks_H))
        rules = rules._replace(sinks_H=sinks_H)
    whole_q, whole_k, whole_v = heads.to_local_heads(q, k, v)
    out_THD = _attend_segments(whole_q, whole_k, whole_v, segments, scale, rules)
    return heads.to_local_tokens(out_THD, query_1HTD.shape[1])[None]


def _effective_window(window: int, segments: Segments) -> int:
    """Return the window, or 0 if it masks no key. Compiled layers would recompile for 0."""
    return window if torch.compiler.is_compiling() or window < segments.max_length else 0


@cache
def image_kernels(gpu_name: str) -> Mapping[str, str]:
    """Return the kernel of encoders with images of one size by head width.

    Values are "flash" and "cudnn". Head sizes without a measurement use "flash": cuDNN builds a
    plan for each new number of images in both passes, and the host waits for it.

    Args:
        gpu_name: Name of the GPU, as `torch.cuda.get_device_name` returns it.
    """
    kernels: dict[str, dict[str, str]] = json.loads(KERNELS_FILE.read_text())
    return kernels.get(gpu_name, {})


@torch.compiler.assume_constant_result
def _prefers_cudnn(head_width: int, device_index: int) -> bool:
    """Return True if encoders with heads of this width use cuDNN on a GPU."""
    return image_kernels(_gpu_name(device_index)).get(str(head_width)) == "cudnn"


@cache
def _gpu_name(device_index: int) -> str:
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
    """Return the attention output. Hugging Face layers call functions of this signature.

    Args:
        module: Attention module that calls the function.
        query_BHTD: (B, H, T, D), queries.
        key_BGTD: (B, G, T, D), keys.
        value_BGTD: (B, G, T, D), values.
        attention_mask: Dense mask, `Segments`, or None.
        scaling: Factor of the scores. None means D ** -0.5.
        dropout: Must be 0.
        kwargs: Keyword arguments of the layer. `cu_seq_lens_q` may be `Segments`.

    Returns:
        Output (B, T, H, D), and None instead of attention weights.

    Raises:
        ValueError: The layer uses an unsupported feature.
    """
    segments = kwargs.get("cu_seq_lens_q")
    if isinstance(attention_mask, Segments):
        segments, attention_mask = attention_mask, None
    causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True)) if causal is None else bool(causal)
    window, softcap = kwargs.get("sliding_window") or 0, kwargs.get("softcap")
    sinks_H = kwargs.get("s_aux")
    if isinstance(sinks_H, DTensor):  # sharded by heads over tensor-parallel ranks
        sinks_H = sinks_H.to_local()
    unsupported = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    unsupported += ["attention_dropout"] if dropout else []
    if segments is None or not causal:
        unsupported += [name for name in ("sliding_window", "softcap") if kwargs.get(name)]
        unsupported += ["s_aux"] if sinks_H is not None else []
    if unsupported:
        raise ValueError(
            f"{type(module).__name__} uses {', '.join(unsupported)}, which packed attention does "
            "not support; disable it in the config of the model"
        )
    scale = query_BHTD.shape[-1] ** -0.5 if scaling is None else scaling
    if segments is None:
        out_BHTD = _attend_images(query_BHTD, key_BGTD, value_BGTD, attention_mask, causal, scale)
        return out_BHTD.transpose(1, 2), None
    if attention_mask is not None or query_BHTD.shape[0] != 1:
        raise ValueError("packed sequences require a batch size of 1 and no attention mask")
    rules = _MaskRules(causal, window, softcap, sinks_H)
    return _attend_packed(query_BHTD, key_BGTD, value_BGTD, segments, scale, rules), None


# No mask function is registered, so Hugging Face creates no mask for these names. A registered
# function that returns None would still check in each forward pass whether positions restart, which
# synchronizes with the device. A padding mask passed to a Hugging Face model therefore has no
# effect.
for _name in (PACKED, PACKED_FLASH):
    AttentionInterface.register(_name, attention)


def image_blocks(images_T: Tensor, cu_seqlens: list[int]) -> Tensor:
    """Return the index of the run of image tokens of each token, (T,), int64; -1 without one.

    Args:
        images_T: (T,), bool, image placeholders.
        cu_seqlens: [0, ..., T], starts of samples. Runs do not cross sample boundaries.
    """
    begins_T = images_T & ~torch.cat([images_T.new_zeros(1), images_T[:-1]])
    begins_T |= images_T & _starts(cu_seqlens, images_T.device)
    return torch.where(images_T, begins_T.cumsum(0) - 1, -1)


def prompt_blocks(targets_T: Tensor, cu_seqlens: list[int]) -> Tensor:
    """Return the index of the prompt of each token, (T,), int64; -1 after the prompt.

    The last token of the prompt of a sample is the first token with a target.

    Args:
        targets_T: (T,), bool, tokens with a target.
        cu_seqlens: [0, ..., T], starts of samples.
    """
    before_T = targets_T.cumsum(0) - targets_T.long()
    sample_T = _starts(cu_seqlens, targets_T.device).cumsum(0) - 1
    first_S = to_device(torch.tensor(cu_seqlens[:-1]), targets_T.device)
    return torch.where(before_T == before_T[first_S][sample_T], sample_T, -1)


def _starts(cu_seqlens: list[int], device: torch.device) -> Tensor:
    """Return the mask of the first tokens of samples, (T,), bool."""
    starts_T = torch.zeros(cu_seqlens[-1], dtype=torch.bool)
    starts_T[[start for start, _ in pairwise(cu_seqlens)]] = True
    return to_device(starts_T, device)
