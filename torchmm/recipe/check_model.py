"""Check the values of the model, generator, adapters and validation of a recipe.

As in `check`, these checks require neither torch nor downloads.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

from torchmm.common.extensions import NOT_INSTALLED, find_entry
from torchmm.common.module_names import GENERATOR, LLM
from torchmm.recipe.data_section import unique_names
from torchmm.recipe.explain import NO_VALUE, Problem, Problems, suggest
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.training_section import BestMetric

SECTION = f"model.{GENERATOR}"


def check_model(recipe: Recipe) -> Problems:
    """Yield problems of `[model]` except those of the generator."""
    model = recipe.model
    if not model.is_composite and model.llm is None:
        text = "no model is set; set model.source (multimodal checkpoint) or model.llm.source"
        yield Problem("model", NO_VALUE, text)
        return
    if model.is_composite and (model.llm is not None or model.encoders):
        text = (
            "model.source and model.config cannot be combined with llm or encoders; use "
            "one of the two forms"
        )
        yield Problem("model", NO_VALUE, text)
        return
    if model.is_composite:
        yield from _check_source("model", model)
    else:
        yield from _check_source("model.llm", model.llm)
    if model.tokenizer_source is None and (recipe.data.sources or not recipe.describes_samples):
        text = (
            "is required, because the model has no source with a tokenizer; set a "
            "directory or a Hub id"
        )
        yield Problem("model.tokenizer", NO_VALUE, text, ("model.llm.source", "model.source"))
    for token in sorted({t for t in model.new_tokens if model.new_tokens.count(t) > 1 or not t}):
        text = f"has {token!r} more than once" if token else "has an empty token"
        yield Problem("model.new_tokens", NO_VALUE, f"{text}; list each token once")
    pinned = model.tokenizer_revision
    yield from check_revision(
        "model.tokenizer_revision", pinned, "model.tokenizer", model.tokenizer
    )
    for name, encoder in model.encoders.items():
        if name == "llm" or not re.fullmatch(r"[A-Za-z_][\w-]*", name):
            text = 'is not a valid encoder name; use letters, digits and "_", and not "llm"'
            yield Problem(f"model.encoders.{name}", NO_VALUE, text)
        yield from _check_source(f"model.encoders.{name}", encoder)


def _check_source(key: str, part: Any) -> Problems:
    """Yield a problem if a module has neither `source` nor `config`."""
    yield from check_revision(f"{key}.revision", part.revision, f"{key}.source", part.source)
    if part.source is None and part.config is None:
        yield Problem(key, NO_VALUE, "neither source nor config is set; set one of the two")
    elif part.source is None and "model_type" not in part.config:
        text = 'is missing; set the Hugging Face model type, for example "llama"'
        yield Problem(f"{key}.config.model_type", NO_VALUE, text)
    elif part.source is not None and is_missing_directory(part.source):
        text = "no such directory; prepare the model first or correct the path"
        yield Problem(f"{key}.source", part.source, text)


def check_revision(key: str, revision: str | None, of: str, source: str | None) -> Problems:
    """Yield a problem if a revision is set for a source that is not on the hub."""
    if revision is not None and (source is None or Path(source).expanduser().exists()):
        kind = "an inline config" if source is None else "a local directory"
        yield Problem(
            key, revision, (f"cannot be applied to {kind}; use a Hub id, or remove the key"), (of,)
        )


def is_path(source: str) -> bool:
    """Return True if a source can only be a path, because a hub id has at most one slash."""
    return source.startswith(("/", ".", "~")) or source.count("/") > 1


def is_missing_directory(source: str) -> bool:
    """Return True if a source can only be a directory and does not exist."""
    return is_path(source) and not Path(source).expanduser().is_dir()


def check_generator(recipe: Recipe) -> Problems:
    """Yield problems of names and keys that require `[model.generator]`.

    The extension that implements generators checks the section itself.
    """
    if GENERATOR in recipe.model.encoders:
        text = "is reserved for the image generator; rename the encoder"
        yield Problem(f"model.encoders.{GENERATOR}", NO_VALUE, text)
    if recipe.model.generator is not None:
        if find_entry("generators", "module") is None:
            yield Problem(SECTION, NO_VALUE, NOT_INSTALLED.format("generation"))
        return
    for key, sources in (("sources", recipe.data.sources), ("validation", recipe.data.validation)):
        for index, source in enumerate(sources):
            if source.target_image_column is not None:
                text = "the model has no generator; add [model.generator] or remove the key"
                name = f"data.{key}[{index}].target_image_column"
                yield Problem(name, source.target_image_column, text, (SECTION,))
    if recipe.validation.generated_images:
        text = "the model has no generator; add [model.generator] or set it to 0"
        yield Problem(
            "validation.generated_images", recipe.validation.generated_images, text, (SECTION,)
        )


def check_adapters(recipe: Recipe) -> Problems:
    """Yield problems of `[adapters]`. Names of linear layers are checked with the model."""
    known = [name for name in recipe.model.modality_modules if name != GENERATOR]
    if recipe.model.is_composite:
        known += [f"{name}.connector" for name in known if name != LLM]
    for name, adapter in recipe.adapters.items():
        key = f"adapters.{name}"
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            text = 'is not a valid adapter name; use letters, digits, "-" and "_"'
            yield Problem(key, NO_VALUE, text)
        if adapter.source is not None and not Path(adapter.source).expanduser().is_dir():
            text = "no such directory; correct the path, or remove the key to create a new adapter"
            yield Problem(f"{key}.source", adapter.source, text)
        for module in adapter.modules:
            if module in known:
                continue
            text = f"does not support adapters{suggest(module, known)}; use one of: "
            text += ", ".join(known)
            if module.endswith(".connector"):
                text += (
                    "; a connector between separate checkpoints is trained without "
                    "adapters: remove it from the list"
                )
            elif module == GENERATOR:
                text += "; adapter files cannot contain the generator: train it without adapters"
            yield Problem(f"{key}.modules", module, text, ("model",))


def check_validation(recipe: Recipe) -> Problems:
    """Yield problems of `[validation]` and `checkpoint.keep_best`.

    `validation.interval` without held-out data is valid, because recipes inherit it from a base.
    """
    data = recipe.data
    validation = recipe.validation
    if not data.validation and validation.num_samples:
        text = "requires validation data; add a [[data.validation]] table, or set samples to 0"
        yield Problem("validation.num_samples", validation.num_samples, text, ("data.validation",))
    if validation.ema and recipe.training.ema_decay is None:
        text = "requires averaged weights; set training.ema_decay"
        yield Problem("validation.ema", True, text, ("training.ema_decay",))
    for index, source in enumerate(data.sources):
        if source.metrics:
            text = "is supported only for validation data; move it to a [[data.validation]] table"
            yield Problem(f"data.sources[{index}].metrics", source.metrics, text)
    generated = {
        "num_samples": validation.num_samples,
        "generated_images": validation.generated_images,
    }
    for key, count in generated.items():
        is_used = count > 0 and validation.interval > 0
        if is_used and find_entry("hooks", "generated_samples") is None:
            text = 'the extension "evaluation" is not installed; set it to 0'
            yield Problem(f"validation.{key}", count, text)
    if validation.early_stopping_patience:
        yield from _check_early_stopping(recipe)
    yield from _check_best(recipe)


def _check_early_stopping(recipe: Recipe) -> Problems:
    key = "validation.early_stopping_patience"
    patience = recipe.validation.early_stopping_patience
    if not recipe.validation.interval:
        text = "requires validation; set validation.interval"
        yield Problem(key, patience, text, ("validation.interval",))
    elif not recipe.data.validation:
        text = "requires validation data; add a [[data.validation]] table"
        yield Problem(key, patience, text, ("data.validation",))


def _check_best(recipe: Recipe) -> Problems:
    best = recipe.checkpoint.keep_best
    if best is None or best.metric == "loss":
        return
    validation = recipe.validation
    key = "checkpoint.keep_best"
    held_out = recipe.data.validation
    scores = {
        f"{name}/{score}"
        for name, source in zip(unique_names(held_out), held_out, strict=True)
        for score in source.metrics
    }
    known = [*get_args(BestMetric), *sorted(scores)]
    if best.metric not in known:
        text = f"is not a metric of this recipe{suggest(best.metric, known)}; use one of: "
        yield Problem(key, best.metric, text + ", ".join(known), ("data.validation",))
    elif not validation.interval:
        text = f'{best.metric} is never computed; set validation.interval, or metric = "loss"'
        yield Problem(key, best.metric, text, ("validation.interval",))
    elif not held_out:
        text = 'requires validation data; add a [[data.validation]] table, or set metric = "loss"'
        yield Problem(key, best.metric, text, ("data.validation",))
    elif best.metric in {"word_error_rate", *scores} and not validation.num_samples:
        text = "is computed from generated text; set validation.num_samples above 0"
        yield Problem(key, best.metric, text, ("validation.num_samples",))
    elif recipe.checkpoint.interval % validation.interval:
        text = (
            f"validation runs every {validation.interval} steps, but checkpoints are saved "
            f"every {recipe.checkpoint.interval}; make checkpoint.interval a multiple of "
            "validation.interval"
        )
        yield Problem(key, best.metric, text, ("checkpoint.interval", "validation.interval"))
