"""The tokenizer of a recipe's model."""

from __future__ import annotations

from pathlib import Path

import jinja2
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from torchmm.common.errors import LIBRARY_ERRORS, ConfigError, describe_refusal
from torchmm.recipe.model_section import ModelConfig, json_problems, split_place

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)
"""JSON files of a tokenizer. Of damaged files transformers names few, and ignores some."""
_TEMPLATES = ("chat_template.jinja", "tokenizer_config.json")


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
    """Return the tokenizer in `source`, a local directory or hub id; its own code is never run.

    Args:
        key: Key and value of the recipe that name it, for messages.

    Raises:
        ConfigError: The tokenizer cannot be loaded, or its chat template is not valid.
    """
    name, revision = split_place(str(source))
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain Exceptions for damaged files
        damaged = json_problems(Path(name), _FILES) + _template_problems(Path(name))
        check = f" (check {' and '.join(_FILES[:2])})" if Path(name).is_dir() else ""
        reason = "; ".join(damaged) or f"{describe_refusal(error)}{check}"
        raise ConfigError(f"{key}: cannot be loaded: {reason}") from error
    if damaged := json_problems(Path(name), _FILES[1:4]) + _template_problems(Path(name)):
        raise ConfigError([f"{key}: {problem}; download the file again" for problem in damaged])
    templates = tokenizer.chat_template or {}
    for template in templates.values() if isinstance(templates, dict) else [templates]:
        try:
            render_jinja_template([], chat_template=template)
        except (jinja2.TemplateError, *LIBRARY_ERRORS) as error:
            raise ConfigError(
                f"{key}: its chat template ({' or '.join(_TEMPLATES)}) is not valid: "
                f"{describe_refusal(error)}; correct or remove it"
            ) from error
    return tokenizer


def _template_problems(directory: Path) -> list[str]:
    """Return a message if chat_template.jinja cannot be read."""
    file = directory / _TEMPLATES[0]
    try:
        if file.exists() and not file.is_file():
            return [f"{file} is not a regular file"]
        file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        return [f"{file} cannot be read ({error})"]
    return []
