"""From the recipe's `[adapters]` to low-rank matrices in a model's linears.

A module with an adapter is frozen but for it. Which linears get matrices is decided on the whole
model, before it is cut and split, by the names that Hugging Face gives them, as PEFT does it: a
target is a linear's name, or the end of it. Unlike PEFT's, "all-linear" keeps to transformer
layers: what is around them (patch embeddings, connectors) is small, and trained whole if at all.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

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
    modules = {m.name: m for m in model.modality_modules() if m.kind != "generator"}
    problems: list[str] = []
    for name, config in adapters.items():
        for module_name in config.modules:
            module = modules.get(module_name)
            if module is None:
                problems.append(
                    f"[adapters.{name}] modules: {module_name!r} is none that can have an adapter; "
                    f"choose from {', '.join(modules)}"
                )
                continue
            problems += _add(module, name, config)
    if problems:
        raise ConfigError(problems)
    adapted = {module for config in adapters.values() for module in config.modules}
    for fqn, parameter in model.named_parameters():
        if module_of(fqn) in adapted:
            parameter.requires_grad_(of_adapter(fqn))


def _add(module: LayeredModule, name: str, config: AdapterConfig) -> list[str]:
    """Adds one adapter to one module; what is wrong with it."""
    linears = module.adaptable()
    problems = []
    chosen: set[str] = set()
    for target in config.targets:
        found = {n for n in linears if target == ALL_LINEAR or f".{n}".endswith(f".{target}")}
        chosen |= found
        if not found:
            ends = sorted({n.rpartition(".")[2] for n in linears})
            near = difflib.get_close_matches(target, ends, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            problems.append(
                f"[adapters.{name}] targets: no linear in the layers of {module.name!r} is called "
                f"{target!r}{hint}; they are {', '.join(ends)}"
            )
    if shared := sorted(chosen & set(module.adapters)):
        problems.append(
            f"[adapters.{name}] targets: {shared[0]} of {module.name!r} is in "
            f"[adapters.{module.adapters[shared[0]].adapter}] too; leave it out of one of them"
        )
    if not problems:
        spec = LoraSpec(name, config.rank, config.alpha, config.method)
        module.add_adapters({n: spec for n in linears if n in chosen})
    return problems
