"""Tokenizers whose files would make texts grow without end are rejected."""

import pytest
from tokenizers import Regex, normalizers

from torchmm.common.errors import ConfigError
from torchmm.data.tokenizer import read_tokenizer


def doubling(count: int) -> normalizers.Sequence:
    return normalizers.Sequence([normalizers.Replace("a", "aa") for _ in range(count)])


@pytest.fixture
def read(tmp_path, tokenizer):
    """The tokenizer that is read from a directory, with another normalizer."""

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
