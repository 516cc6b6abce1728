"""The tokenizer of a recipe's model."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from torchmm.common.errors import ConfigError, describe_refusal
from torchmm.recipe.model_section import ModelConfig, split_place


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of `[model]`: the one it names, else that of the composite or LLM.

    Raises:
        ConfigError: there is none, or it cannot be loaded.
    """
    source = model.tokenizer_source
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
        name, revision = split_place(str(source))
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: cannot be loaded: {describe_refusal(error)}") from error
