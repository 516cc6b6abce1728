"""Qwen3-VL and Qwen3.5, dense and with experts: interleaved three-dimensional positions, times as
text; Qwen3-VL with deepstack, Qwen3.5 with gated delta nets."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeForConditionalGeneration,
)

from torchmm.common.module_names import VISION
from torchmm.models.families.composites.parts import CompositeParts, EncoderPart, refuse
from torchmm.models.families.composites.qwen_vl import (
    QWEN_LLM,
    build_without_tower,
    qwen_text,
    width_problems,
)
from torchmm.models.families.encoders.table import ENCODER_FAMILIES
from torchmm.models.families.llms.table import LLM_FAMILIES
from torchmm.models.layered import WeightFiles
from torchmm.models.layers.deepstack import add_block
from torchmm.models.layers.delta_net import pack_delta_nets

QWEN3_VISION = WeightFiles(
    renames=(
        (r"(model\.)?visual\.(?=(merger|deepstack_merger_list)\.)", "connector."),
        (r"(model\.)?visual\.", "tower."),
    ),
    hf_prefixes=(
        ("connector.", "model.visual."),
        ("tower.", "model.visual."),
    ),
)
QWEN3_VL: dict[str, type[PreTrainedModel]] = {
    "qwen3_vl": Qwen3VLForConditionalGeneration,
    "qwen3_vl_moe": Qwen3VLMoeForConditionalGeneration,
    "qwen3_5": Qwen3_5ForConditionalGeneration,
    "qwen3_5_moe": Qwen3_5MoeForConditionalGeneration,
}
"""Hugging Face's classes by model_type."""
_TEXTS = {
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
QWEN3_STYLES = {  # Qwen3-VL's dense config has no plan, and that of experts leaves the norms out
    **{f"self_attn.{name}_proj": "colwise" for name in "qkv"},
    "self_attn.o_proj": "rowwise",
    "self_attn.q_norm": "replicated_with_grad_allreduce",
    "self_attn.k_norm": "replicated_with_grad_allreduce",
    "mlp.gate_proj": "colwise",
    "mlp.up_proj": "colwise",
    "mlp.down_proj": "rowwise",
}


def take_qwen3_vl(config: Any) -> CompositeParts:
    """Takes a config apart.

    Raises:
        ConfigError: the sizes of tower and LLM differ, or the tapped layers are impossible.
    """
    refuse(config, _problems(config))
    vision = config.vision_config
    family = LLM_FAMILIES[_TEXTS[config.model_type]]
    styles = QWEN3_STYLES if config.model_type.startswith("qwen3_vl") else {}
    family = replace(
        family,
        build=_build_text,
        text_model="model.language_model",
        tensor_parallel=styles | dict(family.tensor_parallel),
        taps=len(_taps(vision)),
    )
    vision_part = EncoderPart(
        config=vision,
        family=ENCODER_FAMILIES[f"{config.model_type}_vision"],
        files=QWEN3_VISION,
        settings={"connector": "merger", "connector_from_files": True},
    )
    return CompositeParts(
        llm_config=config,
        llm_family=family,
        llm_files=replace(QWEN_LLM, stacked_experts=config.model_type == "qwen3_vl_moe"),
        encoders={VISION: vision_part},
        text=qwen_text(config),
    )


def _taps(vision: Any) -> list[int]:
    return list(getattr(vision, "deepstack_visual_indexes", None) or ())


def _problems(config: Any) -> list[str]:
    return width_problems(config, "out_hidden_size") + tap_problems(config)


def tap_problems(config: Any) -> list[str]:
    """What is wrong with the layers of the tower whose outputs the LLM gets."""
    vision = config.vision_config
    text = config.text_config
    found = []
    taps = _taps(vision)
    rises = all(a < b for a, b in pairwise([-1, *taps, vision.depth]))
    if not rises:
        found.append(
            f"vision_config.deepstack_visual_indexes = {taps} are not rising numbers of the "
            f"tower's {vision.depth} layers, counted from 0; correct them"
        )
    if len(taps) > text.num_hidden_layers:
        found.append(
            f"vision_config.deepstack_visual_indexes = {taps} are more than the LLM's "
            f"{text.num_hidden_layers} layers; name fewer"
        )
    return found


def _build_text(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    model: Any = build_without_tower(QWEN3_VL[config.model_type], config, dtype)
    text = model.model.language_model
    if hasattr(text, "_deepstack_process"):
        text._deepstack_process = add_block
    pack_delta_nets(text.layers)
    return model
