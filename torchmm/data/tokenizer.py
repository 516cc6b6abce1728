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
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: cannot be loaded: {describe_refusal(error)}") from error
