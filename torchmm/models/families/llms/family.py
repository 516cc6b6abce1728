"""What differs between families of causal LMs."""

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
"""From Gemma 2 on."""
NormPlace = Literal["before", "behind", "around", "shared"]
"""See `LayerDescription.norm_place`."""


@dataclass(frozen=True)
class LlmFamily:
    """What differs between families of causal LMs."""

    build: Callable[[PreTrainedConfig, torch.dtype], PreTrainedModel] = _build_causal_lm
    text_model: str = "model"
    """Name of the part with embedding, layers and norm."""
    layers: str = "layers"
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    """Names of those in it; "": there is none."""
    head: str = "lm_head"
    """Name of the head in the whole."""
    logits_to_keep: bool = True
    """Whether the whole's forward can compute the logits of some positions only."""
    listed: bool = True
    """Whether it is in the table; otherwise the extension `auto_models` proved what is
    claimed of it, which tensor parallelism is not part of."""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """Norms of a layer whose input or output is added to the residual stream."""
    norm_kind: Literal["centred"] | None = None
    """Kind of norms, if neither RMSNorm nor torch's LayerNorm, see `LayerDescription`."""
    norm_place: NormPlace = "before"
    more_norms: int = 0
    """Norms beside the usual ones of that place, see `LayerDescription`."""
    norms_of_same: int = 0
    """How many of them read what another norm reads."""
    router_norm: bool = False
    """See `LayerDescription`."""
    norm_weight_float32: bool = False
    """Whether norms return to the compute dtype only after their weights."""
    rotary_float32: bool = False
    """Whether queries and keys are rotated in float32."""
    multiplier: str | None = None
    """Attribute of the text model with which its forward scales `inputs_embeds`; set to 1 on
    later stages, where that input is a hidden state."""
    gated_ffn: bool = True
    """Whether the feed-forward network has a gate: three weight matrices instead of two."""
    activation: str = ""
    """Function inside it, if it is not the one that the config names, see `LayerDescription`."""
    packed_qkv: bool = False
    """Whether one linear computes queries, keys and values."""
    output_gate: bool = False
    """Whether the queries' linear also gives a gate of attention's result."""
    both_ways: Literal["images", "images in windows", "prompts"] | None = None
    """Tokens with bidirectional attention: those of an image (in all layers, or in those with a
    window), or all before the first target of a sample."""
    image_token_id: int = -1
    """Placeholder of images, if their tokens attend in both directions."""
    old_names: tuple[tuple[str, str], ...] = ()
    stacked_experts: bool = False
    """How files differ from the model, see `WeightFiles`."""
    taps: int = 0
    """Blocks of features that a composite's encoder gives beside its features, and that are added
    behind as many of the first layers, see `torchmm.models.layers.deepstack`."""
    tensor_parallel: Mapping[str, str] = field(default_factory=dict)
    """Styles of a layer's parts that replace those of Hugging Face's plan; "": none."""
    choose: Callable[[LlmFamily, Any], LlmFamily] | None = None
    """See `variant`."""

    def variant(self, config: Any) -> LlmFamily:
        """The family for `config`: models of one type may have different layers.

        Raises:
            ConfigError: the family has no part for it.
        """
        return self if self.choose is None else self.choose(self, config)
