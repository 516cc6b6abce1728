"""The tokenizer of a recipe."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from torchmm.config import Recipe
from torchmm.errors import ConfigError
from torchmm.models.hf_config import describe_refusal


def load_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """The recipe's tokenizer: its own key, else that of the LLM or composite model.

    Raises:
        ConfigError: none is named, or it cannot be loaded.
    """
    model = recipe.model
    source = model.tokenizer or model.source or (model.llm.source if model.llm else None)
    if source is None:
        raise ConfigError("model.tokenizer: an inline LLM config needs a tokenizer; name one")
    return read_tokenizer(f"model.tokenizer = {source!r}", source)


def read_tokenizer(key: str, source: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in `source`, a local directory or hub id; its own code is never run.

    Args:
        key: what names it, for messages.

    Raises:
        ConfigError: it cannot be loaded.
    """
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: cannot be loaded: {describe_refusal(error)}") from error
