"""Adapters: add low-rank matrices to linear layers as the `[adapters]` of a recipe specify.

In a module with an adapter, only the adapter is trained. Targets are resolved on the full model
before it is split into stages and sharded. As in PEFT, a target is the Hugging Face name of a
linear layer or the end of such a name. In a target, * matches any characters
("layers.1?.*.q_proj"). Regular expressions are not used, because "." in names would be special.

Unlike in PEFT, "all-linear" selects only linear layers of transformer layers, or of the connector
if the connector is named. Patch embeddings are small and are trained completely, if at all.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from fnmatch import fnmatchcase

from torchmm.common.errors import ConfigError
from torchmm.models.layered import LayeredModule
from torchmm.models.layers.lora import LoraSpec, is_adapter_parameter
from torchmm.models.multimodal import MultimodalModel, module_of
from torchmm.recipe.model_section import ALL_LINEAR, AdapterConfig


def add_adapters(model: MultimodalModel, adapters: Mapping[str, AdapterConfig]) -> None:
    """Add adapters to the full model on the meta device and freeze the modules that have them.

    Raises:
        ConfigError: A module does not exist or has no such layers, or two adapters share one.
    """
    # The recipe has a name for the layers of a module and one for the connector of an encoder.
    modules_by_name: dict[str, tuple[LayeredModule, list[str]]] = {}
    for module in model.modality_modules():
        if module.kind != "generator":
            modules_by_name[module.name] = module, module.adaptable_linears()
        if module.kind == "encoder":
            modules_by_name[f"{module.name}.connector"] = (
                module,
                module.adaptable_linears(connector=True),
            )
    problems: list[str] = []
    for name, config in adapters.items():
        if unknown := [n for n in config.modules if n not in modules_by_name]:
            problems.append(
                f"[adapters.{name}] modules = {unknown}: modules without adapter support; use "
                f"any of: {', '.join(modules_by_name)}"
            )
            continue
        problems += _add_adapter({n: modules_by_name[n] for n in config.modules}, name, config)
    if problems:
        raise ConfigError(problems)
    adapted = {module for config in adapters.values() for module in config.modules}
    for fqn, parameter in model.named_parameters():
        if module_of(fqn) in adapted:
            parameter.requires_grad_(is_adapter_parameter(fqn))


def _add_adapter(
    modules_by_name: Mapping[str, tuple[LayeredModule, list[str]]], name: str, config: AdapterConfig
) -> list[str]:
    """Add an adapter to its modules and return the problems.

    Args:
        modules_by_name: Maps module names of the recipe to modules and names of their linear
            layers.
        name: Name of the adapter.
        config: Section of the recipe.
    """
    spec = LoraSpec(name, config.rank, config.alpha, config.method)
    all_linears = {linear for _, linears in modules_by_name.values() for linear in linears}
    problems = []
    for target in config.targets if all_linears else ():
        if not any(_matches_target(linear, target) for linear in all_linears):
            endings = sorted({linear.rpartition(".")[2] for linear in all_linears})
            similar = difflib.get_close_matches(target, endings, 1)
            hint = f"; did you mean {similar[0]!r}?" if similar else ""
            problems.append(
                f"[adapters.{name}] targets = {target!r}: the modules have no linear layer of "
                f"this name{hint}; use any of: {', '.join(endings)}"
            )
    for module_name, (module, linears) in modules_by_name.items():
        chosen = [n for n in linears if any(_matches_target(n, t) for t in config.targets)]
        shared = [n for n in chosen if n in module.adapters]
        if not chosen and not problems:
            problems.append(
                f"[adapters.{name}] modules = {config.modules}: {module_name!r} contains none of "
                "the targets; remove it from modules, or add targets of it"
            )
        if shared:
            problems.append(
                f"[adapters.{name}] targets = {config.targets}: {shared[0]} of {module_name!r} is "
                f"already in [adapters.{module.adapters[shared[0]].adapter}]; remove it from "
                "one of them"
            )
        else:
            module.add_adapters(dict.fromkeys(chosen, spec))
    return problems


def _matches_target(linear: str, target: str) -> bool:
    """Return True if the target matches the linear layer with this name."""
    return target == ALL_LINEAR or fnmatchcase(f".{linear}", f"*.{target}")
