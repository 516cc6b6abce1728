"""Causal LMs that no table lists: finding their form, and a short, narrow copy of their config.

Most causal LMs have one form: a table of embeddings, a list of decoder layers, a final norm, a
head. Those parts are found by what Hugging Face's classes say of them (`get_input_embeddings`,
`get_output_embeddings`, the list as long as the config's number of layers), not by their names.
That a model has the form does not mean that it may be cut and packed; `models/unlisted.py` proves
that on the copy before anything is trained.

The copy has few features, heads, experts and tokens, and windows that are shorter than its samples,
but as many layers as show every kind that the model has. Rejected: taking some layers out of the
middle, as many configs give kinds by index ("every fourth", "the first three").
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from torchmm.common.errors import ConfigError
from torchmm.models.families.llms.family import LlmFamily
from torchmm.models.hf.config import DROPOUTS

MOST_LAYERS = 24
"""Layers of a copy; models whose kinds of layers show only later are refused."""
MOST_PARAMETERS = 5_000_000
"""Parameters of a copy; more mean that a size has a name which is not among those below."""
_SMALL = {
    "hidden_size": 32,
    "embedding_size": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "intermediate_size_mlp": 40,
    "dense_intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_intermediate_size": 40,
    "shared_expert_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 40,
    "num_attention_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 12,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 8,
    "sliding_window": 4,
    "attention_chunk_size": 4,
    "floor_scale": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Sizes of the copy by name; those that a config does not have, or leaves out, are left out."""
_EXPERTS = {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
}
_AT_MOST = {
    **_EXPERTS,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_shared_experts": 2,
    "num_shared_experts": 2,
    "moe_num_shared_experts": 2,
    "n_group": 2,
    "final_logit_softcapping": 3.0,
    "attn_logit_softcapping": 2.0,
    "logits_soft_cap": 3.0,
}
"""The same where a model may have fewer, and where a large value would not show on small
numbers."""
_INDEX = ("layer_idx", "layer_id", "layer_number", "training")


def find_form(model: PreTrainedModel) -> LlmFamily | list[str]:
    """Where a causal LM has what a layered module needs, or what it lacks."""
    layers_n = getattr(model.config, "num_hidden_layers", None)
    names = {id(part): name for name, part in model.named_modules()}
    table = names.get(id(_embeddings(model)), "")
    head = names.get(id(model.get_output_embeddings()), "")
    lists = [
        name
        for name, part in model.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) == layers_n and _is_outside(model, name)
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


def _is_outside(model: nn.Module, name: str) -> bool:
    """Whether a list is not inside of another."""
    parents = name.split(".")[:-1]
    above = (model.get_submodule(".".join(parents[: i + 1])) for i in range(len(parents)))
    return not any(isinstance(part, nn.ModuleList) for part in above)


def layer_kind(layer: nn.Module) -> frozenset[tuple[Any, ...]]:
    """What a layer consists of, its sizes aside: equal for layers that compute alike."""
    marks: set[tuple[Any, ...]] = set()
    for name, part in layer.named_modules():
        place = re.sub(r"\d+", "n", name)
        marks.add((place, type(part).__name__))
        for key, value in vars(part).items():
            if key.startswith("_") or key in _INDEX:
                continue
            if isinstance(value, str):
                marks.add((place, key, value))
            elif value is None or isinstance(value, (bool, int, float)):
                marks.add((place, key, bool(value)))
    return frozenset(marks)


def copy_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A config of the same kind whose model is small and has every kind of layer.

    Raises:
        ConfigError: the copy has not.
    """
    settings = config.to_dict()
    settings |= {name: 0.0 for name in DROPOUTS if name in settings}
    with torch.device("meta"):
        whole = _layers(AutoConfig.for_model(**settings))
    kinds = [layer_kind(layer) for layer in whole]
    needed = max(kinds.index(kind) for kind in set(kinds)) + 1
    count = min(max(needed, 3), MOST_LAYERS)
    small = AutoConfig.for_model(**_shrunk(config, count))
    with torch.device("meta"):
        layers = _layers(small)
        size = sum(p.numel() for layer in layers for p in layer.parameters())
    if missing := set(kinds) - {layer_kind(layer) for layer in layers}:
        differ = set.union(*map(set, missing)) - set(layer_kind(layers[0]))
        raise ConfigError(
            f"a copy of {len(layers)} small layers does not show {sorted(differ)[:3]}"
        )
    if size > MOST_PARAMETERS:
        raise ConfigError(
            f"its small copy has {size:,} parameters: some of its sizes are not known"
        )
    return small


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
            values = [_shrunk_value(usual.get(key, key), item) for item in value]
            small[key] = values[:layers]
        else:
            small[key] = _shrunk_value(usual.get(key, key), value)
    small |= _shrunk_heads(config, settings)
    groups = settings.get("n_group") or 0
    if settings.get("topk_group"):
        small["topk_group"] = 1 if settings["topk_group"] < groups else min(groups, 2)
    if "output_router_logits" in settings:
        small["output_router_logits"] = False
    return small | {config.attribute_map.get("num_hidden_layers", "num_hidden_layers"): layers}


def _shrunk_value(name: str, value: Any) -> Any:
    if name in _SMALL and value:
        return _SMALL[name]
    if name in _AT_MOST and isinstance(value, (int, float)):
        return min(value, _AT_MOST[name])
    # What else is wrong is said together with rates that are refused.
    return 0.0 if name in DROPOUTS else value


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
            small[key] = _SMALL[key]
        elif key in ("short_factor", "long_factor") and value:
            small[key] = value[: features // 2]
    return small


_MECHANISMS = (
    (r"mamba|\bssm\b|A_log", "state-space (Mamba) layers"),
    (r"linear_attn|delta_net|\bkda\b|lightning|rwkv|time_mix", "linear attention"),
    (r"(^|\.)conv", "convolutions over tokens"),
    (r"indexer", "an indexer that chooses which tokens attend to which"),
    (r"kv_a_proj|kv_b_proj", "latent attention (MLA)"),
    (r"sinks", "attention sinks"),
    (r"(^|\.)(wpe|embed_positions|position_embeddings|positions_embed)", "learned positions"),
    (r"rel_pos|relative_attention_bias|position_bias", "biases by distance"),
    (r"crossattention|encoder_attn|cross_attn", "attention to an encoder"),
    (r"(^|\.)(hc_|attn_hc|ffn_hc)|altup|hyper_conn", "several streams from layer to layer"),
    (r"per_layer", "embeddings for every layer"),
    (r"embeddings\.word_embeddings|embeddings\.tok_embeddings", "BERT's form of embeddings"),
)
"""Names of parts -> what they are."""


def mechanisms(config: PreTrainedConfig) -> list[str]:
    """What a model has that those of the usual form do not, as far as names tell."""
    found = []
    if getattr(config, "is_encoder_decoder", False):
        found.append("an encoder and a decoder")
    if config.get_text_config() is not config:
        inner = config.get_text_config().model_type
        found.append(f"parts of several kinds (its text part alone is {inner!r})")
    if getattr(config, "alibi", False) or "attn_config" in config.to_dict():
        found.append("biases by distance (ALiBi)")
    names = "\n".join(_part_names(config, whole=True))
    found += [what for pattern, what in _MECHANISMS if re.search(pattern, names, re.MULTILINE)]
    return found


def nearest(config: PreTrainedConfig, families: Collection[str]) -> str:
    """The listed family most of whose layers' parts have the names of this model's."""
    own = _part_names(config)

    def likeness(model_type: str) -> float:
        other = _part_names(CONFIG_MAPPING[model_type]())
        return len(own & other) / max(len(own | other), 1)

    return max(families, key=likeness)


def _part_names(config: PreTrainedConfig, whole: bool = False) -> set[str]:
    """Of a model's modules and weights; only of its first layer, from there, or of all."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception:  # raised by classes that need more than a config: nothing is said of parts
        return set()
    names = [*(n for n, _ in model.named_modules()), *(n for n, _ in model.named_parameters())]
    places = {re.sub(r"\.\d+(?=\.|$)", ".n", name) for name in names}
    if whole:
        return places
    return {name.partition(".n.")[2] for name in places if ".n." in name}
