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

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from torchmm.common.errors import ConfigError
from torchmm.models.families.forms import is_outside, small_copy
from torchmm.models.families.llms.family import LlmFamily
from torchmm.models.families.small_copies import shrunk_llm_settings


def find_form(model: PreTrainedModel) -> LlmFamily | list[str]:
    """Return the family of a causal LM, or the parts that it lacks."""
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
        return [
            (
                f"its layers ({', '.join(lists)}) are not in the same module as its embeddings "
                f"({table})"
            )
        ]
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
        return ["weights outside of embeddings, layers, one norm and head: " + ", ".join(strange)]
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


def copy_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A config of the same kind whose model is small and has every kind of layer.

    Raises:
        ConfigError: The copy has not.
    """
    return small_copy(config, _layers, shrunk_llm_settings)


def _layers(config: PreTrainedConfig) -> nn.ModuleList:
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    family = find_form(model)
    if isinstance(family, list):
        raise ConfigError(family)
    found = model.get_submodule(f"{family.text_model}.{family.layers}")
    assert isinstance(found, nn.ModuleList)
    return found
