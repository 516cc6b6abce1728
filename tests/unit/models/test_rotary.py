"""Rotary frequencies of each sample equal those of a separate Hugging Face forward pass."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from model_cases import LLMS, build, microbatch, plain_causal_lm, relative_error, worst_gradient
from test_llm import hf_loss_and_logits

from torchmm.common.errors import ConfigError
from torchmm.models import llm
from torchmm.models.build import build_model
from torchmm.models.multimodal import MultimodalModel
from torchmm.planning.recipe_model import recipe_model
from torchmm.recipe.model_section import FreezeConfig, LlmConfig, ModelConfig
from torchmm.recipe.recipe import Recipe

LIMIT = 8
LENGTHS = [5, 9, 20, 8, 2]
"""Lengths below, at and above the limit."""


def longrope(pairs: int, **more: Any) -> dict[str, Any]:
    """Return settings as in published configs of Phi-3.5."""
    return {
        "type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [2.0 + 3.0 * i for i in range(pairs)],
        **more,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "phi3": {"rope_scaling": longrope(4), "original_max_position_embeddings": LIMIT},
    "phi4_mini": {
        "model_type": "phi3",
        "partial_rotary_factor": 0.5,
        "rope_scaling": longrope(2),
        "original_max_position_embeddings": LIMIT,
    },
    "minicpm3": {
        "qk_rope_head_dim": 8,
        "rope_scaling": longrope(4, original_max_position_embeddings=LIMIT),
    },
    "gemma3_text": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {
                **longrope(8, original_max_position_embeddings=LIMIT),
                "rope_type": "longrope",
                "rope_theta": 1e4,
            },
        }
    },
}


def model_of(name: str, **changes: Any) -> ModelConfig:
    base = LLMS["phi3" if name == "phi4_mini" else name]
    settings = {**base, "max_position_embeddings": 64, **CONFIGS[name], **changes}
    return ModelConfig(llm=LlmConfig(config=settings))


def loss_errors(model: MultimodalModel) -> tuple[float, float]:
    """Return the errors of loss and gradients against separate forward passes."""
    plain = plain_causal_lm(model)
    batch = microbatch(LENGTHS)
    loss = model(batch)
    expected, _ = hf_loss_and_logits(plain, batch)
    loss.backward()
    expected.backward()
    gradients = worst_gradient(model.llm.backbone, plain, lambda name: name)
    return relative_error(loss, expected), gradients


@pytest.mark.parametrize("name", CONFIGS)
def test_longrope_in_packed_sequence_equals_separate_samples(name: str) -> None:
    loss_error, gradient_error = loss_errors(build(model_of(name)))
    assert loss_error < 1e-5
    assert gradient_error < 1e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_longrope_selected_by_packed_sequence_differs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm, "sample_frequencies", lambda *_: nullcontext())
    loss_error, gradient_error = loss_errors(build(model_of(name)))
    assert loss_error > 1e-5
    assert gradient_error > 1e-2


def test_longrope_attention_factor_ignores_length() -> None:
    model = build(model_of("phi3"))
    rotary = model.llm.text_model.rotary_emb
    before = rotary.attention_scaling
    assert before > 1
    model(microbatch(LENGTHS))
    assert rotary.attention_scaling == before


def test_longrope_short_sample_ignores_packed_neighbors() -> None:
    model = build(model_of("phi3"))
    positions = torch.arange(5)
    batch = microbatch(LENGTHS)
    single = microbatch([5])
    single.input_ids_T = batch.input_ids_T[:5]
    model(batch)  # an earlier step with long samples
    actual = model.llm.logits(batch, {}, positions)
    assert relative_error(actual, model.llm.logits(single, {}, positions)) < 1e-6


def recipe_of(model: ModelConfig, length: int, **validation: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "model": model.model_dump(exclude_unset=True),
            "training": {"sequence_length": length},
            "validation": validation,
        }
    )


def dynamic(**changes: Any) -> ModelConfig:
    settings = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config = {**LLMS["llama"], "max_position_embeddings": 32, "rope_parameters": settings}
    return ModelConfig(llm=LlmConfig(config={**config, **changes}))


@pytest.mark.parametrize(("length", "validation"), [(33, {}), (30, {"num_samples": 1})])
def test_dynamic_rope_of_long_samples_is_rejected(length: int, validation: dict) -> None:
    with pytest.raises(ConfigError, match=r'rope_type = "dynamic".*max_position_embeddings = 32'):
        recipe_model(recipe_of(dynamic(), length, **validation))


def test_dynamic_rope_of_short_samples_equals_hugging_face() -> None:
    recipe_model(recipe_of(dynamic(), 32))
    loss_error, gradient_error = loss_errors(build(dynamic()))
    assert loss_error < 1e-5
    assert gradient_error < 1e-5


def test_dynamic_rope_in_forward_rejects_long_samples() -> None:
    model = build(dynamic())
    with pytest.raises(ValueError, match="this sample has 33 tokens"):
        model(microbatch([5, 33]))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_with_mrope_rejects_length_dependent_types(kind: str) -> None:
    settings = longrope(4, factor=2.0, original_max_position_embeddings=LIMIT)
    settings |= {"type": kind, "rope_type": kind, "mrope_section": [1, 1, 2]}
    config = ModelConfig(llm=LlmConfig(config={**LLMS["llama"], "rope_parameters": settings}))
    with pytest.raises(ConfigError, match=f"rope_type = '{kind}' with mrope_section"):
        build_model(config, FreezeConfig())
