"""Settings of Hugging Face configs that torchmm rejects for every family, and RoPE settings."""

from __future__ import annotations

import re
from typing import Any

_RANDOM_RATES = re.compile(
    r"dropout|pdrop|drop_|_drop\b|layerdrop|droppath|jitter|noise|stochastic"
)
_UNUSED_RATES = re.compile(
    # Heads that torchmm does not build, and DINOv3 positions, which its family keeps fixed.
    r"(final|feat_quantizer|pooler|qa|seq_classif|summary_\w+|\w*classifier)_dropout(_prob|_rate)?"
    r"|pos_embed_jitter"
)
_LAYER_INDEX_KEYS = re.compile(r"\w+_(indexes|indices|idxs|layers)")
_PER_LAYER_LISTS = ("no_rope_layers", "layer_types", "mlp_layer_types")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts")


def rope_settings(config: Any) -> list[dict[str, Any]]:
    """Return the RoPE settings of a config, one dict per layer type with separate settings."""
    settings = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [table for table in settings.values() if isinstance(table, dict)]
    return by_layer_type or [settings]


def is_random_rate(name: str, value: Any) -> bool:
    """Return True if a setting is the rate of a random change in training, which has to be 0."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and bool(_RANDOM_RATES.search(name)) and not _UNUSED_RATES.fullmatch(name)


def setting_problems(key: str, config: Any) -> list[str]:
    """Return the settings of `config` that are rejected for every family."""
    known = vars(type(config)())  # published files may have keys that no class reads
    settings = {name: value for name, value in vars(config).items() if name in known}
    problems = [
        f"{name} = {value} is not supported; override it with 0.0"
        for name, value in settings.items()
        if value and is_random_rate(name, value)
    ]
    for rope in rope_settings(config):
        kind = str(rope.get("rope_type"))
        if "mrope_section" in rope and (kind == "longrope" or "dynamic" in kind):
            problems.append(
                f"rope_parameters: rope_type = {kind!r} with mrope_section is not supported; "
                'use "default" or "yarn"'
            )
    problems += _layer_number_problems(settings)
    problems += _expert_problems(settings)
    routes = getattr(config, "output_router_logits", False)
    if routes and not hasattr(config, "router_aux_loss_coef"):
        problems.append(
            f"output_router_logits = true: {config.model_type!r} has no load-balancing loss; "
            "override it with false"
        )
    return [f"[{key}] {problem}" for problem in problems]


def _layer_number_problems(settings: dict[str, Any]) -> list[str]:
    """Return layer numbers beyond the last layer, as in copies with fewer layers."""
    names = ("num_hidden_layers", "depth", "encoder_layers")
    counts = [(name, layers) for name in names if (layers := settings.get(name))]
    if not counts:
        return []
    of_count, layers = counts[0]
    problems = []
    for name, value in settings.items():
        numbers = list(value) if isinstance(value, (list, tuple)) else []
        if name in _PER_LAYER_LISTS:
            if numbers and len(numbers) != layers:
                problems.append(f"{name} has {len(numbers)} entries, but {of_count} = {layers}")
        elif _LAYER_INDEX_KEYS.fullmatch(name) and not name.startswith("_"):
            invalid = [n for n in numbers if isinstance(n, int) and not 0 <= n < layers]
            if invalid:
                problems.append(
                    f"{name} = {numbers}: layer {invalid[0]} does not exist with {of_count} = "
                    f"{layers}"
                )
    first = settings.get("first_k_dense_replace") or 0
    if first >= layers:
        problems.append(
            f"first_k_dense_replace = {first} leaves no layer with experts if {of_count} = "
            f"{layers}; use a smaller number"
        )
    window = settings.get("max_window_layers") or 0
    windows = "sliding_attention" in (settings.get("layer_types") or ())
    if settings.get("use_sliding_window") and window > layers and not windows:
        problems.append(
            f"max_window_layers = {window} leaves no layer with sliding attention if "
            f"{of_count} = {layers}; use a smaller number, or use_sliding_window = false"
        )
    return problems


def _expert_problems(settings: dict[str, Any]) -> list[str]:
    problems = []
    experts = next((value for name in _EXPERT_COUNTS if (value := settings.get(name))), 0)
    problems += [
        (
            f"{name} = {settings[name]} is above the number of experts, {experts}; use at most "
            f"{experts}"
        )
        for name in _EXPERTS_PER_TOKEN
        if experts and (settings.get(name) or 0) > experts
    ]
    groups, chosen_groups = (settings.get(name) for name in ("n_group", "topk_group"))
    if experts and groups and (experts % groups or experts < 2 * groups):
        problems.append(
            f"n_group = {groups} must divide the {experts} experts into groups of at least 2; "
            "use a smaller divisor"
        )
    if groups and chosen_groups and chosen_groups > groups:
        problems.append(
            f"topk_group = {chosen_groups} is above n_group = {groups}; use at most {groups}"
        )
    return problems
