"""Gemma 4: blocks in sliding-window layers only, constants in files, and rejected variants."""

from dataclasses import replace

import pytest
import torch
from model_cases import COMPOSITES, ENCODERS, LLMS, build, composite_config, relative_error
from test_multimodal import hf_model, two_samples_with_images
from torch.nn import functional

from torchmm.common.errors import ConfigError
from torchmm.models.build import build_model
from torchmm.recipe.model_section import EncoderConfig, FreezeConfig, LlmConfig, ModelConfig


@pytest.mark.parametrize("wrong", ["images", None])
def test_image_blocks_apply_to_window_layers_only(wrong: str | None) -> None:
    model = build(composite_config("gemma4"))
    batch, samples = two_samples_with_images("gemma4")
    theirs = torch.cat([hf_model(model)(**sample).logits[0] for sample in samples])
    expected = functional.cross_entropy(theirs, batch.targets_T, reduction="sum")
    assert relative_error(model(batch), expected) < 1e-5
    model.llm.family = replace(model.llm.family, bidirectional=wrong)
    assert relative_error(model(batch), expected) > 1e-5  # the tolerance of comparisons


@pytest.mark.parametrize("name", ["layer_scalar", "std_bias", "std_scale"])
def test_constants_of_files_affect_outputs(name: str) -> None:
    model = build(composite_config("gemma4"))
    batch, _ = two_samples_with_images("gemma4")
    before = model(batch)
    actual = [buffer for fqn, buffer in model.named_buffers() if fqn.endswith(name)]
    assert actual and all(buffer.isfinite().all() for buffer in actual)
    for buffer in actual:
        buffer.mul_(torch.linspace(0.5, 2.0, buffer.numel()))
    assert relative_error(model(batch), before) > 1e-5  # the tolerance of comparisons


def test_layer_types_differ_in_heads() -> None:
    window, full, _ = build(composite_config("gemma4")).llm.layer_sizes()
    assert (window.kv_heads, window.head_dim, window.window) == (4, 8, 4)
    assert (full.kv_heads, full.head_dim, full.window) == (2, 16, None)
    assert full.value_is_key and not window.value_is_key
    assert (window.shared_ffn_size, window.ffn_size) == (48, 2 * 24)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size_per_layer_input": 8}, "per-layer embeddings"),
        ({"num_kv_shared_layers": 1}, "share keys and values"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    ],
)
def test_unsupported_llm_variants_are_rejected(changes: dict, message: str) -> None:
    for config in (
        ModelConfig(llm=LlmConfig(config={**LLMS["gemma4"], **changes})),
        composite_config("gemma4", text_config={**LLMS["gemma4"], **changes}),
    ):
        with pytest.raises(ConfigError, match=message):
            build_model(config, FreezeConfig())


def test_unsupported_encoder_variants_are_rejected() -> None:
    clipped = {**ENCODERS["gemma4"], "use_clipped_linears": True}
    pair = EncoderConfig(config=clipped)
    for config in (
        ModelConfig(llm=LlmConfig(config=LLMS["llama"]), encoders={"eye": pair}),
        composite_config("gemma4", vision_config=clipped),
    ):
        with pytest.raises(ConfigError, match="use_clipped_linears"):
            build_model(config, FreezeConfig())
    with_audio = {**COMPOSITES["gemma4"], "audio_config": {"model_type": "gemma4_audio"}}
    with pytest.raises(ConfigError, match="audio encoder is not supported"):
        build_model(ModelConfig(config=with_audio), FreezeConfig())
