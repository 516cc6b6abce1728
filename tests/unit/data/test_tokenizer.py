"""Warnings about the tokenizer of a recipe."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from torchmm.data.tokenizer import load_tokenizer, untrained_tokens
from torchmm.recipe.model_section import LlmConfig, ModelConfig


@pytest.fixture
def model(real_data: Path, tmp_path: Path) -> ModelConfig:
    """A pair whose tokenizer has 4 tokens more than the tokenizer of the LLM source."""
    source = real_data / "tokenizer"
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens(["<picture>", "<loc_0>", "<loc_1>", "<loc_2>"])
    tokenizer.save_pretrained(tmp_path)
    llm = LlmConfig(source=str(source))
    return ModelConfig(llm=llm, tokenizer=str(tmp_path), image_token="<picture>")


def test_new_tokens_with_frozen_embeddings_are_listed(model: ModelConfig) -> None:
    warning = untrained_tokens(model, load_tokenizer(model), trains_embeddings=False)
    assert warning.startswith(f"3 new tokens never learn: {model.tokenizer} has <loc_0>, <loc_1>")
    assert 'remove "llm" from the modules of [freeze] and [adapters]' in warning


def test_trained_or_known_tokens_give_no_warning(model: ModelConfig, tmp_path: Path) -> None:
    assert not untrained_tokens(model, load_tokenizer(model), trains_embeddings=True)
    same = model.model_copy(update={"tokenizer": None})
    assert not untrained_tokens(same, load_tokenizer(same), trains_embeddings=False)
    weights_only = model.model_copy(update={"llm": LlmConfig(source=str(tmp_path / "none"))})
    assert not untrained_tokens(weights_only, load_tokenizer(model), trains_embeddings=False)
