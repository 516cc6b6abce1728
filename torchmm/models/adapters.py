"""From the recipe's `[adapters]` to low-rank matrices in a model's linears.

A module with an adapter is frozen but for it. Which linears get matrices is decided on the whole
model, before it is cut and split, by the names that Hugging Face gives them, as PEFT does it: a
target is a linear's name, or the end of it, in which * stands for anything ("layers.1?.*.q_proj").
Unlike PEFT's, "all-linear" keeps to transformer layers, or to the connector where that is named:
patch embeddings are small, and trained whole if at all. Rejected: regular expressions, in which the
dot of every name means something else.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torchmm.common.errors import ConfigError
from torchmm.models.layered import LayeredModule
from torchmm.models.layers.lora import LoraSpec, of_adapter
from torchmm.models.multimodal import MultimodalModel, module_of
from torchmm.recipe.model_section import ALL_LINEAR, AdapterConfig


def add_adapters(model: MultimodalModel, adapters: Mapping[str, AdapterConfig]) -> None:
    """Adds adapters to the whole model, on the meta device, and freezes the modules they are in.

    Raises:
        ConfigError: a module does not exist or has no such linears, or two adapters share one.
    """
    places = _places(model)
    problems: list[str] = []
    for name, config in adapters.items():
        if unknown := [n for n in config.modules if n not in places]:
            problems.append(
                f"[adapters.{name}] modules = {unknown}: cannot have adapters; choose from "
                f"{', '.join(places)}"
            )
            continue
        problems += _add([places[n] for n in dict.fromkeys(config.modules)], name, config)
    if problems:
        raise ConfigError(problems)
    adapted = {module for config in adapters.values() for module in config.modules}
    for fqn, parameter in model.named_parameters():
        if module_of(fqn) in adapted:
            parameter.requires_grad_(of_adapter(fqn))


class _Place(NamedTuple):
    """What the recipe has one name for: a module's layers, or an encoder's connector."""

    name: str
    module: LayeredModule
    linears: list[str]
    """Names of those that an adapter can be in."""


def _places(model: MultimodalModel) -> dict[str, _Place]:
    found = []
    for module in model.modality_modules():
        if module.kind != "generator":
            found.append(_Place(module.name, module, module.adaptable()))
        if module.kind == "encoder":
            name = f"{module.name}.connector"
            found.append(_Place(name, module, module.adaptable(connector=True)))
    return {place.name: place for place in found}


def _add(places: Sequence[_Place], name: str, config: AdapterConfig) -> list[str]:
    """Adds one adapter to its modules; what is wrong with it."""
    spec = LoraSpec(name, config.rank, config.alpha, config.method)
    every = {linear for place in places for linear in place.linears}
    problems = [
        _unknown(name, target, every)
        for target in config.targets
        if every and not any(_is_meant(linear, target) for linear in every)
    ]
    for place in places:
        module = place.module
        chosen = [n for n in place.linears if any(_is_meant(n, t) for t in config.targets)]
        shared = [n for n in chosen if n in module.adapters]
        if not chosen and not problems:
            problems.append(
                f"[adapters.{name}] modules = {config.modules}: {place.name!r} has none of the "
                "targets; leave it out, or name linears of it too"
            )
        if shared:
            problems.append(
                f"[adapters.{name}] targets = {config.targets}: {shared[0]} of {place.name!r} is "
                f"in [adapters.{module.adapters[shared[0]].adapter}] too; leave it out of one"
            )
        else:
            module.add_adapters(dict.fromkeys(chosen, spec))
    return problems


def _is_meant(linear: str, target: str) -> bool:
    """Whether a linear of this name is one of the target's."""
    return target == ALL_LINEAR or fnmatchcase(f".{linear}", f"*.{target}")


def _unknown(name: str, target: str, linears: Collection[str]) -> str:
    ends = sorted({linear.rpartition(".")[2] for linear in linears})
    near = difflib.get_close_matches(target, ends, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return (
        f"[adapters.{name}] targets = {target!r}: no linear in the modules is called "
        f"that{hint}; they are {', '.join(ends)}"
    )
