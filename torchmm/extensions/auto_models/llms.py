"""Causal LMs that are not registered: their structure, and a small copy of their config.

Most causal LMs have the same structure: token embeddings, a list of decoder layers, a final norm,
and a head. These modules are found with methods of the Hugging Face classes
(`get_input_embeddings`, `get_output_embeddings`, the list with the number of layers in the config),
not by their names. The structure alone does not prove that the model can be split and packed.
`extensions/auto_models/parity.py` proves that on the copy before training.

The copy has few features, heads, experts and tokens, and windows that are shorter than its samples,
but enough layers to have every type of layer of the model. Layers are not removed from the middle,
because many configs define types by index ("every fourth", "the first three").
"""

from __future__ import annotations

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from torchmm.common.errors import ConfigError
from torchmm.models.families.introspection import is_outermost_list, small_config
from torchmm.models.families.llms.family import LlmFamily
from torchmm.models.families.small_configs import shrink_llm_settings


def detect_llm_family(model: PreTrainedModel) -> LlmFamily | list[str]:
    """Return the family of a causal LM, or the missing modules."""
    layers_n = getattr(model.config, "num_hidden_layers", None)
    names = {id(part): name for name, part in model.named_modules()}
    try:
        table = names.get(id(model.get_input_embeddings()), "")
    except NotImplementedError:
        table = ""
    head = names.get(id(model.get_output_embeddings()), "")
    lists = [
        name
        for name, part in model.named_modules()
        if isinstance(part, nn.ModuleList)
        and len(part) == layers_n
        and is_outermost_list(model, name)
    ]
    lacking = [
        what
        for what, candidates in (
            ("table of embeddings", table),
            ("head", head),
            ("list of layers", lists),
        )
        if not candidates
    ]
    if lacking:
        return [f"no {what}" for what in lacking]
    owner = table.rpartition(".")[0]
    layers = [name for name in lists if name.rpartition(".")[0] == owner]
    if len(layers) != 1 or not owner:
        return [
            (
                f"its layers ({', '.join(lists)}) are not in the same module as its embeddings "
                f"({table})"
            )
        ]
    parts = dict(model.get_submodule(owner).named_children())
    known_names = {table.rpartition(".")[2], layers[0].rpartition(".")[2]}
    unknown_names = [
        n
        for n, part in parts.items()
        if n not in known_names and any(True for _ in part.parameters())
    ]
    norms = [n for n in unknown_names if "norm" in n or "ln" in n]
    strange = [n for n in unknown_names if n not in norms[-1:]]
    strange += [n for n, _ in model.get_submodule(owner).named_parameters(recurse=False)]
    strange += [
        n for n, p in model.named_parameters() if not n.startswith((f"{owner}.", f"{head}."))
    ]
    if strange:
        return ["weights outside of embeddings, layers, one norm and head: " + ", ".join(strange)]
    unweighted = [n for n in parts if n not in known_names and "norm" in n]
    return LlmFamily(
        text_model=owner,
        layers=layers[0].rpartition(".")[2],
        embedding=table.rpartition(".")[2],
        final_norm=next(iter(norms or unweighted), ""),
        head=head,
        norms=(),
        is_registered=False,
    )


def small_llm_copy_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a config of the same type whose model is small and has every type of layer.

    Raises:
        ConfigError: No small copy has every type of layer.
    """
    return small_config(config, _layers, shrink_llm_settings)


def _layers(config: PreTrainedConfig) -> nn.ModuleList:
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    family = detect_llm_family(model)
    if isinstance(family, list):
        raise ConfigError(family)
    layers = model.get_submodule(f"{family.text_model}.{family.layers}")
    assert isinstance(layers, nn.ModuleList)
    return layers
