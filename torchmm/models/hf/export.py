"""A trained model as a Hugging Face directory.

Composites keep their class; an encoder and an LLM from separate sources get the class that they
are (`torchmm.models.hf.pairs`), LLaVA's most often; an LLM alone becomes a causal LM. Hugging
Face's own `save_pretrained` writes the files, so names, shards and configs are its. Other pairs
have no Hugging Face class: their parts are written side by side with `torchmm.json`, the `[model]`
that puts them together again where a recipe's `source` is such a directory. Diffusers writes a
generator, if there is one, to `generator/`: its connector is what diffusers calls its caption
projection.

Low-rank adapters are added to the weights that they belong to (`torchmm.models.hf.adapter_files`
writes them apart).

Parameters are gathered one by one to rank 0's CPU memory; no other rank holds more than one. Those
of pipeline stages that rank 0 does not run are sent by the first rank that has them. Or they come
from files (`torchmm.training.exports.checkpoint`), for a model that nobody runs.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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

from torchmm.common.errors import ConfigError
from torchmm.common.log import worked
from torchmm.common.module_names import GENERATOR
from torchmm.models.encoders import EncoderModule
from torchmm.models.families.composites.parts import LLAVA_LLM
from torchmm.models.families.composites.table import COMPOSITES
from torchmm.models.hf.experts_apart import Keep, has_stacked_experts, in_memory, taken_apart
from torchmm.models.hf.legacy_keys import add_legacy_keys
from torchmm.models.hf.load import CONNECTOR_FILE, names_in_files, open_files
from torchmm.models.hf.pairs import CONNECTORS, PairClass, pair_class
from torchmm.models.hf.processors import image_processor, save_processor
from torchmm.models.initialize import named_tensors, random_copy
from torchmm.models.layered import LayeredModule, WeightFiles, units
from torchmm.models.layers.lora import CHILD, merged, of_adapter
from torchmm.models.multimodal import MultimodalModel
from torchmm.recipe.model_section import PARTS_FILE, split_place

_logger = logging.getLogger(__name__)
_TOWER = "model.vision_tower."
Prefixes = tuple[tuple[str, str], ...]
Gather = Callable[
    [MultimodalModel, Callable[[str], bool]], Iterator[tuple[LayeredModule, str, Tensor | None]]
]
"""(module, name in it, values) of parameters and buffers with wanted names, one by one. Values are
in rank 0's CPU memory, None on other ranks. Collective: to be used up by all."""


@dataclass
class _Export:
    """One Hugging Face model to be written."""

    directory: Path
    hf: Any
    """Model of transformers or diffusers on the meta device, which receives the weights."""
    prefixes: dict[str, Prefixes]
    """By module name: our parameter names -> Hugging Face's."""
    generation_source: str | None = None
    """Source whose generation settings are copied, if the LLM has one."""
    weights: dict[str, Tensor] = field(default_factory=dict)


@torch.no_grad()
def gather_whole(
    model: MultimodalModel, wanted: Callable[[str], bool]
) -> Iterator[tuple[LayeredModule, str, Tensor | None]]:
    """`Gather` from the ranks that run a model."""
    first_with = _first_ranks_with(model)
    device = next((t.device for t in model.state_dict().values()), torch.device("cpu"))
    parts = {name: module.state_dict() for name, module in model.named_modality_modules()}
    for prefix, module, name, like in whole_tensors(model):
        if wanted(name):
            first = first_with[f"{prefix}.{name}"]
            yield module, name, _to_rank_0(parts[prefix].get(name), like, first, device)


def whole_tensors(model: MultimodalModel) -> Iterator[tuple[str, LayeredModule, str, Tensor]]:
    """(its module's prefix, module, name in it, like) of every parameter and buffer of all ranks,
    but for tied ones; `like` is on the meta device and has its shape and dtype."""
    for prefix, module in model.named_modality_modules():
        with torch.device("meta"):
            whole = module.rebuild()
        tied = whole.tied_parameters()
        for name, like in whole.state_dict().items():
            if name not in tied:
                yield prefix, module, name, like


def export_hf(
    model: MultimodalModel,
    directory: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    gather: Gather = gather_whole,
    shard_bytes: int | None = None,
    keep: Keep = in_memory,
    ends: Collection[int] = (),
) -> None:
    """Write `model` in Hugging Face format. Collective; rank 0 writes.

    Args:
        model: Model to export. Its structure is enough if `gather` provides the weights.
        directory: Directory to create.
        tokenizer: Tokenizer to save with the model.
        gather: Source of the weights.
        shard_bytes: Maximum size of a weight file. If None, use the default of Hugging Face.
        keep: Storage for experts that files store separately.
        ends: Ids of tokens that end a text, in addition to the EOS token of the tokenizer.

    Raises:
        ConfigError: The tokenizer lacks the placeholder token of the model.
    """
    directory = Path(directory)
    writes = not dist.is_initialized() or dist.get_rank() == 0
    # Other ranks only send weights. They need no class.
    exports = _choose_exports(model, directory, tokenizer) if writes else []
    connectors = _gather(model, exports, gather, writes)
    if writes:
        directory.mkdir(parents=True, exist_ok=True)
        for export in exports:
            _set_end_tokens(export, tokenizer, ends)
            _save(model, export, shard_bytes, keep)
        if model.generator is not None:
            model.generator.save_settings(directory / GENERATOR)
        for name, weights in connectors.items():
            save_file(weights, directory / name / CONNECTOR_FILE, metadata={"format": "pt"})
        as_one = exports[0].directory == directory
        tokenizer.save_pretrained(directory if as_one else directory / "llm")
        if as_one:
            save_processor(model, directory, tokenizer)
        else:
            _save_parts_description(model, directory)
        for export in exports:
            add_legacy_keys(export.directory)
    if dist.is_initialized():
        dist.barrier()


def _choose_exports(
    model: MultimodalModel, directory: Path, tokenizer: PreTrainedTokenizerBase
) -> list[_Export]:
    """Return the Hugging Face models to write: the full model, or its parts if no class fits."""
    pair = _pair(model)
    with torch.device("meta"):
        if isinstance(pair, str):
            _logger.warning("exporting encoders and LLM separately: %s", pair)
            exports = _separately(model, directory)
        else:
            exports = [_whole(model, pair, directory, tokenizer)]
        if model.generator is not None:
            exports += [
                _Export(directory / GENERATOR / folder, hf, {GENERATOR: files.hf_prefixes})
                for folder, (hf, files) in model.generator.hf_models().items()
            ]
    return exports


def _pair(model: MultimodalModel) -> PairClass | str | None:
    """Return the class of a model from separate sources, or the reason why it has none.

    Returns None for composites and for LLMs without an encoder.
    """
    return None if model.composite is not None or not model.encoders else pair_class(model)


def _whole(
    model: MultimodalModel,
    pair: PairClass | None,
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
) -> _Export:
    dtype = model.llm.dtype
    prefixes = {name: p for name, p in hf_prefixes(model).items() if name != GENERATOR}
    if pair is not None:
        placeholder = model.image_token_id(tokenizer)
        assert placeholder is not None
        (encoder,) = model.encoder_modules()
        prefixes = {"llm": LLAVA_LLM.hf_prefixes, encoder.name: pair.encoder_files.hf_prefixes}
        hf = pair.kind._from_config(pair.config(placeholder), dtype=dtype)
    elif model.composite is not None:
        kind: Any = COMPOSITES[model.composite.model_type].kind
        hf = kind._from_config(model.composite, dtype=dtype)
    else:
        hf = model.llm.family.build(model.llm.config, dtype)
    return _Export(directory, hf, prefixes, model.llm.weights.source)


def _separately(model: MultimodalModel, directory: Path) -> list[_Export]:
    prefixes = hf_prefixes(model)
    llm = model.llm.family.build(model.llm.config, model.llm.dtype)
    source = model.llm.weights.source
    exports = [_Export(directory / "llm", llm, {"llm": prefixes["llm"]}, source)]
    for module in model.encoder_modules():
        tower = {module.name: prefixes[module.name]}
        exports.append(_Export(directory / module.name, module.uncut_tower(), tower))
    return exports


def hf_prefixes(model: MultimodalModel) -> dict[str, Prefixes]:
    """By module name: (our prefix, Hugging Face's) in the class the module came from."""
    return {m.name: m.weights.hf_prefixes for m in model.modality_modules()}


def hf_name(prefixes: dict[str, Prefixes], module: str, name: str) -> str | None:
    """Return the Hugging Face name of a parameter, or None if the class does not have it."""
    return WeightFiles(hf_prefixes=prefixes.get(module, ())).hf_name(name)


@torch.no_grad()
def _gather(
    model: MultimodalModel, exports: list[_Export], gather: Gather, writes: bool
) -> dict[str, dict[str, Tensor]]:
    """Fill the exports' weights on the writing rank; returns connectors that are part of none."""
    connectors: dict[str, dict[str, Tensor]] = {}
    adapters = gather_adapters(model, gather)
    gathered = gather(model, lambda name: not of_adapter(name))
    for module, name, value in worked("gathering weights to export", gathered, unit="tensors"):
        if not writes:
            continue
        assert value is not None
        whole = value
        linear, _, leaf = name.rpartition(".")
        if leaf == "weight" and linear in module.adapters:
            whole = merged(value, adapters[module.name][linear], module.adapters[linear])
            check_range(whole, value, f"{module.name}.{name}")
        for export in exports:
            if (theirs := hf_name(export.prefixes, module.name, name)) is not None:
                export.weights[theirs] = whole
                break
        else:
            connectors.setdefault(module.name, {})[name] = whole
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
            f"{name} has {int(overflows.sum())} values beyond {limit:,.0f}, the largest value of "
            f"{dtype} (up to {largest:,.0f}); use --dtype bfloat16 or float32"
        )


def gather_adapters(
    model: MultimodalModel, gather: Gather = gather_whole
) -> dict[str, dict[str, dict[str, Tensor]]]:
    """Parameters of adapters by module, linear and name in `Lora`, on rank 0; collective."""
    found: dict[str, dict[str, dict[str, Tensor]]] = {m: {} for m in hf_prefixes(model)}
    for module, name, value in gather(model, of_adapter):
        linear, _, part = name.rpartition(f".{CHILD}.")
        if value is not None:
            found[module.name].setdefault(linear, {})[part] = value
    return found


def _first_ranks_with(model: MultimodalModel) -> dict[str, int]:
    """Lowest rank that has a part of each parameter or buffer, by name; collective."""
    own = list(model.state_dict())
    by_rank: list[Any] = [own]
    if dist.is_initialized():
        by_rank = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, own)
    return {name: rank for rank in reversed(range(len(by_rank))) for name in by_rank[rank]}


def _to_rank_0(
    ours: Tensor | None, like: Tensor, first: int, device: torch.device
) -> Tensor | None:
    """The whole of a tensor in rank 0's CPU memory; None on other ranks.

    Args:
        ours: this rank's part, if any; all ranks that have one must call.
        like: on the meta device, with the shape and dtype of the whole.
        first: the rank that sends it, if that is not rank 0.
        device: where the ranks' parts are.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    whole = ours.full_tensor() if isinstance(ours, DTensor) else ours
    if first == 0:
        return whole.detach().cpu() if rank == 0 and whole is not None else None
    if rank == first:
        assert whole is not None
        dist.send(whole.detach().contiguous(), dst=0)
    if rank != 0:
        return None
    received = torch.empty_like(like, device=device)
    dist.recv(received, src=first)
    return received.cpu()


def _set_end_tokens(
    export: _Export, tokenizer: PreTrainedTokenizerBase, ends: Collection[int]
) -> None:
    """Copy the generation settings of the source and add the tokens that end texts.

    Configs without a source have the defaults of their class, which belong to another tokenizer.
    """
    hf = export.hf
    if not isinstance(hf, PreTrainedModel) or not hf.can_generate():
        return
    own = [token for token in (tokenizer.eos_token_id, *sorted(ends)) if token is not None]
    known: Any = None
    if export.generation_source is None:
        hf.generation_config = GenerationConfig.from_model_config(hf.config)
        if own:
            hf.config = copy.deepcopy(hf.config)  # the model in training has the same object
            hf.config.get_text_config().eos_token_id = own[0]
    else:
        # If the source has no valid generation config, keep the settings of the model config.
        with suppress(OSError, ValueError):
            name, revision = split_place(export.generation_source)
            found = GenerationConfig.from_pretrained(name, revision=revision or "main")
            found.validate(strict=True)
            hf.generation_config = found
        known = hf.generation_config.eos_token_id
    known = known if isinstance(known, list) else [] if known is None else [known]
    tokens = list(dict.fromkeys([*known, *own]))
    if tokens:
        hf.generation_config.eos_token_id = tokens[0] if len(tokens) == 1 else tokens


def _save(model: MultimodalModel, export: _Export, shard_bytes: int | None, keep: Keep) -> None:
    for module in model.encoder_modules():
        if module.unused and module.name in export.prefixes:
            for name, value in _unused_weights(module).items():
                theirs = hf_name(export.prefixes, module.name, name)
                assert theirs is not None
                export.weights[theirs] = value
    loaded = export.hf.load_state_dict(export.weights, strict=False, assign=True)
    if isinstance(export.hf, PreTrainedModel):
        export.hf.tie_weights()
    tensors = export.hf.state_dict()
    left = [name for name in loaded.missing_keys if tensors[name].is_meta]
    assert not left and not loaded.unexpected_keys, (left, loaded.unexpected_keys)
    settings: dict[str, Any] = {} if shard_bytes is None else {"max_shard_size": shard_bytes}
    tower = f"{_TOWER}vision_model." if _names_clip_twice(model, export) else _TOWER
    named = {name.replace(_TOWER, tower, 1): x for name, x in export.hf.state_dict().items()}
    if has_stacked_experts(named):
        settings |= {"state_dict": taken_apart(export.hf, named, keep)}
        settings |= {"save_original_format": False}
    elif isinstance(export.hf, PreTrainedModel):
        settings["state_dict"] = named
    export.weights.clear()
    if "state_dict" in settings:  # then tensors go when the file that has them is written
        del named, tensors
        export.hf.to("meta")
    export.hf.save_pretrained(export.directory, **settings)


def _names_clip_twice(model: MultimodalModel, export: _Export) -> bool:
    """Whether a tower of CLIP or SigLIP is `vision_tower.vision_model` in the files: as in all that
    were published, which transformers 4 and vLLM want; transformers 5 reads that and leaves it out.
    What began as files is saved as it was.
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
    """Weights that the Hugging Face class has although no output depends on them.

    They are the source's, so that a loaded checkpoint is saved as it was; otherwise random.
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
        holder.tower = module.uncut_tower()
    own = copy.copy(holder.tower)
    own._modules = {}  # the tower without its parts
    for fqn, unit in (("tower", own), *units(holder, module.layers_fqn)):
        wanted = {f"{fqn}.{name}" for name, _ in named_tensors(unit)} & module.unused - set(values)
        if wanted:
            filled = random_copy(unit, module.hf, fqn, unused=True)
            values |= {f"{fqn}.{n}": t for n, t in named_tensors(filled) if f"{fqn}.{n}" in wanted}
    return values


def _save_parts_description(model: MultimodalModel, directory: Path) -> None:
    encoders: dict[str, dict[str, Any]] = {}
    for module in model.encoder_modules():
        image_processor(module).save_pretrained(directory / module.name)
        spec = module.spec
        encoders[module.name] = {
            "source": module.name,
            "modality": module.family.modality,
            "connector": CONNECTORS[spec.shuffle > 1, spec.connector],
            "feature_layer": spec.feature_layer,
        }
        if spec.shuffle > 1:
            encoders[module.name]["shuffle"] = spec.shuffle
        if spec.tiles is not None:
            encoders[module.name]["processor"] = spec.tiles.processor
    description: dict[str, Any] = {
        "llm": {"source": "llm"},
        "encoders": encoders,
        "image_token": model.text.image_token,
    }
    if model.generator is not None:
        description[GENERATOR] = model.generator.describe_export()
    (directory / PARTS_FILE).write_text(json.dumps(description, indent=2) + "\n")
