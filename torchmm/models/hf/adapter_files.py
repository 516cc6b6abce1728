"""Adapters as files of PEFT, which `peft.PeftModel.from_pretrained` loads.

An adapter is a directory with `adapter_config.json` and `adapter_model.safetensors`. Names in it
are those of the Hugging Face class that its module's weights come from: of the composite, if the
model is one; otherwise of LLM or tower alone, and an adapter of several of these has a directory
for each. So an adapter is loaded on top of the files that training started from. (`export_hf`
writes the model with adapters added to its weights.)

PEFT itself is not needed: its two files are plain, and only some of their keys say anything here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from torchmm.common.errors import CheckpointError
from torchmm.models.hf.export import Gather, gather_adapters, gather_whole, hf_name, hf_prefixes
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
"""By parameter of `Lora`: what PEFT calls it."""

_RUN_SETTINGS = frozenset(
    (
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "runtime_config", "megatron_core"),
        "lora_dropout",  # concerns the training of the file; [adapters] has no dropout
        "fan_in_fan_out",  # PEFT ignores it for linears
        # The names of the tensors show which linears have an adapter.
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        # Settings of a value of `init_lora_weights` or of `use_qalora`, which decide.
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
        "ensure_weight_tying",  # concerns embeddings, which have no adapters
    )
)
"""Fields of `LoraConfig` of PEFT that do not change what an adapter computes."""
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
"""Fields with values by linear, and the field with the value of the other linears."""
_FIXES = {
    "init_lora_weights": "convert the adapter with PEFT: save_pretrained("
    'path_initial_model_for_weight_conversion="...")',
    "rank_pattern": "use one adapter with its own rank for each group of linears",
    "alpha_pattern": "use one adapter with its own alpha for each group of linears",
}


class _Files(NamedTuple):
    """One directory of an adapter."""

    directory: Path
    """Below that of all adapters."""
    adapter: str
    modules: list[LayeredModule]
    """Whose linears it is for."""
    spec: LoraSpec

    def linears(self, module: LayeredModule) -> list[str]:
        """The adapter's linears in a module, those of other stages included."""
        return [name for name, spec in module.adapters.items() if spec.adapter == self.adapter]

    def parameters(self) -> Iterator[tuple[LayeredModule, str, str, nn.Parameter]]:
        """(module, linear, name in `Lora`, values) of the adapter's parameters on this rank."""
        for module in self.modules:
            for linear, _, lora in adapted_linears(module):
                if lora.spec.adapter == self.adapter:
                    for part, parameter in lora.named_parameters():
                        yield module, linear, part, parameter


def save_adapters(model: MultimodalModel, directory: Path, gather: Gather = gather_whole) -> None:
    """Writes every adapter to a directory of its name, below `directory`; collective, rank 0
    writes.

    Args:
        gather: where values come from, see `export_hf`.
    """
    if not any(module.adapters for module in model.modality_modules()):
        return
    values = gather_adapters(model, gather)
    prefixes = hf_prefixes(model)
    for files in _files(model):
        tensors: dict[str, Tensor] = {}
        targets = []
        for module in files.modules:
            for linear in files.linears(module):
                path = _hf_path(prefixes, module, linear)
                targets.append(path)
                for part, value in values[module.name].get(linear, {}).items():
                    tensors[_peft_name(path, part)] = value.contiguous()
        if tensors:
            target = directory / files.directory
            target.mkdir(parents=True, exist_ok=True)
            config = _config(files.spec, targets, files.modules[0].weights.source)
            (target / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
            save_file(tensors, target / WEIGHTS_FILE, metadata={"format": "pt"})


def load_adapters(model: MultimodalModel, sources: Mapping[str, str]) -> set[str]:
    """Fills adapters from directories as `save_adapters` or PEFT write them.

    Args:
        model: materialized; parameters are plain tensors or DTensors.
        sources: directory by name of the adapter.

    Returns:
        Names of the parameters that now hold their values.

    Raises:
        CheckpointError: files are missing, or of another adapter.
    """
    modules = {module.name: prefix for prefix, module in model.named_modality_modules()}
    prefixes = hf_prefixes(model)
    problems: list[str] = []
    filled: set[str] = set()
    for files in _files(model):
        if files.adapter not in sources:
            continue
        source = Path(sources[files.adapter]) / files.directory.relative_to(files.adapter)
        expected = {
            _peft_name(_hf_path(prefixes, module, linear), part)
            for module in files.modules
            for linear in files.linears(module)
            for part in _parts(files.spec)
        }
        if found := list(_problems(source, files.spec, expected)):
            problems += found
            continue
        with safe_open(source / WEIGHTS_FILE, "pt") as opened:
            for module, linear, part, parameter in files.parameters():
                path = _hf_path(prefixes, module, linear)
                value = opened.get_tensor(name := _peft_name(path, part))
                if value.shape != parameter.shape:
                    problems.append(
                        f"{source}: {name} has shape {list(value.shape)}, but the model needs "
                        f"{list(parameter.shape)}; use an adapter of this model"
                    )
                    continue
                copy_slice(parameter, value)
                filled.add(f"{modules[module.name]}.{linear}.{CHILD}.{part}")
    if problems:
        raise CheckpointError("adapters do not fit:\n  - " + "\n  - ".join(problems))
    return filled


def _files(model: MultimodalModel) -> Iterator[_Files]:
    """The directories of all adapters, on all ranks alike."""
    by_adapter: dict[str, dict[LayeredModule, LoraSpec]] = {}
    for module in model.modality_modules():
        for spec in module.adapters.values():
            by_adapter.setdefault(spec.adapter, {})[module] = spec
    for name, found in by_adapter.items():
        spec = next(iter(found.values()))
        if model.composite is not None or len(found) == 1:
            yield _Files(Path(name), name, list(found), spec)
            continue
        for module in found:
            yield _Files(Path(name) / module.name, name, [module], spec)


def _hf_path(prefixes: Any, module: LayeredModule, linear: str) -> str:
    """Hugging Face's name of a linear."""
    theirs = hf_name(prefixes, module.name, f"{linear}.weight")
    assert theirs is not None, linear
    return theirs.removesuffix(".weight")


def _peft_name(path: str, part: str) -> str:
    """Of a parameter of a linear's adapter, in PEFT's files."""
    return f"base_model.model.{path}.{_PEFT_NAMES[part]}"


def _parts(spec: LoraSpec) -> list[str]:
    """Names in `Lora` of an adapter's parameters."""
    return [part for part in _PEFT_NAMES if part != "magnitude" or spec.method == "dora"]


def _config(spec: LoraSpec, targets: list[str], source: str | None) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": source,
        "task_type": None,
        "inference_mode": True,
        "target_modules": sorted(targets),
        "bias": "none",
        **_settings(spec),
    }


def _settings(spec: LoraSpec) -> dict[str, Any]:
    """What decides the numbers."""
    return {
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "use_rslora": spec.method == "rslora",
        "use_dora": spec.method == "dora",
    }


def _problems(source: Path, spec: LoraSpec, expected: set[str]) -> Iterator[str]:
    """Yield the differences between the files of an adapter and its section of the recipe."""
    try:
        config = json.loads((source / CONFIG_FILE).read_text())
        with safe_open(source / WEIGHTS_FILE, "pt") as opened:
            names = opened.keys()
            shapes = {name: opened.get_slice(name).get_shape() for name in names}
    except (OSError, ValueError, SafetensorError) as error:
        yield f"{source}: cannot be read as an adapter of PEFT ({error})"
        return
    if not isinstance(config, dict):
        yield f"{source}: {CONFIG_FILE} is not a JSON object"
        return
    if unsupported := list(_unsupported_settings(config)):
        yield from (f"{source}: {problem}" for problem in unsupported)
        return
    for key, value in _settings(spec).items():
        if config.get(key, False) != value:
            yield (
                f"{source}: has {key} = {config.get(key)}, but [adapters.{spec.adapter}] means "
                f"{value}; change rank, alpha or method"
            )
    found = set(shapes)
    for what, names in (("lacks", expected - found), ("also has", found - expected)):
        if names:
            yield (
                f"{source}: {what} {min(names)} (and {len(names) - 1} more); change modules or "
                f"targets of [adapters.{spec.adapter}]"
            )
    for name in sorted(expected & found):
        part = next(part for part, peft in _PEFT_NAMES.items() if name.endswith(peft))
        if part != "magnitude" and shapes[name][part == "up"] != spec.rank:
            yield f"{source}: {name} has shape {shapes[name]}, which is not of rank {spec.rank}"


def _unsupported_settings(config: dict[str, Any]) -> Iterator[str]:
    """Yield the settings of PEFT that change what an adapter computes and are not supported."""
    for key, value in config.items():
        if key in _RUN_SETTINGS or key in ("r", "lora_alpha", "use_rslora", "use_dora"):
            continue
        if key in _PATTERNS:
            usual = config.get(_PATTERNS[key])
            supported = not value or all(own == usual for own in value.values())
        else:
            # A field that this version does not list may have its default value.
            supported = value in _ACCEPTED.get(key, (None, False, [], {}))
        if not supported:
            fix = _FIXES.get(key, "use an adapter without it")
            yield f"{key} = {json.dumps(value)} is not supported; {fix}"
