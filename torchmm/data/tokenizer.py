"""Load and check the tokenizer of a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from torchmm.common.errors import LIBRARY_ERRORS, ConfigError, describe_load_error
from torchmm.recipe.model_section import ModelConfig, NewTokens, json_problems, split_revision

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)
"""JSON files of a tokenizer. transformers ignores some damaged files without an error."""
_TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json")
MAX_LENGTH_RATIO = 4096
"""Maximum growth of text by a normalizer. Published normalizers have at most a factor of 18."""


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of `model.tokenizer`, or by default of the composite model or LLM.

    It has the tokens of `model.new_tokens`.

    Raises:
        ConfigError: The recipe has no tokenizer, it cannot be loaded, or a new token cannot be
            added.
    """
    return _load(model)[0]


def read_new_tokens(model: ModelConfig) -> NewTokens | None:
    """Return the ids of `model.new_tokens`, or None without new tokens.

    Raises:
        ConfigError: As `load_tokenizer`.
    """
    return _load(model)[1] if model.new_tokens else None


def _load(model: ModelConfig) -> tuple[PreTrainedTokenizerBase, NewTokens]:
    source = model.tokenizer_source
    if source is None:
        raise ConfigError(
            "model.tokenizer: an inline LLM config requires a tokenizer; set model.tokenizer"
        )
    tokenizer = read_tokenizer(f"model.tokenizer = {source!r}", source)
    return tokenizer, _add_tokens(tokenizer, model)


def _add_tokens(tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> NewTokens:
    """Add `model.new_tokens` to a tokenizer in place, and return their ids.

    New tokens are not special, so that they are also one id in the text of samples, and decoding
    does not skip them. The placeholder of images is special, because text must not contain it.

    Raises:
        ConfigError: A token does not become one id.
    """
    before = tokenizer.get_vocab()
    known = max(before.values(), default=-1) + 1
    missing = [token for token in model.new_tokens if token not in before]
    for token in missing:
        is_special = token == model.image_token
        added = AddedToken(token, normalized=False, special=is_special)
        tokenizer.add_tokens([added], special_tokens=is_special)
    vocabulary = tokenizer.get_vocab()
    ids = tuple(vocabulary.get(token, -1) for token in model.new_tokens)
    expected = iter(range(known, known + len(missing)))
    problems = []
    for token, index in zip(model.new_tokens, ids, strict=True):
        encoded = tokenizer(token, add_special_tokens=False).input_ids
        if encoded != [index] or (token not in before and index != next(expected)):
            problems.append(
                f"model.new_tokens: {token!r} has id {index} and is encoded as {encoded} by this "
                "tokenizer; use a token without spaces that contains no other token"
            )
    if problems:
        raise ConfigError(problems)
    return NewTokens(ids, tuple(range(known, known + len(missing))), known)


def describe_untrained_tokens(
    model: ModelConfig, tokenizer: PreTrainedTokenizerBase, *, trains_embeddings: bool
) -> str:
    """Return a warning about frozen tokens that the tokenizer of the LLM source lacks.

    The embeddings of placeholders are replaced by features, so placeholders are not listed.

    Args:
        model: `[model]` of the recipe.
        tokenizer: Tokenizer of the run.
        trains_embeddings: Whether the embeddings of the LLM are trained.

    Returns:
        The warning. Empty if there are no new tokens, if embeddings are trained, or if the
        tokenizers cannot be compared.
    """
    source = model.source_with_revision if model.llm is None else model.llm.source_with_revision
    if trains_embeddings or source is None or source == model.tokenizer_source:
        return ""
    try:
        known = read_tokenizer("tokenizer of the LLM", source).get_vocab()
    except ConfigError:
        return ""  # the source has weights only
    placeholders = {model.image_token, tokenizer.pad_token, *model.new_tokens}
    new = {t: i for t, i in tokenizer.get_vocab().items() if t not in known}
    names = sorted(new.keys() - placeholders, key=lambda token: new[token])
    if not names:
        return ""
    listed = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return (
        f"{len(names)} new tokens would not be trained: {model.tokenizer_source} has {listed}, "
        f"which are missing in the tokenizer of {source}, and the embeddings are frozen; "
        'remove "llm" from the modules of [freeze] and [adapters], or use tokens of the '
        "source"
    )


def read_tokenizer(key: str, source: str | Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a local directory or Hub id. Custom code is never run.

    Args:
        key: Key and value in the recipe, for messages.
        source: Local directory or Hub id.

    Raises:
        ConfigError: The tokenizer cannot be loaded, or its chat template is not valid.
    """
    name, revision = split_revision(str(source))
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain Exceptions for damaged files
        damaged = json_problems(Path(name), _TOKENIZER_FILES) + _template_problems(Path(name))
        check = f" (check {' and '.join(_TOKENIZER_FILES[:2])})"
        if not Path(name).is_dir():
            check = f" ({name} is not a local directory either)"
        reason = "; ".join(damaged) or f"{describe_load_error(error)}{check}"
        raise ConfigError(f"{key}: cannot be loaded: {reason}") from error
    if damaged := json_problems(Path(name), _TOKENIZER_FILES[1:4]) + _template_problems(Path(name)):
        raise ConfigError([f"{key}: {problem}; download the file again" for problem in damaged])
    templates = tokenizer.chat_template or {}
    for template in templates.values() if isinstance(templates, dict) else [templates]:
        try:
            render_jinja_template([], chat_template=template)  # compiles, and renders no chat
        except (jinja2.TemplateError, *LIBRARY_ERRORS) as error:
            raise ConfigError(
                f"{key}: its chat template ({' or '.join(_TEMPLATE_FILES)}) is not valid: "
                f"{describe_load_error(error)}; correct or remove it"
            ) from error
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    if normalizer is not None:
        growth = _max_length_ratio(json.loads(normalizer.__getstate__()))
        if growth > MAX_LENGTH_RATIO:
            raise ConfigError(
                f"{key}: the normalizer of tokenizer.json makes text up to {growth:.3g} times "
                f"as long, but the limit is {MAX_LENGTH_RATIO}; use another tokenizer"
            )
    return tokenizer


def _template_problems(directory: Path) -> list[str]:
    """Return a list with a message if chat_template.jinja cannot be read, else an empty list."""
    file = directory / _TEMPLATE_FILES[0]
    try:
        if file.exists() and not file.is_file():
            return [f"{file} is not a regular file"]
        file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        return [f"{file} cannot be read ({error})"]
    return []


def _max_length_ratio(normalizer: dict[str, Any]) -> float:
    """Return the largest ratio of text lengths after and before a normalizer.

    Normalization runs in native code that cannot be interrupted. A sequence of 30 rules that each
    double a letter would write 1 GB per letter.
    """
    growth = 1.0
    for step in normalizer.get("normalizers", ()):
        growth *= _max_length_ratio(step)
    if normalizer["type"] == "Replace":
        # A regular expression may match between any two characters.
        length = len(normalizer["pattern"].get("String", ""))
        content = len(normalizer["content"])
        growth = max(1.0, content / length if length else 1.0 + content)
    return min(growth, 1e300)
