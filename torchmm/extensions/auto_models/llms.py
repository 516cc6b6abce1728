"""Causal LMs that no table lists: finding their form, and a short, narrow copy of their config.

Most causal LMs have one form: a table of embeddings, a list of decoder layers, a final norm, a
head. Those parts are found by what Hugging Face's classes say of them (`get_input_embeddings`,
`get_output_embeddings`, the list as long as the config's number of layers), not by their names.
That a model has the form does not mean that it may be cut and packed;
`extensions/auto_models/unlisted.py` proves that on the copy before anything is trained.

The copy has few features, heads, experts and tokens, and windows that are shorter than its samples,
but as many layers as show every kind that the model has. Rejected: taking some layers out of the
middle, as many configs give kinds by index ("every fourth", "the first three").
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from torchmm.common.errors import ConfigError
from torchmm.models.families.forms import (
    SMALL,
    is_outside,
    randomize,
    shrunk_value,
    small_copy,
)
from torchmm.models.families.llms.family import LlmFamily


def find_form(model: PreTrainedModel) -> LlmFamily | list[str]:
    """Where a causal LM has what a layered module needs, or what it lacks."""
    layers_n = getattr(model.config, "num_hidden_layers", None)
    names = {id(part): name for name, part in model.named_modules()}
    table = names.get(id(_embeddings(model)), "")
    head = names.get(id(model.get_output_embeddings()), "")
    lists = [
        name
        for name, part in model.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) == layers_n and is_outside(model, name)
    ]
    lacking = [
        what
        for what, found in (
            ("table of embeddings", table),
            ("head", head),
            ("list of layers", lists),
        )
        if not found
    ]
    if lacking:
        return [f"no {what}" for what in lacking]
    owner = table.rpartition(".")[0]
    layers = [name for name in lists if name.rpartition(".")[0] == owner]
    if len(layers) != 1 or not owner:
        return [f"its layers ({', '.join(lists)}) are not beside its embeddings ({table})"]
    parts = dict(model.get_submodule(owner).named_children())
    own = {table.rpartition(".")[2], layers[0].rpartition(".")[2]}
    others = [
        n for n, part in parts.items() if n not in own and any(True for _ in part.parameters())
    ]
    norms = [n for n in others if "norm" in n or "ln" in n]
    strange = [n for n in others if n not in norms[-1:]]
    strange += [n for n, _ in model.get_submodule(owner).named_parameters(recurse=False)]
    strange += [
        n for n, p in model.named_parameters() if not n.startswith((f"{owner}.", f"{head}."))
    ]
    if strange:
        return [
            "parts with weights besides embeddings, layers, one norm and head: "
            + ", ".join(strange)
        ]
    unweighted = [n for n in parts if n not in own and "norm" in n]
    return LlmFamily(
        text_model=owner,
        layers=layers[0].rpartition(".")[2],
        embedding=table.rpartition(".")[2],
        final_norm=next(iter(norms or unweighted), ""),
        head=head,
        norms=(),
        listed=False,
    )


def _embeddings(model: PreTrainedModel) -> nn.Module | None:
    try:
        return model.get_input_embeddings()
    except NotImplementedError:
        return None


def copy_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A config of the same kind whose model is small and has every kind of layer.

    Raises:
        ConfigError: the copy has not.
    """
    return small_copy(config, _layers, _shrunk)


_LOGIT_KEYS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "dim_model_base")
"""Settings to name in the message; the copy decides whether logits differ."""


def own_logits(config: PreTrainedConfig, family: LlmFamily, *, caps: bool = False) -> str:
    """Return how an LLM changes its logits before or after the head, or "" if it does not.

    Hugging Face composites have a separate head and omit such a change. A small random copy of the
    LLM shows it, because it depends on settings as well as on the class.

    Args:
        config: Config of the causal LM.
        family: Family with the names of the parts.
        caps: Whether the composite applies `final_logit_softcapping` itself.
    """
    settings = config.to_dict()
    values = {key: settings[key] for key in _LOGIT_KEYS if settings.get(key) not in (None, 1)}
    names = family.text_model, family.layers, family.head
    if getattr(config, "is_heterogeneous", False):  # has no small copy
        return "" if caps else "has layers of different sizes and may cap its logits"
    if not _changes_logits(json.dumps(settings, sort_keys=True, default=str), names, caps):
        return ""
    named = ", ".join(f"{key} = {value}" for key, value in values.items())
    return f"scales or caps its logits ({named})" if named else "scales or caps its logits"


@lru_cache
def _changes_logits(settings: str, names: tuple[str, str, str], caps: bool) -> bool:
    text_model, layers, head = names

    def layers_of(config: PreTrainedConfig) -> nn.ModuleList:
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        found = model.get_submodule(f"{text_model}.{layers}")
        assert isinstance(found, nn.ModuleList)
        return found

    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)  # does not change generators of GPUs
        small = small_copy(AutoConfig.for_model(**json.loads(settings)), layers_of, _shrunk)
        plain = AutoModelForCausalLM.from_config(
            small, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        ).eval()
        randomize(plain)
        ids = torch.randint(3, 60, (1, 9))
        hidden = plain.get_submodule(text_model)(ids, use_cache=False).last_hidden_state
        expected = plain.get_submodule(head)(hidden)
        cap = getattr(small, "final_logit_softcapping", None)
        if caps and cap is not None:
            expected = torch.tanh(expected / cap) * cap
        logits = plain(ids, use_cache=False).logits
        return not torch.allclose(logits, expected, rtol=1e-5, atol=1e-6)


def _layers(config: PreTrainedConfig) -> nn.ModuleList:
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    family = find_form(model)
    if isinstance(family, list):
        raise ConfigError(family)
    found = model.get_submodule(f"{family.text_model}.{family.layers}")
    assert isinstance(found, nn.ModuleList)
    return found


def _shrunk(config: PreTrainedConfig, layers: int) -> dict[str, Any]:
    """Settings of the copy."""
    settings = config.to_dict()
    usual = {own: name for name, own in config.attribute_map.items()}
    small: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            values = [shrunk_value(usual.get(key, key), item) for item in value]
            small[key] = values[:layers]
        else:
            small[key] = shrunk_value(usual.get(key, key), value)
    small |= _shrunk_heads(config, settings)
    if settings.get("dim_model_base"):  # MiniCPM 3 divides by the ratio of hidden_size to it
        ratio = settings["dim_model_base"] / config.hidden_size
        small["dim_model_base"] = max(1, round(SMALL["hidden_size"] * ratio))
    groups = settings.get("n_group") or 0
    if settings.get("topk_group"):
        small["topk_group"] = 1 if settings["topk_group"] < groups else min(groups, 2)
    if "output_router_logits" in settings:
        small["output_router_logits"] = False
    return small | {config.attribute_map.get("num_hidden_layers", "num_hidden_layers"): layers}


def _shrunk_heads(config: PreTrainedConfig, settings: dict[str, Any]) -> dict[str, Any]:
    """Groups and sizes of heads, and rotations as wide."""
    own = config.attribute_map
    heads = config.num_attention_heads
    usual = getattr(config, "head_dim", None) in (None, config.hidden_size // heads)
    size = 8 if usual or "qk_rope_head_dim" in settings else 16
    names = (own.get(name, name) for name in ("head_dim", "global_head_dim", "swa_head_dim"))
    small: dict[str, Any] = {name: size for name in names if settings.get(name)}
    groups = getattr(config, "num_key_value_heads", None)
    if isinstance(groups, int):
        key = own.get("num_key_value_heads", "num_key_value_heads")
        small[key] = 4 if groups == heads else min(groups, 2)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(settings.get(key), dict):
            small[key] = _shrunk_rotation(settings[key], size)
    return small


def _shrunk_rotation(settings: dict[str, Any], head_dim: int) -> dict[str, Any]:
    small = dict(settings)
    features = int(head_dim * (settings.get("partial_rotary_factor") or 1.0))
    for key, value in settings.items():
        if isinstance(value, dict):
            small[key] = _shrunk_rotation(value, head_dim)
        elif key == "original_max_position_embeddings":
            small[key] = SMALL[key]
        elif key in ("short_factor", "long_factor") and value:
            small[key] = value[: features // 2]
    return small
