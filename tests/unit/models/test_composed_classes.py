"""Encoder and LLM from separate sources: the Hugging Face class, or the reason for having none."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from chat_templates import TEMPLATES, with_template
from likeliest_text import as_prompt, written, written_by
from model_cases import (
    AUDIO_TOKEN_ID,
    LLMS,
    build,
    microbatch,
    pair_config,
    relative_error,
)
from speech_cases import three_samples
from test_speech import first_audio_sample
from transformers import (
    AudioFlamingo3ForConditionalGeneration,
    AutoProcessor,
    AutoTokenizer,
    InternVLForConditionalGeneration,
    LlavaForConditionalGeneration,
)

from torchmm.common.batch import EncoderInputs, Microbatch
from torchmm.models.hf.chat_template import extend_chat_template
from torchmm.models.hf.export import export_hf
from torchmm.models.hf.load import load_weights
from torchmm.models.hf.pair_classes import pair_class
from torchmm.models.hf.processors import image_processor
from torchmm.recipe.model_section import COMPONENTS_FILE, LlmConfig, ModelConfig


def image_inputs() -> EncoderInputs:
    pixels = torch.randn((1, 3, 16, 16), generator=torch.Generator().manual_seed(5))
    return EncoderInputs(pixels, [(1, 4, 4)], torch.arange(3, 19))


@pytest.mark.parametrize(
    ("encoder", "llm", "layer"),
    [
        ("internvl", "llama_tied", -2),
        ("internvl", "qwen3_moe", -1),
        ("internvl_norms", "qwen2", -1),
    ],
)
def test_pixel_shuffle_with_norm_exports_as_internvl(
    encoder: str, llm: str, layer: int, tmp_path: Path, tokenizer
) -> None:
    folds = {"connector": "pixel_shuffle_norm_mlp", "feature_layer": layer}
    model = build(pair_config(llm, encoder, **folds))
    export_hf(model, tmp_path, tokenizer)
    model_class = InternVLForConditionalGeneration
    plain = model_class.from_pretrained(tmp_path, attn_implementation="eager")
    pixels = image_inputs().pixels
    images = EncoderInputs(pixels, [(1, 4, 4)], torch.arange(3, 7))
    batch = microbatch([11], {"eye": images}, images.positions_K)
    sample = {"input_ids": batch.input_ids_T[None], "pixel_values": pixels}
    theirs = plain(**sample, use_cache=False).logits[0]
    ours = model.llm.logits(batch, model.encode(batch), torch.arange(11))
    assert relative_error(ours, theirs) < 1e-5
    assert written(model, as_prompt(batch)) == written_by(plain, sample)
    inputs = AutoProcessor.from_pretrained(tmp_path)(
        images=torch.zeros(3, 16, 16, dtype=torch.uint8), text="w5 <image> w6", return_tensors="pt"
    )
    assert (inputs["input_ids"] == 63).sum() == 4
    plain.generate(**inputs, max_new_tokens=1)  # rejects unknown inputs
    again = build(ModelConfig(source=str(tmp_path)), seed=7)
    load_weights(again)
    assert not again.text.prefix and again.image_specs()["vision"].tiles is None
    vision_batch = microbatch([11], {"vision": images}, images.positions_K)
    assert torch.isclose(again(vision_batch), model(batch), rtol=1e-6)


def test_exported_processor_matches_training_preprocessing(tmp_path: Path, tokenizer) -> None:
    """Check InternViT, whose processor returns tile counts that the LLaVA class rejects."""
    model = build(pair_config("llama", "internvl"))
    export_hf(model, tmp_path, tokenizer)
    image = torch.randint(256, (3, 40, 25), dtype=torch.uint8)
    inputs = AutoProcessor.from_pretrained(tmp_path)(
        images=image, text="w5 <image> w6", return_tensors="pt"
    )
    expected = image_processor(model.encoders["eye"])(image, return_tensors="pt")
    assert "num_patches" in expected and set(inputs) == {
        *("input_ids", "attention_mask", "pixel_values")
    }
    assert torch.equal(inputs["pixel_values"], expected["pixel_values"])
    plain = LlavaForConditionalGeneration.from_pretrained(tmp_path)
    plain.generate(**inputs, max_new_tokens=1)
    again = build(ModelConfig(source=str(tmp_path))).encoders["vision"]
    pixels = image_processor(again)(image, return_tensors="pt")["pixel_values"]
    assert torch.equal(pixels, expected["pixel_values"])


def two_audio_inputs(token: int) -> tuple[Microbatch, dict]:
    """Return a sample for the encoder "eye", and the inputs of the Hugging Face model."""
    batch, (sample, *_) = three_samples("audioflamingo3")
    heard = first_audio_sample(batch)
    ids_T = torch.where(heard.input_ids_T == AUDIO_TOKEN_ID, token, heard.input_ids_T)
    del sample["use_cache"]
    ours = replace(heard, input_ids_T=ids_T, encoders={"eye": heard.encoders["audio"]})
    return ours, {**sample, "input_ids": ids_T[None]}


def test_audio_encoder_with_mlp_exports_as_audio_flamingo(tmp_path: Path, tokenizer) -> None:
    model = build(pair_config("llama", "audioflamingo3"))
    export_hf(model, tmp_path, tokenizer)
    model_class = AudioFlamingo3ForConditionalGeneration
    plain = model_class.from_pretrained(tmp_path, attn_implementation="eager")
    projector = plain.model.multi_modal_projector.state_dict()
    for name, value in model.encoders["eye"].connector.state_dict().items():
        assert torch.equal(value, projector[name])
    batch, sample = two_audio_inputs(plain.config.audio_token_id)
    theirs = plain(**sample, use_cache=False).logits[0]
    all_positions = torch.arange(len(batch.input_ids_T))
    assert (
        relative_error(model.llm.logits(batch, model.encode(batch), all_positions), theirs) < 1e-5
    )
    assert written(model, as_prompt(batch)) == written_by(plain, sample)
    again = build(ModelConfig(source=str(tmp_path)), seed=7)
    load_weights(again)
    audio_batch = replace(batch, encoders={"audio": batch.encoders["eye"]})
    assert torch.isclose(again(audio_batch), model(batch), rtol=1e-6)
    assert again.text.image_token == plain.config.audio_token_id == 63 != AUDIO_TOKEN_ID


WITHOUT = {
    ("llama", "siglip2"): "features of siglip2_vision_model for images of any size",
    ("llama", "qwen2_5_vl"): "qwen2_5_vl_vision merges patches itself",
    ("llama", "dinov3"): "LLaVA cannot build dinov3_vit, or would use tokens that are not patches",
    ("llama", "whisper"): "no class has two linear layers between whisper and a separate LLM",
    (
        "llama",
        "qwen2_audio",
    ): "no class has two linear layers between qwen2_audio_encoder and a separate LLM",
    ("llama_tied", "audioflamingo3"): "does not support a tied head and embedding",
    ("gemma2", "clip"): "gemma2 scales or caps its logits",
}


@pytest.mark.parametrize(("llm", "encoder"), WITHOUT)
def test_unsupported_combinations_report_reason(
    llm: str, encoder: str, tmp_path: Path, tokenizer
) -> None:
    model = build(pair_config(llm, encoder))
    actual = pair_class(model)
    assert isinstance(actual, str) and WITHOUT[llm, encoder] in actual
    export_hf(model, tmp_path, tokenizer)
    parts = json.loads((tmp_path / COMPONENTS_FILE).read_text())
    assert set(parts) >= {"llm", "encoders"}


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_only_chat_template_accepts_images(name: str, tokenizer) -> None:
    """Check that the placeholder is in the text, and that chats without images do not change."""
    chat_tokenizer = with_template(tokenizer, TEMPLATES[name])
    actual = extend_chat_template(chat_tokenizer, "<image>")
    assert actual is not None and actual.endswith(TEMPLATES[name])
    image_content = [{"type": "image"}, {"type": "text", "text": "What?"}]

    def rendered(template: str, content: object, answer: object) -> str:
        turns = [("user", content), ("assistant", answer)]
        messages = [{"role": role, "content": message} for role, message in turns]
        return chat_tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)

    plain = rendered(TEMPLATES[name], "<image>What?", "Eggs.")
    assert "<image>What?" in plain
    assert rendered(actual, image_content, [{"type": "text", "text": "Eggs."}]) == plain
    assert rendered(actual, "<image>What?", "Eggs.") == plain
    assert extend_chat_template(with_template(tokenizer, actual), "<image>") is None


def test_exported_tokenizer_has_image_chat_template(tmp_path: Path, tokenizer) -> None:
    chat_tokenizer = with_template(tokenizer, TEMPLATES["chatml"])
    llm = {**LLMS["llama"], "vocab_size": len(chat_tokenizer)}
    config = pair_config("llama", "clip").model_copy(update={"llm": LlmConfig(config=llm)})
    export_hf(build(config), tmp_path, chat_tokenizer)
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    content = [{"type": "image"}, {"type": "text", "text": "What?"}]
    text = reloaded.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    assert text == "<|im_start|>user\n<image>What?<|im_end|>\n"


def test_unsupported_folding_and_several_encoders_report_reason() -> None:
    folded = build(pair_config("llama", "clip", connector="pixel_shuffle_mlp"))
    assert "combines 2 x 2 outputs" in str(pair_class(folded))
    video = build(pair_config("llama", "clip", connector="pixel_shuffle_norm_mlp"))
    assert "InternVL of Hugging Face supports only its own encoder" in str(pair_class(video))
    audio_model = build(pair_config("llama", "whisper", connector="pixel_shuffle_norm_mlp"))
    assert 'as connector = "pixel_shuffle_norm_mlp" does' in str(pair_class(audio_model))
    tiled = {"connector": "pixel_shuffle_norm_mlp", "processor": {"crop_to_patches": True}}
    assert "split into tiles" in str(pair_class(build(pair_config("llama", "internvl", **tiled))))
    two = pair_config("llama", "clip")
    two.encoders["ear"] = pair_config("llama", "whisper").encoders["eye"]
    assert "several encoders (eye and ear)" in str(pair_class(build(two)))
