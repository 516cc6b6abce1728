"""What a decoder layer's products with weights are, read from its modules instead of its config.

Configs name the same size in many ways (`moe_topk`, `num_experts_per_tok`; `intermediate_size` of
experts here and of dense layers there), and layers of one model differ: the first ones are dense,
some have shared experts beside those that a router chooses among. The modules say it without names.
Rejected: a function of the config for each family, which is wrong without notice as soon as a
family gains an option."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from torchmm.models.families.llms.family import LlmFamily
from torchmm.models.layers.delta_net import MIXER, delta_sizes
from torchmm.models.layers.experts import expert_parts, stacked_weights
from torchmm.models.layers.short_conv import SHORT_CONVOLUTION, convolution_sizes

_ATTENTIONS = (
    *("self_attn", "attention", "attn", "self_attention", "temporal_block"),
    *(MIXER, SHORT_CONVOLUTION),
)
_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "top_k_experts")


def attention_of(layer: nn.Module) -> Any:
    """The attention of a layer, or what it has in its place; None: one of an unknown name."""
    return next((getattr(layer, name) for name in _ATTENTIONS if hasattr(layer, name)), None)


def experts_of(layer: nn.Module) -> nn.Module | None:
    """Those that a router chooses among, whose weights are tensors of all of them."""
    return next(iter(expert_parts([layer])), None)


def expert_count(layer: nn.Module) -> int:
    """Experts among which a router chooses; 0: none."""
    experts = experts_of(layer)
    return 0 if experts is None else len(stacked_weights(experts)[0])


def product_sizes(layer: nn.Module, config: Any, family: LlmFamily) -> dict[str, Any]:
    """The fields of a `LayerDescription` about products with weights, attention's usual four
    aside."""
    gated = family.gated_ffn if family.listed else _is_gated(layer, config)
    experts = expert_count(layer)
    # Inner features of the part that all tokens pass: a dense one, or shared experts.
    hidden = config.hidden_size
    matrices = 3 if gated else 2
    weights = sum(linear.weight.numel() for linear in _ffn_linears(layer))
    dense = chosen = round(weights / hidden / matrices)
    per_token = 0
    if (part := experts_of(layer)) is not None:
        per_token = _chosen(config)
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
        "shared_gate": any(linear.out_features == 1 for linear in _linears_outside(layer)),
        # GLM's and DeepSeek's, whose scores have biases of their own.
        "router_float32": any("score_correction" in name for name in layer.state_dict()),
        "mixer": mixer,
        "output_gate": family.output_gate and mixer is None,
        **_attention_sizes(layer, config, counted=family.output_gate or mixer is not None),
    }


def _attention_sizes(layer: nn.Module, config: Any, counted: bool) -> dict[str, Any]:
    """Heads, and what latent attention has.

    Args:
        counted: whether all further weights of attention are described otherwise.
    """
    attention = attention_of(layer)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(attention, "num_heads", config.num_attention_heads)  # Laguna's: by layer
    sizes = {
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": head_dim,
    }
    capped = getattr(config, "attn_logit_softcapping", None) is not None  # Gemma 2's
    sizes["plain_scores"] = capped or getattr(attention, "sinks", None) is not None  # GPT-OSS's
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
    if getattr(attention, "v_norm", None) is not None:  # Gemma 4's
        sizes["value_norm"] = True
    value_is_key = getattr(attention, "v_proj", attention) is None
    parts = () if attention is None or counted else attention.modules()
    weights = sum(part.weight.numel() for part in parts if isinstance(part, nn.Linear))
    products = 2 * heads + (1 if value_is_key else 2) * sizes["kv_heads"]
    usual = config.hidden_size * head_dim * products
    return sizes | {"value_is_key": value_is_key, "other_weights": max(0, weights - usual)}


def _is_gated(layer: nn.Module, config: Any) -> bool:
    """Whether more features enter the activation function than leave it."""
    hidden = config.hidden_size
    experts = experts_of(layer)
    if experts is not None:
        sizes = [tensor.numel() for tensor in stacked_weights(experts)]
        return sum(sizes) > 2 * min(sizes)
    linears = list(_ffn_linears(layer))
    up = sum(n.out_features for n in linears if n.in_features == hidden)
    return up > sum(n.in_features for n in linears if n.out_features == hidden)


def _chosen(config: Any) -> int:
    return next((getattr(config, name) for name in _CHOSEN if getattr(config, name, None)), 1)


def _ffn_linears(layer: nn.Module) -> Iterator[nn.Linear]:
    """All outside of attention, except routers and gates of results."""
    experts = expert_count(layer)
    for linear in _linears_outside(layer):
        if linear.out_features not in (1, experts):
            yield linear


def _linears_outside(layer: nn.Module) -> Iterator[nn.Linear]:
    """All outside of attention."""
    attention = attention_of(layer)
    own = set() if attention is None else set(attention.modules())
    for part in layer.modules():
        if isinstance(part, nn.Linear) and part not in own:
            yield part
