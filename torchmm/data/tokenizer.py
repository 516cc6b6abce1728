"""The tokenizer of a recipe's model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from torchmm.common.errors import ConfigError, describe_refusal
from torchmm.recipe.model_section import ModelConfig, split_place

MAX_GROWTH = 4096
"""Times a normalizer may lengthen a text. Published normalizers replace 1 character by up to 18."""


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of `[model]`: the one it names, else that of the composite or LLM.

    Raises:
        ConfigError: there is none, or it cannot be loaded.
    """
    source = model.tokenizer_source
    if source is None:
        raise ConfigError("model.tokenizer: an inline LLM config needs a tokenizer; name one")
    return read_tokenizer(f"model.tokenizer = {source!r}", source)


def untrained_tokens(
    model: ModelConfig, tokenizer: PreTrainedTokenizerBase, *, trains_embeddings: bool
) -> str:
    """Return a warning about frozen tokens that the tokenizer of the LLM source lacks.

    The embeddings of placeholders are replaced by features, so placeholders are not listed.

    Args:
        model: `[model]` of the recipe.
        tokenizer: Tokenizer of the run.
        trains_embeddings: Whether the embeddings of the LLM are trained.

    Returns:
        The warning, or "" if all tokens are known, learn, or cannot be compared.
    """
    source = model.place if model.llm is None else model.llm.place
    if trains_embeddings or source is None or source == model.tokenizer_source:
        return ""
    try:
        known = read_tokenizer("tokenizer of the LLM", source).get_vocab()
    except ConfigError:
        return ""  # the source has weights only
    placeholders = {model.image_token, tokenizer.pad_token}
    new = {t: i for t, i in tokenizer.get_vocab().items() if t not in known}
    names = sorted(new.keys() - placeholders, key=lambda token: new[token])
    if not names:
        return ""
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return (
        f"{len(names)} new tokens never learn: {model.tokenizer_source} has {shown}, which the "
        f'tokenizer of {source} lacks, and the embeddings are frozen; remove "llm" from the '
        "modules of [freeze] and [adapters], or use tokens of the source"
    )


def read_tokenizer(key: str, source: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in `source`, a local directory or hub id; its own code is never run.

    Args:
        key: what names it, for messages.

    Raises:
        ConfigError: it cannot be loaded.
    """
    try:
        name, revision = split_place(str(source))
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: cannot be loaded: {describe_refusal(error)}") from error
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    if normalizer is not None:
        growth = _max_growth(json.loads(normalizer.__getstate__()))
        if growth > MAX_GROWTH:
            raise ConfigError(
                f"{key}: the normalizer of tokenizer.json makes texts up to {growth:.3g} times as "
                f"long, at most {MAX_GROWTH} times are supported; use another tokenizer"
            )
    return tokenizer


def _max_growth(normalizer: dict[str, Any]) -> float:
    """Return the largest ratio of text lengths after and before a normalizer.

    Normalization is C code, which nothing interrupts: a sequence of 30 rules that double a letter
    writes a gigabyte for each.
    """
    growth = 1.0
    for step in normalizer.get("normalizers", ()):
        growth *= _max_growth(step)
    if normalizer["type"] == "Replace":
        # A regular expression may match between any two characters.
        length = len(normalizer["pattern"].get("String", ""))
        content = len(normalizer["content"])
        growth = max(1.0, content / length if length else 1.0 + content)
    return min(growth, 1e300)
