"""The tokenizer of a recipe."""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from torchmm.config import Recipe
from torchmm.errors import ConfigError


def load_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """The recipe's tokenizer: its own key, else that of the LLM or composite model.

    Raises:
        ConfigError: none is named, or it cannot be loaded.
    """
    model = recipe.model
    source = model.tokenizer or model.source or (model.llm.source if model.llm else None)
    if source is None:
        raise ConfigError("model.tokenizer: an inline LLM config needs a tokenizer; name one")
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"model.tokenizer = {source!r}: cannot be loaded: {reason}") from error
