"""Export a trained model as a Hugging Face directory.

Multimodal models from one source keep their class. An encoder and an LLM from separate sources get
an equivalent class (`torchmm.models.hf.pair_classes`), usually LLaVA. An LLM without encoders
becomes a causal LM. `save_pretrained` of Hugging Face writes the files and determines names, shards
and configs.

Other pairs have no Hugging Face class. Their components are written to separate folders, next to
`torchmm.json`. This file has the `[model]` section for recipes whose `source` is such a directory.
Diffusers writes a generator to `generator/`. The connector is the caption projection of diffusers.

Low-rank adapters are merged into their weights (`torchmm.models.hf.adapter_files` writes them
separately). Quantized weights are decoded first.

`WeightSource` provides the tensors one by one: from the ranks that train the model, or from a
checkpoint (`torchmm.training.export.checkpoint`).
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import GENERATION_CONFIG_NAME

from torchmm.common.errors import ConfigError, describe_load_error
from torchmm.common.log import iterate_with_progress
from torchmm.common.module_names import GENERATOR
from torchmm.models.encoders import EncoderModule
from torchmm.models.families.composites.components import LLAVA_LLM
from torchmm.models.families.composites.registry import COMPOSITES
from torchmm.models.hf.legacy_keys import add_legacy_keys
from torchmm.models.hf.load import CONNECTOR_FILE, names_in_files, open_files
from torchmm.models.hf.pair_classes import CONNECTORS, pair_class
from torchmm.models.hf.processors import image_processor, save_processor
from torchmm.models.hf.unfuse_experts import has_stacked_experts, split_stacked_experts
from torchmm.models.initialize import build_random_copy, named_tensors
from torchmm.models.layered import LayeredModule, WeightFiles, named_units
from torchmm.models.layers.lora import CHILD, is_adapter_parameter, merge_lora
from torchmm.models.multimodal import MultimodalModel
from torchmm.models.weight_formats import stored_shape
from torchmm.recipe.model_section import COMPONENTS_FILE, split_revision

_logger = logging.getLogger(__name__)
_TOWER = "model.vision_tower."
Prefixes = tuple[tuple[str, str], ...]


class WeightSource(Protocol):
    """Source of the weights of an export."""

    def __call__(
        self, model: MultimodalModel, is_selected: Callable[[str], bool]
    ) -> Iterator[tuple[LayeredModule, str, Tensor | None]]:
        """Yield (module, name in the module, values) of parameters and buffers with wanted names.

        Values are in the CPU memory of rank 0, and None on other ranks. All ranks must exhaust the
        iterator.
        """
        ...

    def clone_tensors(self, values: list[Tensor]) -> list[Tensor]:
        """Return a copy of each tensor, in the kind of memory that the weights have."""
        ...


class TrainedWeights:
    """`WeightSource` of the ranks that train a model.

    No rank but rank 0 has more than one complete tensor at a time. The first rank with a part of a
    tensor sends it if rank 0 has no part.
    """

    @torch.no_grad()
    def __call__(
        self, model: MultimodalModel, is_selected: Callable[[str], bool]
    ) -> Iterator[tuple[LayeredModule, str, Tensor | None]]:
        """Gather tensors with wanted names. Collective; see `WeightSource`."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        local = model.state_dict()
        device = next((tensor.device for tensor in local.values()), torch.device("cpu"))
        by_rank: list[Any] = [list(local)]
        if dist.is_initialized():
            by_rank = [None] * dist.get_world_size()
            dist.all_gather_object(by_rank, list(local))
        first_with = {name: r for r in reversed(range(len(by_rank))) for name in by_rank[r]}
        for prefix, module, name, example in named_full_tensors(model):
            if not is_selected(name):
                continue
            # All ranks with a part take part in the collective of a DTensor.
            tensor = local.get(f"{prefix}.{name}")
            full_tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            first = first_with[f"{prefix}.{name}"]
            if first > 0 and rank == first:
                assert full_tensor is not None
                dist.send(full_tensor.detach().contiguous(), dst=0)
            value = None
            if rank == 0:
                if first > 0:
                    full_tensor = torch.empty_like(example, device=device)
                    dist.recv(full_tensor, src=first)
                assert full_tensor is not None
                value = full_tensor.detach().cpu()
            del full_tensor  # frees device memory before the next tensor is gathered
            yield module, name, value

    def clone_tensors(self, values: list[Tensor]) -> list[Tensor]:
        """Return copies in memory."""
        return [value.clone() for value in values]


TRAINED_WEIGHTS = TrainedWeights()
"""Stateless instance of `TrainedWeights`."""


@dataclass
class _Export:
    """A Hugging Face model to be written."""

    directory: Path
    hf: Any
    """Model of transformers or diffusers on the meta device, which receives the weights."""
    prefixes: dict[str, Prefixes]
    """Pairs of torchmm and Hugging Face prefixes, by module."""
    generation_source: str | None = None
    """Source whose generation settings are copied, if the LLM has one."""
    generation_config: GenerationConfig | None = None
    """Generation settings, written even if `save_pretrained` rejects flags without effect."""
    weights: dict[str, Tensor] = field(default_factory=dict)


def named_full_tensors(model: MultimodalModel) -> Iterator[tuple[str, LayeredModule, str, Tensor]]:
    """Yield the parameters and buffers of all ranks, except tied ones.

    Yields:
        Prefix of the module, module, name in the module, and a tensor on the meta device with the
        shape and dtype of the complete tensor in the model and in checkpoints.
    """
    for prefix, module in model.named_modality_modules():
        with torch.device("meta"):
            full_module = module.rebuild()
        tied = full_module.tied_parameters()
        for name, example in full_module.state_dict().items():
            if name in tied:
                continue
            if form := module.weight_formats.get(name.removesuffix(".weight")):
                shape = stored_shape(example.shape, form)
                yield prefix, module, name, example.new_empty(shape, dtype=torch.uint8)
            else:
                yield prefix, module, name, example


def export_hf(
    model: MultimodalModel,
    directory: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    weights: WeightSource = TRAINED_WEIGHTS,
    shard_bytes: int | None = None,
    end_tokens: Collection[int] = (),
) -> None:
    """Write `model` in Hugging Face format. Collective; rank 0 writes.

    Args:
        model: Model to export. Its structure is enough if `weights` reads a checkpoint.
        directory: Directory to create.
        tokenizer: Tokenizer to save with the model.
        weights: Source of the weights.
        shard_bytes: Maximum size of a weight file. If None, use the default of Hugging Face.
        end_tokens: Ids of tokens that end a text, in addition to the EOS token of the tokenizer.

    Raises:
        ConfigError: The tokenizer lacks the placeholder token of the model.
    """
    directory = Path(directory)
    writes = not dist.is_initialized() or dist.get_rank() == 0
    # Other ranks only send weights. They need no class.
    exports = _choose_exports(model, directory, tokenizer) if writes else []
    connectors = _collect_weights(model, exports, weights, writes)
    if writes:
        directory.mkdir(parents=True, exist_ok=True)
        for export in exports:
            _set_end_tokens(export, tokenizer, end_tokens)
            _save(model, export, shard_bytes, weights)
        if model.generator is not None:
            model.generator.save_settings(directory / GENERATOR)
        for name, tensors in connectors.items():
            save_file(tensors, directory / name / CONNECTOR_FILE, metadata={"format": "pt"})
        as_one = exports[0].directory == directory
        tokenizer.save_pretrained(directory if as_one else directory / "llm")
        if as_one:
            save_processor(model, directory, tokenizer)
        else:
            _save_components_file(model, directory)
        for export in exports:
            add_legacy_keys(export.directory, tokenizer)
    if dist.is_initialized():
        dist.barrier()


def _choose_exports(
    model: MultimodalModel, directory: Path, tokenizer: PreTrainedTokenizerBase
) -> list[_Export]:
    """Return the Hugging Face models to write: the full model, or its parts if no class fits."""
    prefixes = hf_prefixes(model)
    llm = model.llm
    hf: Any
    is_pair = model.composite is None and bool(model.encoders)
    pair = pair_class(model) if is_pair else None
    with torch.device("meta"):
        if isinstance(pair, str):
            _logger.warning("exporting encoders and LLM separately: %s", pair)
            hf = llm.family.build(llm.config, llm.dtype)
            source = llm.weights.source
            exports = [_Export(directory / "llm", hf, {"llm": prefixes["llm"]}, source)]
            for module in model.encoder_modules():
                tower = {module.name: prefixes[module.name]}
                exports.append(_Export(directory / module.name, module.build_full_encoder(), tower))
        else:
            if pair is not None:
                placeholder = model.image_token_id(tokenizer)
                assert placeholder is not None
                (encoder,) = model.encoder_modules()
                files = pair.encoder_files
                prefixes = {"llm": LLAVA_LLM.hf_prefixes, encoder.name: files.hf_prefixes}
                hf = pair.kind._from_config(pair.config(placeholder), dtype=llm.dtype)
            elif model.composite is not None:
                kind: Any = COMPOSITES[model.composite.model_type].kind
                hf = kind._from_config(model.composite, dtype=llm.dtype)
            else:
                hf = llm.family.build(llm.config, llm.dtype)
            prefixes.pop(GENERATOR, None)
            exports = [_Export(directory, hf, prefixes, llm.weights.source)]
        if model.generator is not None:
            exports += [
                _Export(directory / GENERATOR / folder, hf, {GENERATOR: files.hf_prefixes})
                for folder, (hf, files) in model.generator.hf_models().items()
            ]
    return exports


def hf_prefixes(model: MultimodalModel) -> dict[str, Prefixes]:
    """Return pairs of torchmm and Hugging Face prefixes in the class of the source, by module."""
    return {m.name: m.weights.hf_prefixes for m in model.modality_modules()}


def hf_name(prefixes: dict[str, Prefixes], module: str, name: str) -> str | None:
    """Return the Hugging Face name of a parameter, or None if the class does not have it."""
    return WeightFiles(hf_prefixes=prefixes.get(module, ())).hf_name(name)


@torch.no_grad()
def _collect_weights(
    model: MultimodalModel, exports: list[_Export], weights: WeightSource, writes: bool
) -> dict[str, dict[str, Tensor]]:
    """Fill the weights of exports on the writing rank, and return connectors of no export.

    Collective.
    """
    connectors: dict[str, dict[str, Tensor]] = {}
    adapters = gather_adapters(model, weights)
    gathered = weights(model, lambda name: not is_adapter_parameter(name))
    for module, name, value in iterate_with_progress(
        "gathering weights to export", gathered, unit="tensors"
    ):
        if not writes:
            continue
        assert value is not None
        form = module.find_weight_format(name, value)
        decoded = value if form is None else form.decode(value)
        full_tensor = decoded
        linear, _, leaf = name.rpartition(".")
        if leaf == "weight" and linear in module.adapters:
            factors = adapters[module.name][linear]
            full_tensor = merge_lora(decoded, factors, module.adapters[linear])
            check_range(full_tensor, decoded, f"{module.name}.{name}")
        for export in exports:
            if (hf_parameter := hf_name(export.prefixes, module.name, name)) is not None:
                export.weights[hf_parameter] = full_tensor
                break
        else:
            connectors.setdefault(module.name, {})[name] = full_tensor
    return connectors


def check_range(values: Tensor, before: Tensor, name: str) -> None:
    """Raise an error if finite values became infinite or NaN.

    Args:
        values: Values after a conversion to another dtype or after merging an adapter.
        before: Values before.
        name: Name of the tensor for the error message.

    Raises:
        ConfigError: At least one value is out of the range of the dtype.
    """
    if not values.is_floating_point() or values.numel() == 0:
        return
    if all(bound.isfinite() for bound in torch.aminmax(values)):  # needs no temporary tensors
        return
    overflows = ~values.isfinite() & before.isfinite()
    if overflows.any():
        largest = before[overflows].abs().max().item()
        dtype = str(values.dtype).removeprefix("torch.")
        limit = torch.finfo(values.dtype).max
        raise ConfigError(
            f"{name} has {int(overflows.sum())} values above {limit:,.0f}, the maximum of "
            f"{dtype} (largest value: {largest:,.0f}); use --dtype bfloat16 or float32"
        )


def gather_adapters(
    model: MultimodalModel, weights: WeightSource
) -> dict[str, dict[str, dict[str, Tensor]]]:
    """Return parameters of adapters by module, linear layer and name in `Lora`. Collective.

    Ranks other than rank 0 receive none.
    """
    factors: dict[str, dict[str, dict[str, Tensor]]] = {m: {} for m in hf_prefixes(model)}
    for module, name, value in weights(model, is_adapter_parameter):
        linear, _, part = name.rpartition(f".{CHILD}.")
        if value is not None:
            factors[module.name].setdefault(linear, {})[part] = value
    return factors


def _set_end_tokens(
    export: _Export, tokenizer: PreTrainedTokenizerBase, ends: Collection[int]
) -> None:
    """Copy the generation settings of the source and add the tokens that end texts.

    Configs without a source have the defaults of their class, which belong to another tokenizer.
    """
    hf = export.hf
    if not isinstance(hf, PreTrainedModel) or not hf.can_generate():
        return
    end_tokens = [token for token in (tokenizer.eos_token_id, *sorted(ends)) if token is not None]
    settings: Any
    known: Any = None
    if export.generation_source is None:
        settings = GenerationConfig.from_model_config(hf.config)
        if end_tokens:
            hf.config = copy.deepcopy(hf.config)  # the model in training has the same object
            hf.config.get_text_config().eos_token_id = end_tokens[0]
    else:
        settings = _read_generation_config(export.generation_source) or hf.generation_config
        known = settings.eos_token_id
    known = known if isinstance(known, list) else [] if known is None else [known]
    tokens = list(dict.fromkeys([*known, *end_tokens]))
    if tokens:
        settings.eos_token_id = tokens[0] if len(tokens) == 1 else tokens
    export.generation_config = settings


def _read_generation_config(source: str) -> GenerationConfig | None:
    """Return the generation settings of a source, or None if it has no valid ones."""
    name, revision = split_revision(source)
    directory = Path(name)
    if directory.is_dir() and not (directory / GENERATION_CONFIG_NAME).is_file():
        return None
    try:
        settings = GenerationConfig.from_pretrained(name, revision=revision or "main")
    except (OSError, ValueError) as error:
        _logger.warning(
            "export without %s of %s, because it cannot be read: %s",
            GENERATION_CONFIG_NAME,
            source,
            describe_load_error(error),
        )
        return None
    try:
        settings.validate(strict=True)
    except ValueError as error:
        _logger.warning(
            "%s of %s is exported with settings that transformers reports as conflicts: %s",
            GENERATION_CONFIG_NAME,
            source,
            describe_load_error(error),
        )
    return settings


def _save(
    model: MultimodalModel, export: _Export, shard_bytes: int | None, weights: WeightSource
) -> None:
    """Write one Hugging Face model with `save_pretrained`, and release its weights."""
    for module in model.encoder_modules():
        if module.unused and module.name in export.prefixes:
            for name, value in _unused_weights(module).items():
                hf_parameter = hf_name(export.prefixes, module.name, name)
                assert hf_parameter is not None
                export.weights[hf_parameter] = value
    loaded = export.hf.load_state_dict(export.weights, strict=False, assign=True)
    if isinstance(export.hf, PreTrainedModel):
        export.hf.tie_weights()
    tensors = export.hf.state_dict()
    not_loaded = [name for name in loaded.missing_keys if tensors[name].is_meta]
    assert not not_loaded and not loaded.unexpected_keys, (not_loaded, loaded.unexpected_keys)
    settings: dict[str, Any] = {} if shard_bytes is None else {"max_shard_size": shard_bytes}
    tower = f"{_TOWER}vision_model." if _has_nested_clip_names(model, export) else _TOWER
    named = {name.replace(_TOWER, tower, 1): x for name, x in export.hf.state_dict().items()}
    if has_stacked_experts(named):
        settings |= {"state_dict": split_stacked_experts(export.hf, named, weights.clone_tensors)}
        settings |= {"save_original_format": False}
    elif isinstance(export.hf, PreTrainedModel):
        settings["state_dict"] = named
    export.weights.clear()
    if "state_dict" in settings:  # then tensors go when the file that has them is written
        del named, tensors
        export.hf.to("meta")
    export.hf.save_pretrained(export.directory, **settings)
    if export.generation_config is not None:
        file = export.directory / GENERATION_CONFIG_NAME
        export.generation_config.to_json_file(file, use_diff=True)


def _has_nested_clip_names(model: MultimodalModel, export: _Export) -> bool:
    """Return True if the CLIP or SigLIP encoder is `vision_tower.vision_model` in the files.

    Published files have such names, and transformers 4 and vLLM require them. Transformers 5 reads
    both kinds of names and writes the short ones. Models with a source keep the names of its files.
    """
    tower = getattr(getattr(export.hf, "model", None), "vision_tower", None)
    if type(tower).__name__ not in ("CLIPVisionModel", "SiglipVisionModel"):
        return False
    if any(name.startswith(f"{_TOWER}vision_model.") for name in export.hf.state_dict()):
        return False
    source = model.llm.weights.source if model.composite is not None else None
    return source is None or any(
        "vision_tower.vision_model." in name for name in open_files(source)
    )


def _unused_weights(module: EncoderModule) -> dict[str, Tensor]:
    """Return weights of the Hugging Face class that no output depends on.

    Values come from the source, so that its files are saved unchanged, or are random.
    """
    values: dict[str, Tensor] = {}
    if module.weights.source is not None:
        files = open_files(module.weights.source)
        stored = names_in_files(module, files)
        for name in module.unused & set(stored):
            file = files[stored[name]]
            with safe_open(file.path, "pt") as opened:
                value = opened.get_tensor(file.name)
                values[name] = value.to(module.spec.dtype) if value.is_floating_point() else value
                check_range(values[name], value, f"{module.name}.{name}")
    with torch.device("meta"):
        holder = nn.Module()
        tower: nn.Module = module.build_full_encoder()
        holder.tower = tower
    shell = copy.copy(tower)
    shell._modules = {}  # the encoder without its submodules
    for fqn, unit in (("tower", shell), *named_units(holder, module.layers_fqn)):
        names = {f"{fqn}.{name}" for name, _ in named_tensors(unit)} & module.unused - set(values)
        if names:
            filled = build_random_copy(unit, module.hf, fqn, unused=True)
            values |= {f"{fqn}.{n}": t for n, t in named_tensors(filled) if f"{fqn}.{n}" in names}
    return values


def _save_components_file(model: MultimodalModel, directory: Path) -> None:
    encoders: dict[str, dict[str, Any]] = {}
    for module in model.encoder_modules():
        image_processor(module).save_pretrained(directory / module.name)
        spec = module.spec
        encoders[module.name] = {
            "source": module.name,
            "modality": module.family.modality,
            "connector": CONNECTORS[spec.pixel_shuffle_factor > 1, spec.connector],
            "feature_layer": spec.feature_layer,
        }
        if spec.pixel_shuffle_factor > 1:
            encoders[module.name]["pixel_shuffle_factor"] = spec.pixel_shuffle_factor
        if spec.tiles is not None:
            encoders[module.name]["processor"] = spec.tiles.processor
    description: dict[str, Any] = {
        "llm": {"source": "llm"},
        "encoders": encoders,
        "image_token": model.text.image_token,
    }
    if model.generator is not None:
        description[GENERATOR] = model.generator.describe_export()
    (directory / COMPONENTS_FILE).write_text(json.dumps(description, indent=2) + "\n")
