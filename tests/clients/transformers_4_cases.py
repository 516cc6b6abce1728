"""Tiny exports for transformers 4, with inputs of Hugging Face and the logits of torchmm.

RoPE bases differ from the defaults of the classes, so that an ignored key alters the logits.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from model_cases import COMPOSITES, ENCODERS, LLMS, SPEECH, build, microbatch
from omni_cases import packed, two_samples
from speech_cases import three_samples
from test_multimodal import mrope_positions, two_samples_with_images
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerFast

from torchmm.common.batch import Microbatch
from torchmm.models.families.composites.registry import COMPOSITES as FAMILIES
from torchmm.models.hf.export import export_hf
from torchmm.models.multimodal import MultimodalModel
from torchmm.recipe.model_section import EncoderConfig, LlmConfig, ModelConfig

BASE_FACTOR = 7.0
PAIRED = (
    "clip",
    "siglip",
    "metaclip_2",
    "dinov2",
    "aimv2",
    "internvl",
    "internvl_norms",
    "idefics3",
)
NAMES = [f"llm {name}" for name in LLMS] + list(COMPOSITES) + [f"{name} + llama" for name in PAIRED]
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 7e4,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
}
_LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 7e4, "factor": 8.0},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
}
_LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 7e4, "original_max_position_embeddings": 8},
    **{"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0]},
}
_LENGTHS = {"max_position_embeddings": 64, "original_max_position_embeddings": 8}
_LOCAL = {"rope_type": "default", "rope_theta": 3e4}
_GLOBAL = {"rope_type": "linear", "rope_theta": 7e6, "factor": 8.0}
SCALED = {
    "scaled qwen3": {**LLMS["qwen3"], "rope_parameters": _YARN},
    "scaled deepseek_v3": {**LLMS["deepseek_v3"], "rope_parameters": _YARN},
    "scaled llama": {**LLMS["llama"], "rope_parameters": _LLAMA3},
    "scaled phi3": {**LLMS["phi3"], "rope_parameters": _LONGROPE, **_LENGTHS},
    "partial glm": {
        **LLMS["glm"],
        "rope_parameters": {**_LOCAL, "partial_rotary_factor": 0.25},
    },
    "scaled gemma3_text": {
        **LLMS["gemma3_text"],
        "rope_parameters": {"sliding_attention": _LOCAL, "full_attention": _GLOBAL},
    },
    "scaled olmo3": {
        **LLMS["olmo3"],
        "rope_parameters": {"sliding_attention": _LOCAL, "full_attention": _GLOBAL},
    },
    "gpt_oss with the usual limit": {**LLMS["gpt_oss"], "swiglu_limit": 7.0},
}
"""LLMs with other RoPE settings than those of their class."""


def make_case(name: str, directory: Path, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Export a tiny model, save its inputs and logits, and return the job of the program."""
    if name.startswith("llm "):
        config = _with_other_bases(LLMS[name.removeprefix("llm ")])
        model = build(ModelConfig(llm=LlmConfig(config=config)))
    elif name in SCALED:
        model = build(ModelConfig(llm=LlmConfig(config=SCALED[name])))
    elif name in COMPOSITES:
        model = build(ModelConfig(config=_with_other_bases(COMPOSITES[name])))
    else:
        encoder = EncoderConfig(config=ENCODERS[name.removesuffix(" + llama")])
        llm = LlmConfig(config=_with_other_bases(LLMS["llama"]))
        model = build(ModelConfig(llm=llm, encoders={"vision": encoder}))
    export_hf(model, directory / "hf", tokenizer)
    batch, samples = _inputs(name, model)
    with torch.no_grad():
        logits = model.llm.logits(batch, model.encode(batch), torch.arange(len(batch.input_ids_T)))
    bounds = list(pairwise(batch.cu_seqlens))
    parts = [logits[start:stop] for start, stop in bounds]
    for sample, (start, stop) in zip(samples, bounds, strict=True):
        if model.text.mrope:  # version 4 requires other marker tokens to compute them
            sample["position_ids"] = batch.position_ids[:, None, start:stop]
        if name.startswith("paligemma"):  # without labels, the answer is part of the prompt
            sample["labels"] = sample["input_ids"]
            sample["attention_mask"] = torch.ones_like(sample["input_ids"])
    torch.save({"samples": samples, "logits": parts}, directory / "inputs.pt")
    return {
        "family": name,
        "directory": str(directory / "hf"),
        "inputs": str(directory / "inputs.pt"),
    }


def _inputs(name: str, model: MultimodalModel) -> tuple[Microbatch, list[dict[str, Tensor]]]:
    """Return a packed microbatch, and the inputs of Hugging Face for each sample."""
    if name in SPEECH:
        return three_samples(name)
    if "omni" in name:
        samples = two_samples(name)
        return packed(samples), [sample.theirs() for sample in samples]
    if name.endswith(" + llama"):
        return two_samples_with_images("llava")
    if name in COMPOSITES and not name.startswith("llava_"):
        batch, samples = two_samples_with_images(name)
        if model.text.mrope:
            assert model.composite is not None
            with torch.device("meta"):
                plain = FAMILIES[model.composite.model_type].kind._from_config(model.composite)
            batch.position_ids = mrope_positions(plain, samples)
        return batch, samples
    batch = microbatch([9, 14])
    bounds = pairwise(batch.cu_seqlens)
    return batch, [{"input_ids": batch.input_ids_T[None, a:b]} for a, b in bounds]


def _with_other_bases(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config whose RoPE bases are those of its class times `BASE_FACTOR`."""
    changed = copy.deepcopy(config)
    built = AutoConfig.for_model(**copy.deepcopy(config))
    for key in ("text_config", "vision_config"):
        part = getattr(built, key, None)
        if part is None or key not in changed:
            continue
        if key == "text_config" or part.model_type == "pixtral":
            _replace_bases(changed[key], part)
    _replace_bases(changed, built)
    return changed


def _replace_bases(settings: dict[str, Any], built: Any) -> None:
    rope = copy.deepcopy(getattr(built, "rope_parameters", None)) or {}
    tables = list(_tables(rope))
    for table in tables:
        table["rope_theta"] *= BASE_FACTOR
    if tables:
        settings["rope_parameters"] = rope


def _tables(rope: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the RoPE settings, one table for each type of layer if they differ."""
    for table in (rope, *rope.values()):
        if isinstance(table, dict) and "rope_theta" in table:
            yield table
