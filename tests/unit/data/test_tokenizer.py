"""Tokenizers: warnings about new tokens, and normalizers that expand text without a bound."""

from pathlib import Path

import pytest
from tokenizers import Regex, normalizers
from transformers import AutoTokenizer

from torchmm.common.errors import ConfigError
from torchmm.data.tokenizer import describe_untrained_tokens, load_tokenizer, read_tokenizer
from torchmm.recipe.model_section import LlmConfig, ModelConfig


@pytest.fixture
def model(real_data: Path, tmp_path: Path) -> ModelConfig:
    """Return a model whose tokenizer has 4 tokens more than the tokenizer of the LLM source."""
    source = real_data / "tokenizer"
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens(["<img_new>", "<loc_0>", "<loc_1>", "<loc_2>"])
    tokenizer.save_pretrained(tmp_path)
    llm = LlmConfig(source=str(source))
    return ModelConfig(llm=llm, tokenizer=str(tmp_path), image_token="<img_new>")


def test_new_tokens_with_frozen_embeddings_are_listed(model: ModelConfig) -> None:
    warning = describe_untrained_tokens(model, load_tokenizer(model), trains_embeddings=False)
    assert warning.startswith(
        f"3 new tokens would not be trained: {model.tokenizer} has <loc_0>, <loc_1>"
    )
    assert 'remove "llm" from the modules of [freeze] and [adapters]' in warning


def test_trained_or_known_tokens_give_no_warning(model: ModelConfig, tmp_path: Path) -> None:
    assert not describe_untrained_tokens(model, load_tokenizer(model), trains_embeddings=True)
    same = model.model_copy(update={"tokenizer": None})
    assert not describe_untrained_tokens(same, load_tokenizer(same), trains_embeddings=False)
    weights_only = model.model_copy(update={"llm": LlmConfig(source=str(tmp_path / "none"))})
    assert not describe_untrained_tokens(
        weights_only, load_tokenizer(model), trains_embeddings=False
    )


def test_missing_tokenizer_names_local_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none is not a local directory either"):
        read_tokenizer("model.tokenizer", tmp_path / "none")


def doubling(count: int) -> normalizers.Sequence:
    return normalizers.Sequence([normalizers.Replace("a", "aa") for _ in range(count)])


@pytest.fixture
def read(tmp_path, tokenizer):
    """Return a function that saves and reads a tokenizer with a normalizer."""

    def made(normalizer):
        tokenizer.save_pretrained(tmp_path)
        copied = read_tokenizer("model.tokenizer", tmp_path)
        copied.backend_tokenizer.normalizer = normalizer
        copied.save_pretrained(tmp_path)
        return read_tokenizer("model.tokenizer", tmp_path)

    return made


@pytest.mark.parametrize(
    "normalizer",
    [
        doubling(30),
        normalizers.Sequence([doubling(10), normalizers.Sequence([doubling(10)])]),
        normalizers.Replace(Regex("a*"), "a" * 10_000),
        normalizers.Sequence([normalizers.Replace("a", "b" * 1000)] * 200),
    ],
)
def test_growing_normalizer_is_rejected(read, normalizer):
    with pytest.raises(ConfigError, match=r"model.tokenizer: the normalizer of tokenizer.json"):
        read(normalizer)


@pytest.mark.parametrize(
    "normalizer",
    [
        None,
        normalizers.NFKC(),
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        normalizers.Sequence([normalizers.Replace(Regex(" {2,}"), " "), normalizers.Lowercase()]),
    ],
)
def test_usual_normalizer_is_read(read, normalizer):
    assert read(normalizer).encode("a")
