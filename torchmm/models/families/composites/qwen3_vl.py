"""Qwen3-VL and Qwen3.5, dense and mixture of experts, with interleaved M-RoPE and times as text.

Qwen3-VL has DeepStack, and Qwen3.5 has gated delta nets.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from torchmm.models.families.composites.components import (
    ModelComponents,
    raise_problems,
    single_encoder_components,
)
from torchmm.models.families.composites.qwen_vl import (
    QWEN_LLM,
    build_without_encoders,
    output_size_problems,
    qwen_text,
)
from torchmm.models.families.encoders.registry import ENCODER_FAMILIES
from torchmm.models.families.llms.registry import LLM_FAMILIES
from torchmm.models.layered import WeightFiles

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
_TEXTS = {
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
QWEN3_STYLES = {  # dense Qwen3-VL has no plan, and the plan with experts omits norms
    **{f"self_attn.{name}_proj": "colwise" for name in "qkv"},
    "self_attn.o_proj": "rowwise",
    "self_attn.q_norm": "replicated_with_grad_allreduce",
    "self_attn.k_norm": "replicated_with_grad_allreduce",
    "mlp.gate_proj": "colwise",
    "mlp.up_proj": "colwise",
    "mlp.down_proj": "rowwise",
}


def qwen3_vl_components(config: Any) -> ModelComponents:
    """Return the components of a multimodal model from its config.

    Raises:
        ConfigError: The sizes of encoder and LLM differ, or the tapped layers are impossible.
    """
    raise_problems(
        config, output_size_problems(config, "out_hidden_size") + deepstack_problems(config)
    )
    family = LLM_FAMILIES[_TEXTS[config.model_type]]
    styles = QWEN3_STYLES if config.model_type.startswith("qwen3_vl") else {}
    family = replace(
        family,
        build=build_without_encoders,
        text_model="model.language_model",
        tensor_parallel=styles | dict(family.tensor_parallel),
        deepstack_layers=len(_taps(config.vision_config)),
    )
    llm_files = replace(QWEN_LLM, stacked_experts=config.model_type == "qwen3_vl_moe")
    return single_encoder_components(
        config,
        config,
        qwen_text(config),
        {"connector": "merger"},
        family=ENCODER_FAMILIES[f"{config.model_type}_vision"],
        llm_family=family,
        files=(QWEN3_VISION, llm_files),
    )


def _taps(vision: Any) -> list[int]:
    return list(getattr(vision, "deepstack_visual_indexes", None) or ())


def deepstack_problems(config: Any) -> list[str]:
    """Return the problems of the DeepStack layer indices of the encoder."""
    vision = config.vision_config
    text = config.text_config
    problems = []
    deepstack_layers = _taps(vision)
    rises = all(a < b for a, b in pairwise([-1, *deepstack_layers, vision.depth]))
    if not rises:
        problems.append(
            "vision_config.deepstack_visual_indexes = "
            f"{deepstack_layers} must be increasing indices of "
            f"the {vision.depth} encoder layers, counted from 0; correct them"
        )
    if len(deepstack_layers) > text.num_hidden_layers:
        problems.append(
            "vision_config.deepstack_visual_indexes = "
            f"{deepstack_layers} has more entries than the "
            f"{text.num_hidden_layers} layers of the LLM; remove entries"
        )
    return problems
