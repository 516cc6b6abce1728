"""Encoder and LLM of which one is not registered: the Hugging Face class of the export."""

from pathlib import Path

import pytest
import torch
from likeliest_text import as_prompt, written, written_by
from model_cases import ENCODERS, LLMS, build, microbatch, relative_error
from transformers import LlavaForConditionalGeneration

from torchmm.common.batch import EncoderInputs
from torchmm.common.errors import ConfigError
from torchmm.models.hf.export import export_hf
from torchmm.models.hf.load import load_weights
from torchmm.models.hf.pair_classes import PairClass, pair_class
from torchmm.models.multimodal import MultimodalModel
from torchmm.recipe.model_section import COMPONENTS_FILE, EncoderConfig, LlmConfig, ModelConfig

_VIT = {
    **{k: v for k, v in ENCODERS["clip"].items() if k != "model_type"},
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
}
_LLM = {k: v for k, v in LLMS["llama"].items() if k != "model_type"}
UNLISTED = {
    "vit, llama": ({"model_type": "vit", **_VIT}, LLMS["llama"], -1),
    "ijepa, qwen3": ({"model_type": "ijepa", **_VIT}, LLMS["qwen3"], -2),
    "clip, olmo": (ENCODERS["clip"], {"model_type": "olmo", **_LLM}, -2),
}
"""Encoders and LLMs of transformers that are not registered."""


def pair(vision: dict, llm: dict, layer: int = -1) -> ModelConfig:
    section = EncoderConfig(config=vision, feature_layer=layer)
    return ModelConfig(llm=LlmConfig(config=llm), encoders={"eye": section})


def image_inputs() -> EncoderInputs:
    pixels = torch.randn((1, 3, 16, 16), generator=torch.Generator().manual_seed(5))
    return EncoderInputs(pixels, [(1, 4, 4)], torch.arange(3, 19))


@pytest.mark.parametrize("name", UNLISTED)
def test_unlisted_modules_export_as_llava(name: str, tmp_path: Path, tokenizer) -> None:
    model = build(pair(*UNLISTED[name]))
    export_hf(model, tmp_path, tokenizer)
    plain = LlavaForConditionalGeneration.from_pretrained(tmp_path, attn_implementation="eager")
    images = image_inputs()
    batch = microbatch([22], {"eye": images}, images.positions_K)
    sample = {"input_ids": batch.input_ids_T[None], "pixel_values": images.pixels}
    theirs = plain(**sample, use_cache=False).logits[0]
    ours = model.llm.logits(batch, model.encode(batch), torch.arange(22))
    assert relative_error(ours, theirs) < 1e-5
    assert written(model, as_prompt(batch)) == written_by(plain, sample)
    again = build(ModelConfig(source=str(tmp_path)), seed=7)
    vision_batch = microbatch([22], {"vision": images}, images.positions_K)
    assert not torch.isclose(again(vision_batch), model(batch), rtol=1e-3)
    load_weights(again)
    assert torch.isclose(again(vision_batch), model(batch), rtol=1e-6)


def test_unlisted_encoder_with_scaled_logits_is_exported_separately(
    tmp_path: Path, tokenizer
) -> None:
    model = build(pair(UNLISTED["vit, llama"][0], LLMS["granite"]))
    assert "granite scales or caps its logits" in str(pair_class(model))
    export_hf(model, tmp_path, tokenizer)
    assert (tmp_path / COMPONENTS_FILE).exists()


def test_unlisted_llm_with_scaled_logits_rejects_llava() -> None:
    """Check Cohere, which scales logits after the head. The LLaVA class does not."""
    model: MultimodalModel = build(pair(ENCODERS["clip"], {"model_type": "cohere", **_LLM}))
    assert "cohere scales or caps its logits" in str(pair_class(model))
    plain = build(pair(ENCODERS["clip"], {"model_type": "olmo", **_LLM}))
    assert isinstance(pair_class(plain), PairClass)


def test_multimodal_model_with_unproven_encoder_is_rejected(tmp_path: Path) -> None:
    config = {
        "model_type": "llava",
        "vision_config": {"model_type": "swin"},
        "text_config": LLMS["llama"],
    }
    with pytest.raises(ConfigError, match="swin"):
        build(ModelConfig(config=config))
