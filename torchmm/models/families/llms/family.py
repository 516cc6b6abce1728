"""The class `LlmFamily` with the differences between families of causal LMs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from torchmm.models.layers.attention import PACKED


def _build_causal_lm(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation=PACKED, trust_remote_code=False
    )


GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
"""Norms of a layer, from Gemma 2 on."""
NormPosition = Literal["before", "behind", "around", "shared"]
"""Position of norms in a layer (`LayerDescription.norm_place`)."""


@dataclass(frozen=True)
class LlmFamily:
    """The properties of a family of causal LMs."""

    build: Callable[[PreTrainedConfig, torch.dtype], PreTrainedModel] = _build_causal_lm
    """Function that builds the Hugging Face model from config and dtype."""
    text_model: str = "model"
    """Name of the submodule with embedding, layers and final norm."""
    layers: str = "layers"
    """Name of the layer list in the text model."""
    embedding: str = "embed_tokens"
    """Name of the embedding in the text model."""
    final_norm: str = "norm"
    """Name of the final norm in the text model, or "" without one."""
    head: str = "lm_head"
    """Name of the head in the full model."""
    logits_to_keep: bool = True
    """Whether the forward of the full model can compute logits of selected positions only."""
    is_registered: bool = True
    """Whether the family is registered. Otherwise, the extension `auto_models` has verified it,
    without tensor parallelism."""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """Names of the norms of a layer that read or write the residual stream."""
    norm_kind: Literal["centered"] | None = None
    """Type of the norms, if neither RMSNorm nor LayerNorm of torch (`LayerDescription`)."""
    norm_place: NormPosition = "before"
    """Position of the norms (`LayerDescription.norm_place`)."""
    extra_norms: int = 0
    """Number of norms in addition to the usual ones (`LayerDescription`)."""
    norms_sharing_input: int = 0
    """Number of additional norms whose input another norm also reads."""
    router_norm: bool = False
    """Whether the router has a norm (`LayerDescription`)."""
    norm_weight_float32: bool = False
    """Whether norms multiply by their weights in float32, before the cast to the compute dtype."""
    rotary_float32: bool = False
    """Whether queries and keys are rotated in float32."""
    embedding_scale_attribute: str | None = None
    """Attribute of the text model that scales `inputs_embeds`, or None. It is set to 1 on later
    stages, whose input is a hidden state."""
    gated_ffn: bool = True
    """Whether the MLP has a gate, with three weight matrices instead of two."""
    activation: str = ""
    """Activation of the MLP, if it differs from the config (`LayerDescription`)."""
    packed_qkv: bool = False
    """Whether one linear layer computes queries, keys and values."""
    output_gate: bool = False
    """Whether the query projection also computes a gate of the attention output."""
    bidirectional: Literal["images", "images in windows", "prompts"] | None = None
    """Tokens with bidirectional attention, or None: tokens of an image (in all layers or in layers
    with a sliding window), or the prompt up to the first target of a sample."""
    image_token_id: int = -1
    """Placeholder of images, if their tokens attend in both directions."""
    legacy_names: tuple[tuple[str, str], ...] = ()
    """Old names in files (`WeightFiles.legacy_names`)."""
    stacked_experts: bool = False
    """Whether files have stacked experts (`WeightFiles.stacked_experts`)."""
    deepstack_layers: int = 0
    """Number of DeepStack feature blocks, which are added after the first layers
    (`torchmm.models.layers.deepstack`)."""
    tensor_parallel: Mapping[str, str] = field(default_factory=dict)
    """Tensor-parallel styles of submodules of a layer that override the Hugging Face plan. ""
    disables sharding."""
    choose_variant: Callable[[LlmFamily, Any], LlmFamily] | None = None
    """Function for `variant`, or None."""

    def variant(self, config: Any) -> LlmFamily:
        """Return the family for `config`, because models of one type may have different layers.

        Raises:
            ConfigError: The family does not support the config.
        """
        return self if self.choose_variant is None else self.choose_variant(self, config)
