"""Checks of configs that come from recipes and files, before and while models are built from them.

Hugging Face and diffusers check types of most values and few ranges. A wrong size shows up as a
traceback deep inside a layer, and a huge size as memory or time without end. `value_problems` finds
such values by the names of their keys. `build_checked` turns all that a model class still raises
into a ConfigError, and finds the responsible keys by leaving them out.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from torchmm.common.errors import LIBRARY_ERRORS, ConfigError, describe_error
from torchmm.recipe.section import Section

S = TypeVar("S", bound=Section)
T = TypeVar("T")
ConfigDict = dict[str, Any]
KeyPath = tuple[Any, ...]

MODEL_ERRORS = (*LIBRARY_ERRORS, StrictDataclassError)
"""Exceptions that config and model classes raise for values they cannot use."""
MAX_LAYERS = 4096
MAX_COUNT = 2**16
"""Upper bound of numbers of heads, experts and channels."""
MAX_SIZE = 2**31 - 1
MAX_SIDE = 2**13
"""Upper bound of rows and columns of images and spectrograms, which processors allocate."""
MAX_FLOAT = 3.4e38
MAX_DEPTH = 16
"""Nested tables in a config; published configs have at most 4."""
SEARCH_S = 5.0
"""Time limit of the search for the keys that cause an error."""

_LAYERS = re.compile(r"(^|_)(layers|depth|depths)$")
_COUNTS = re.compile(r"(^|_)(heads|experts|groups?|channels|kernels?|stride|registers|cls_tokens)$")
_SIZES = re.compile(
    r"(^|_)(size|dim|dims|rank|patches|embeddings|positions|positions_embeddings|window|bins|"
    r"d_model|width|per_tok|interval|pattern|pattern_size)$"
)
_POSITIVE = re.compile(
    r"^(hidden_size|embed_dim|d_model|vocab_size|image_size|patch_size|temporal_patch_size|"
    r"spatial_merge_size|intermediate_size|moe_intermediate_size|num_hidden_layers|num_layers|"
    r"encoder_layers|depth|n_layer|num_attention_heads|num_heads|num_key_value_heads|n_head|"
    r"encoder_attention_heads|head_dim|attention_head_dim|num_channels|in_channels|in_chans|"
    r"max_position_embeddings|max_source_positions|num_mel_bins|encoder_ffn_dim|num_experts_per_tok|"
    r"n_window|conv_kernel|conv_stride|conv_dim|linear_\w+|\w+_kernel_dim|conv_L_cache|"
    r"scale_factor|block_out_channels|latent_channels|norm_num_groups|layers_per_block|sample_size)$"
)
_SIDES = re.compile(
    r"^(image_size|patch_size|temporal_patch_size|max_img_size|crop_size|sample_size|height|width|"
    r"num_mel_bins|feature_size)$"
)
_NOT_NEGATIVE = re.compile(r"(^|_)(eps|epsilon|std|range)$")
_ABOVE_ZERO = re.compile(
    r"^(rope_theta|rope_local_base_freq|theta|logits_scaling|\w+_theta|image_std)$"
)
_ACTIVATIONS = re.compile(r"(^|_)(hidden_act|act|activation|activation_function)$")
_DTYPES = ("dtype", "torch_dtype")
_ROPE_TABLES = ("rope_parameters", "rope_scaling")
_OTHER_TABLES = ("quantization_config", "task_specific_params")
"""Tables whose keys have other meanings."""
_ROPE_TYPES = {*ROPE_INIT_FUNCTIONS, "default", "axial", "mrope", "su"}
"""Those of transformers, and older names that config classes translate."""


def value_problems(location: str, settings: ConfigDict) -> list[str]:
    """Return a message for each value of a config that no model class can use.

    Only values that are wrong for every model are found. Keys that are not known are ignored.

    Args:
        location: Section or file, for the messages.
        settings: Config as in the recipe or in config.json, with nested tables.
    """
    return [f"{location}: {problem}" for problem in _nested_problems("", settings, 0)]


def _nested_problems(above: str, settings: ConfigDict, depth: int) -> Iterator[str]:
    if depth > MAX_DEPTH:
        yield f"{above[:60]}... has more than {MAX_DEPTH} nested objects"
        return
    pad = settings.get("pad_token_id")
    vocabulary = settings.get("vocab_size")
    if isinstance(pad, int) and isinstance(vocabulary, int) and pad >= vocabulary:
        yield (
            f"{above}pad_token_id = {pad} is not below vocab_size = {vocabulary}; correct one of "
            "them"
        )
    if above and not isinstance(model_type := settings.get("model_type", ""), str):
        yield f"{above}model_type = {_truncate_repr(model_type)} is not a string; use a model type"
    for name, value in settings.items():
        path = f"{above}{name}"
        if name in _OTHER_TABLES:
            continue
        if isinstance(value, dict) and name != "image_processor_type":
            yield from _nested_problems(f"{path}.", value, depth + 1)
            if name in _ROPE_TABLES:
                yield from _rope_problems(f"{path}.", value)
        elif reason := _value_problem(str(name), value):
            yield f"{path} = {_truncate_repr(value)} {reason}"


def _rope_problems(above: str, table: ConfigDict) -> Iterator[str]:
    """Yield unknown RoPE types; some models have a table for each type of layer."""
    for name in ("rope_type", "type"):
        if name in table and table[name] not in [*_ROPE_TYPES, None]:
            known = ", ".join(sorted(_ROPE_TYPES))
            yield f"{above}{name} = {_truncate_repr(table[name])} is unknown; use one of: {known}"
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _rope_problems(f"{above}{name}.", value)


def _value_problem(name: str, value: Any) -> str:
    """Return the end of the sentence "KEY = VALUE ...", or "" if the value may be right."""
    if isinstance(value, str):
        if _ACTIVATIONS.search(name) and value not in ACT2FN:
            return f"is not an activation function; use one of: {', '.join(ACT2FN)}"
        if name in _DTYPES and not is_dtype(value):
            return 'is not a torch dtype; use "float32", "bfloat16" or "float16"'
        return ""
    if name == "image_processor_type":
        return "is not a string; use the name of a class"
    if name == "return_dict" and value is not None and not value:
        return "is not supported; use true"
    numbers = value if isinstance(value, (list, tuple)) else [value]
    numbers = [x for x in numbers if isinstance(x, (int, float)) and not isinstance(x, bool)]
    return next((reason for x in numbers if (reason := _number_problem(name, x))), "")


def _number_problem(name: str, value: float) -> str:
    if not abs(value) <= MAX_FLOAT and not (value == math.inf and name.endswith("_limit")):
        return "is not a finite number in float32"
    maximum = _upper_bound(name)
    minimum = 1 if _POSITIVE.search(name) else 0
    if maximum is not None and not minimum <= value <= maximum:
        return f"is out of range; use a number from {minimum} to {maximum}"
    if _NOT_NEGATIVE.search(name) and value < 0:
        return "is negative; use 0 or more"
    if _ABOVE_ZERO.search(name) and value <= 0:
        return "is not positive; use a number above 0"
    if abs(value) > 2**63 - 1 and isinstance(value, int):
        return "does not fit in 64 bits"
    return ""


def _upper_bound(name: str) -> int | None:
    """Return the upper bound of a count or size by the name of its key."""
    if _LAYERS.search(name):
        return MAX_LAYERS
    if _COUNTS.search(name):
        return MAX_COUNT
    if _SIDES.search(name):
        return MAX_SIDE
    return MAX_SIZE if _SIZES.search(name) or _POSITIVE.search(name) else None


def is_dtype(name: str) -> bool:
    """Return True if `name` is a dtype of torch, with or without "torch." before it, or "auto"."""
    return name == "auto" or isinstance(
        getattr(torch, name.removeprefix("torch."), None), torch.dtype
    )


def build_checked(key: str, section: S, build: Callable[[S], T]) -> T:
    """Return `build(section)`; raise a ConfigError for everything that a model class raises.

    If `build` fails, it runs again without one value of `config` and `processor` at a time. Values
    without which it succeeds are named as the possible causes.

    Args:
        key: Section, for the message.
        section: Section of the recipe with a key `config`.
        build: Builds on the meta device. Errors that are ConfigErrors are passed on.

    Raises:
        ConfigError: The model cannot be built.
    """
    try:
        return build(section)
    except MODEL_ERRORS as error:
        tables = {name: getattr(section, name, None) or {} for name in ("config", "processor")}
        written = {name: table for name, table in tables.items() if table}
        causes = find_causes(written, error, lambda t: build(section.model_copy(update=t)))
        raise ConfigError(
            f"[{key}] {causes or 'config'} cannot be used to build the model; correct it "
            f"({describe_error(error)})"
        ) from error


def find_causes(settings: ConfigDict, error: Exception, build: Callable[[ConfigDict], Any]) -> str:
    """Return "KEY = VALUE or ..." of the settings that may cause `error`.

    These are settings without which `build` succeeds. If there are none, several settings are
    wrong, and those without which `build` raises a different error are returned. Errors of model
    classes are preferred to ConfigErrors, which also arise from settings that are missing.
    """
    causes: list[str] = []
    other_errors: list[str] = []
    rejected: list[str] = []
    first = describe_error(error)
    stop = time.monotonic() + SEARCH_S
    for path, value in [
        *_iter_values(settings, tables=False),
        *_iter_values(settings, tables=True),
    ]:
        if time.monotonic() > stop or (causes and isinstance(value, dict)):
            break
        named = f"{'.'.join(map(str, path))} = {_truncate_repr(value)}"
        try:
            build(_without_key(settings, path))
            causes.append(named)
        except ConfigError:
            rejected.append(named)
        except MODEL_ERRORS as second:
            if describe_error(second) != first:
                other_errors.append(named)
    return " or ".join(causes or other_errors or rejected)


def _iter_values(
    settings: ConfigDict, tables: bool, above: KeyPath = ()
) -> Iterator[tuple[KeyPath, Any]]:
    """Yield paths and values of nested settings, either the tables or all other values."""
    for name, value in settings.items():
        path = (*above, name)
        if isinstance(value, dict) and value:
            yield from _iter_values(value, tables, path)
            if tables and above:
                yield path, value
        elif not tables and name != "_class_name" and str(value) not in CONFIG_MAPPING:
            yield path, value


def _without_key(settings: ConfigDict, path: KeyPath) -> ConfigDict:
    first, *remaining = path
    if not remaining:
        return {name: value for name, value in settings.items() if name != first}
    return {**settings, first: _without_key(settings[first], tuple(remaining))}


def _truncate_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
