"""Adapters in the format of PEFT, which `peft.PeftModel.from_pretrained` loads.

An adapter is a directory with `adapter_config.json` and `adapter_model.safetensors`. Its names are
those of the Hugging Face class of the pretrained weights: the multimodal class, or the class of the
LLM or encoder. With separate sources, an adapter of several modules has one directory for each.
An adapter is therefore loaded on top of the files that training started from.
(`export_hf` writes the model with merged adapters.)

PEFT itself is not required: both files are plain, and only some keys of the config matter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from torchmm.common.errors import CheckpointError, ConfigError
from torchmm.models.hf.export import (
    TRAINED_WEIGHTS,
    WeightSource,
    gather_adapters,
    hf_name,
    hf_prefixes,
)
from torchmm.models.hf.load import copy_slice
from torchmm.models.layered import LayeredModule
from torchmm.models.layers.lora import CHILD, LoraSpec, adapted_linears
from torchmm.models.multimodal import MultimodalModel

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PEFT_NAMES = {
    "down": "lora_A.weight",
    "up": "lora_B.weight",
    "magnitude": "lora_magnitude_vector",
}
"""Names in PEFT of the parameters of `Lora`."""

_RUN_SETTINGS = frozenset(
    (
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "runtime_config", "megatron_core"),
        "lora_dropout",  # concerns the training of the file; [adapters] has no dropout
        "fan_in_fan_out",  # PEFT ignores it for linear layers
        # The names of the tensors show which linear layers have an adapter.
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        # Settings of a value of `init_lora_weights` or of `use_qalora`, which decide.
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
        "ensure_weight_tying",  # concerns embeddings, which have no adapters
    )
)
"""Fields of `LoraConfig` of PEFT that do not affect the output of an adapter."""
_ACCEPTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # Other values change the weights of the base model when PEFT loads the adapter.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
    **dict.fromkeys(
        (
            *("modules_to_save", "megatron_config", "trainable_token_indices", "velora_config"),
            *("alora_invocation_tokens", "use_qalora", "monteclora_config", "layer_replication"),
            *("lora_bias", "target_parameters", "use_bdlora", "arrow_config", "kasa_config"),
        ),
        (None, False, [], {}),
    ),
}
"""Fields with the values that torchmm supports. Other values are rejected by name."""
_PATTERNS = {"rank_pattern": "r", "alpha_pattern": "lora_alpha"}
"""Fields with values by linear layer, and the field with the default value."""
_FIXES = {
    "init_lora_weights": "convert the adapter with PEFT: save_pretrained("
    'path_initial_model_for_weight_conversion="...")',
    "rank_pattern": "use one adapter with its own rank for each group of linear layers",
    "alpha_pattern": "use one adapter with its own alpha for each group of linear layers",
}


class _AdapterDirectory(NamedTuple):
    """A directory of an adapter, equal on all ranks."""

    directory: Path
    """Relative to the directory of all adapters."""
    spec: LoraSpec
    modules: list[LayeredModule]
    targets: list[str]
    """Hugging Face names of the linear layers."""
    names: dict[tuple[str, str, str], str]
    """PEFT names by module, linear layer and parameter of `Lora`, including other stages."""


def save_adapters(
    model: MultimodalModel, directory: Path, weights: WeightSource = TRAINED_WEIGHTS
) -> None:
    """Write every adapter to a directory of its name in `directory`.

    Collective; rank 0 writes.

    Args:
        model: Model with the adapters.
        directory: Directory of all adapters.
        weights: Source of the values.

    Raises:
        ConfigError: Rows of new tokens are trained, which the format does not contain.
    """
    if not any(module.adapters for module in model.modality_modules()):
        return
    if model.llm.trained_token_ids:
        raise ConfigError(
            "model.new_tokens: files of adapters do not contain the rows of new tokens; export "
            "the merged model"
        )
    values = gather_adapters(model, weights)
    for files in _adapter_directories(model):
        tensors = {
            name: values[module][linear][part].contiguous()
            for (module, linear, part), name in files.names.items()
            if part in values[module].get(linear, {})
        }
        if not tensors:  # not on rank 0
            continue
        config = {
            "peft_type": "LORA",
            "base_model_name_or_path": files.modules[0].weights.source,
            "task_type": None,
            "inference_mode": True,
            "target_modules": sorted(files.targets),
            "bias": "none",
            **_peft_settings(files.spec),
        }
        target = directory / files.directory
        target.mkdir(parents=True, exist_ok=True)
        (target / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        save_file(tensors, target / WEIGHTS_FILE, metadata={"format": "pt"})


def load_adapters(model: MultimodalModel, sources: Mapping[str, str]) -> set[str]:
    """Fill adapters from directories that `save_adapters` or PEFT wrote.

    Args:
        model: Materialized model. Parameters are plain tensors or DTensors.
        sources: Directories by name of the adapter.

    Returns:
        Names of the parameters that were filled.

    Raises:
        CheckpointError: Files are missing, or belong to another adapter.
    """
    prefixes = {module.name: prefix for prefix, module in model.named_modality_modules()}
    problems: list[str] = []
    filled: set[str] = set()
    for files in _adapter_directories(model):
        adapter = files.spec.adapter
        if adapter not in sources:
            continue
        source = Path(sources[adapter]) / files.directory.relative_to(adapter)
        if adapter_problems := list(
            _adapter_problems(source, files.spec, set(files.names.values()))
        ):
            problems += adapter_problems
            continue
        with safe_open(source / WEIGHTS_FILE, "pt") as opened:
            parameters = (
                (module.name, linear, part, parameter)
                for module in files.modules
                for linear, _, lora in adapted_linears(module)
                if lora.spec.adapter == adapter
                for part, parameter in lora.named_parameters()
            )
            for module, linear, part, parameter in parameters:
                name = files.names[module, linear, part]
                value = opened.get_tensor(name)
                if value.shape != parameter.shape:
                    problems.append(
                        f"{source}: {name} has shape {list(value.shape)}, but the model "
                        f"requires {list(parameter.shape)}; use an adapter of this model"
                    )
                    continue
                copy_slice(parameter, value)
                filled.add(f"{prefixes[module]}.{linear}.{CHILD}.{part}")
    if problems:
        raise CheckpointError("adapters do not match the model:\n  - " + "\n  - ".join(problems))
    return filled


def _adapter_directories(model: MultimodalModel) -> Iterator[_AdapterDirectory]:
    """Yield the directories of all adapters."""
    prefixes = hf_prefixes(model)
    by_adapter: dict[str, dict[LayeredModule, LoraSpec]] = {}
    for module in model.modality_modules():
        for spec in module.adapters.values():
            by_adapter.setdefault(spec.adapter, {})[module] = spec
    for adapter, specs in by_adapter.items():
        spec = next(iter(specs.values()))
        parts = [part for part in _PEFT_NAMES if part != "magnitude" or spec.method == "dora"]
        folders = {Path(adapter): list(specs)}
        if model.composite is None and len(specs) > 1:
            folders = {Path(adapter) / module.name: [module] for module in specs}
        for folder, modules in folders.items():
            targets: list[str] = []
            names: dict[tuple[str, str, str], str] = {}
            for module in modules:
                for linear, linear_spec in module.adapters.items():
                    if linear_spec.adapter != adapter:
                        continue
                    hf_parameter = hf_name(prefixes, module.name, f"{linear}.weight")
                    assert hf_parameter is not None, linear
                    path = hf_parameter.removesuffix(".weight")
                    targets.append(path)
                    for part in parts:
                        name = f"base_model.model.{path}.{_PEFT_NAMES[part]}"
                        names[module.name, linear, part] = name
            yield _AdapterDirectory(folder, spec, modules, targets, names)


def _peft_settings(spec: LoraSpec) -> dict[str, Any]:
    """Return the settings of PEFT that affect the output of an adapter."""
    return {
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "use_rslora": spec.method == "rslora",
        "use_dora": spec.method == "dora",
    }


def _adapter_problems(source: Path, spec: LoraSpec, expected: set[str]) -> Iterator[str]:
    """Yield the differences between the files of an adapter and its section of the recipe."""
    try:
        config = json.loads((source / CONFIG_FILE).read_text())
        with safe_open(source / WEIGHTS_FILE, "pt") as opened:
            names = opened.keys()
            shapes = {name: opened.get_slice(name).get_shape() for name in names}
    except (OSError, ValueError, SafetensorError) as error:
        yield f"{source}: cannot be read as a PEFT adapter ({error})"
        return
    if not isinstance(config, dict):
        yield f"{source}: {CONFIG_FILE} is not a JSON object"
        return
    if unsupported := list(_unsupported_settings(config)):
        yield from (f"{source}: {problem}" for problem in unsupported)
        return
    for key, value in _peft_settings(spec).items():
        if config.get(key, False) != value:
            yield (
                f"{source}: {key} = {config.get(key)}, but [adapters.{spec.adapter}] requires "
                f"{value}; change rank, alpha or method"
            )
    stored = set(shapes)
    for what, names in (("lacks", expected - stored), ("also has", stored - expected)):
        if names:
            yield (
                f"{source}: {what} {min(names)} (and {len(names) - 1} more); change modules or "
                f"targets of [adapters.{spec.adapter}]"
            )
    for name in sorted(expected & stored):
        part = next(part for part, peft in _PEFT_NAMES.items() if name.endswith(peft))
        if part != "magnitude" and shapes[name][part == "up"] != spec.rank:
            yield f"{source}: {name} has shape {shapes[name]}, but rank = {spec.rank}"


def _unsupported_settings(config: dict[str, Any]) -> Iterator[str]:
    """Yield unsupported PEFT settings that affect the output of an adapter."""
    for key, value in config.items():
        if key in _RUN_SETTINGS or key in ("r", "lora_alpha", "use_rslora", "use_dora"):
            continue
        if key in _PATTERNS:
            usual = config.get(_PATTERNS[key])
            supported = not value or all(entry == usual for entry in value.values())
        else:
            # A field that this version does not list may have its default value.
            supported = value in _ACCEPTED.get(key, (None, False, [], {}))
        if not supported:
            fix = _FIXES.get(key, "use an adapter without this setting")
            yield f"{key} = {json.dumps(value)} is not supported; {fix}"
