"""Shapes of the matmuls of a decoder layer, read from its modules instead of its config.

Configs have many names for the same size (`moe_topk`, `num_experts_per_tok`), and
`intermediate_size` may be that of experts or of dense layers. Layers of one model also differ: the
first layers may be dense, and some have shared experts. The modules have the shapes independent of
names. A function of the config for each family would silently become wrong if a family adds an
option.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from torchmm.models.families.llms.family import LlmFamily
from torchmm.models.layers.delta_net import MIXER, delta_sizes
from torchmm.models.layers.experts import expert_modules, stacked_weights
from torchmm.models.layers.short_conv import SHORT_CONVOLUTION, convolution_sizes

_MIXER_NAMES = (
    *("self_attn", "attention", "attn", "self_attention", "temporal_block"),
    *(MIXER, SHORT_CONVOLUTION),
)
_EXPERTS_PER_TOKEN_KEYS = (
    "num_experts_per_tok",
    "moe_topk",
    "moe_k",
    "num_experts_per_token",
    "top_k_experts",
)


def find_attention(layer: nn.Module) -> Any:
    """Return the attention or other token mixer of a layer, or None if its name is unknown."""
    return next((getattr(layer, name) for name in _MIXER_NAMES if hasattr(layer, name)), None)


def find_experts(layer: nn.Module) -> nn.Module | None:
    """Return the expert module of a layer, whose weights are stacked, or None."""
    return next(iter(expert_modules([layer])), None)


def count_experts(layer: nn.Module) -> int:
    """Return the number of routed experts of a layer, or 0."""
    experts = find_experts(layer)
    return 0 if experts is None else len(stacked_weights(experts)[0])


def layer_matmul_sizes(layer: nn.Module, config: Any, family: LlmFamily) -> dict[str, Any]:
    """Return the fields of a `LayerDescription` about matmuls with weights.

    Args:
        layer: Decoder layer.
        config: Config of the layer.
        family: Family of the LLM.
    """
    gated = family.gated_ffn if family.is_registered else _is_gated(layer, config)
    experts = count_experts(layer)
    # Hidden size of the MLP that processes all tokens: a dense MLP or shared experts.
    hidden = config.hidden_size
    matrices = 3 if gated else 2
    weights = sum(linear.weight.numel() for linear in _ffn_linears(layer))
    dense = chosen = round(weights / hidden / matrices)
    per_token = 0
    if (part := find_experts(layer)) is not None:
        per_token = _experts_per_token(config)
        weights = sum(tensor.numel() for tensor in stacked_weights(part)) // experts
        chosen = round(weights * per_token / hidden / matrices)
    mixer = delta_sizes(layer) or convolution_sizes(layer)
    return {
        "experts": experts,
        "experts_per_token": per_token,
        "gated_ffn": gated,
        "ffn_size": chosen,
        "shared_ffn_size": dense if experts else 0,
        "expert_biases": any("experts" in n and n.endswith("_bias") for n in layer.state_dict()),
        "shared_gate": any(linear.out_features == 1 for linear in _non_attention_linears(layer)),
        # Routers of GLM and DeepSeek, whose scores have separate biases.
        "router_float32": any("score_correction" in name for name in layer.state_dict()),
        "mixer": mixer,
        "output_gate": family.output_gate and mixer is None,
        **_attention_sizes(layer, config, counted=family.output_gate or mixer is not None),
    }


def _attention_sizes(layer: nn.Module, config: Any, counted: bool) -> dict[str, Any]:
    """Return the fields of a `LayerDescription` about attention.

    Args:
        layer: Decoder layer.
        config: Config of the layer.
        counted: Whether other fields describe all other weights of attention.
    """
    attention = find_attention(layer)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(
        attention, "num_heads", config.num_attention_heads
    )  # differs by layer in Laguna
    sizes = {
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": head_dim,
    }
    capped = getattr(config, "attn_logit_softcapping", None) is not None  # Gemma 2
    sizes["has_eager_scores"] = capped or getattr(attention, "sinks", None) is not None  # GPT-OSS
    if not getattr(attention, "use_rope", True):  # some layers of SmolLM3
        sizes["rotary"] = False
    if getattr(attention, "kv_b_proj", None) is not None:
        shared = config.qk_rope_head_dim
        sizes |= {
            "kv_heads": heads,
            "head_dim": config.qk_nope_head_dim + shared,
            "value_dim": config.v_head_dim,
            "query_rank": config.q_lora_rank or 0,
            "key_value_rank": config.kv_lora_rank,
            "shared_key_dim": shared,
        }
        return sizes
    if getattr(attention, "v_norm", None) is not None:  # Gemma 4
        sizes["value_norm"] = True
    value_is_key = getattr(attention, "v_proj", attention) is None
    parts = () if attention is None or counted else attention.modules()
    weights = sum(part.weight.numel() for part in parts if isinstance(part, nn.Linear))
    products = 2 * heads + (1 if value_is_key else 2) * sizes["kv_heads"]
    usual = config.hidden_size * head_dim * products
    return sizes | {"value_is_key": value_is_key, "extra_matmul_weights": max(0, weights - usual)}


def _is_gated(layer: nn.Module, config: Any) -> bool:
    """Return True if the MLP is gated: more features enter the activation than leave it."""
    hidden = config.hidden_size
    experts = find_experts(layer)
    if experts is not None:
        sizes = [tensor.numel() for tensor in stacked_weights(experts)]
        return sum(sizes) > 2 * min(sizes)
    linears = list(_ffn_linears(layer))
    up = sum(n.out_features for n in linears if n.in_features == hidden)
    return up > sum(n.in_features for n in linears if n.out_features == hidden)


def _experts_per_token(config: Any) -> int:
    return next(
        (getattr(config, name) for name in _EXPERTS_PER_TOKEN_KEYS if getattr(config, name, None)),
        1,
    )


def _ffn_linears(layer: nn.Module) -> Iterator[nn.Linear]:
    """Yield linear layers outside of attention, except routers and output gates."""
    experts = count_experts(layer)
    for linear in _non_attention_linears(layer):
        if linear.out_features not in (1, experts):
            yield linear


def _non_attention_linears(layer: nn.Module) -> Iterator[nn.Linear]:
    """Yield linear layers outside of attention."""
    attention = find_attention(layer)
    inside = set() if attention is None else set(attention.modules())
    for part in layer.modules():
        if isinstance(part, nn.Linear) and part not in inside:
            yield part
