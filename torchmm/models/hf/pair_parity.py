"""Proof that a Hugging Face class computes the same as an encoder and an LLM in torchmm.

A small copy of both parts with random weights is built in torchmm and as the Hugging Face class
with eager attention. The weights are copied under the names of the export, and the logits have to
be equal. This finds all settings that a class ignores, independent of their names: scales, soft
caps and multipliers of the LLM, or feature layers of the encoder.

Inputs are text and an image. Classes with an audio encoder are compared with text alone, because
they build the same encoder and connector as torchmm, with the config of the trained encoder.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from torchmm.common.batch import IGNORE_TARGET, EncoderInputs, Microbatch, MicrobatchMeta
from torchmm.common.errors import ConfigError
from torchmm.models.encoders import EncoderModule, EncoderSpec
from torchmm.models.families.composites.components import LLAVA_LLM
from torchmm.models.families.introspection import TOLERANCE, randomize, run_external
from torchmm.models.families.llms.family import LlmFamily
from torchmm.models.families.small_configs import shrink_encoder_settings, small_llm_config
from torchmm.models.layered import WeightFiles
from torchmm.models.llm import LlmModule

_PLACEHOLDER = 63
"""Last token of the small vocabulary."""
_TEXT = 4
"""Tokens before and after the image."""
_LAYERS = 3

BuildHf = Callable[[EncoderSpec, PreTrainedConfig, int], PreTrainedModel]
"""Builds the Hugging Face class from the encoder, the config of the LLM and the placeholder id."""


@dataclass(frozen=True)
class _Pair:
    """The parts of a model and their class; equal for equal settings."""

    settings: str
    spec: EncoderSpec = field(compare=False)
    llm_config: PreTrainedConfig = field(compare=False)
    llm_family: LlmFamily = field(compare=False)
    encoder_files: WeightFiles = field(compare=False)
    build_hf: BuildHf = field(compare=False)


def class_difference(
    spec: EncoderSpec, llm: LlmModule, kind: str, encoder_files: WeightFiles, build_hf: BuildHf
) -> str:
    """Return why a Hugging Face class is not proven to compute the same, or "" if it is.

    The result is cached, so that a run compares once. No collectives and no random state of the
    run are used, so that one rank may call it.

    Args:
        spec: Encoder with its connector.
        llm: LLM.
        kind: Name of the Hugging Face class.
        encoder_files: Names of the encoder weights in the class.
        build_hf: Function that builds the class.
    """
    parts = {k: v for k, v in vars(spec).items() if isinstance(v, str | int | float)}
    configs = [spec.config.to_dict(), llm.config.to_dict()]
    settings = json.dumps([kind, parts, configs], sort_keys=True, default=str)
    pair = _Pair(settings, spec, llm.config, llm.family, encoder_files, build_hf)
    try:
        worst = _compare(pair)
    except ConfigError as error:
        return f"{kind} could not be compared with a small copy of the model: {error.problems[0]}"
    if worst < TOLERANCE:
        return ""
    return (
        f"logits of {kind} differ by {worst:.1e} (relative) from the trained model, in small "
        "copies of both"
    )


@lru_cache
def _compare(pair: _Pair) -> float:
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)  # does not change generators of GPUs
        return run_external("the comparison", _difference, pair)


def _difference(pair: _Pair) -> float:
    """Return the relative difference of the logits of both copies."""
    family = pair.llm_family
    llm_config = small_llm_config(pair.llm_config, f"{family.text_model}.{family.layers}")
    # An encoder with few layers and features and the same connector.
    layers = max(_LAYERS, -pair.spec.feature_layer)
    settings = shrink_encoder_settings(
        pair.spec.config, layers, patches_per_row=2 * pair.spec.pixel_shuffle_factor
    )
    spec = replace(
        pair.spec,
        config=type(pair.spec.config)(**settings),
        llm_hidden_size=llm_config.hidden_size,
        dtype=torch.float32,
    )
    hf_model = pair.build_hf(spec, llm_config, _PLACEHOLDER).eval()
    randomize(hf_model)
    llm = LlmModule(llm_config, pair.llm_family, torch.float32, LLAVA_LLM).eval()
    encoder = EncoderModule(spec, pair.encoder_files).eval()

    # Copy the weights of the Hugging Face model by their names in the export.
    weights = hf_model.state_dict()
    for module in (llm, encoder):
        values: dict[str, Any] = {}
        tied = module.tied_parameters()
        for name in module.state_dict():
            hf_parameter = module.weights.hf_name(name)
            if hf_parameter is not None and hf_parameter in weights:
                values[name] = weights[hf_parameter]
            elif name not in tied:
                raise ConfigError(f"it has no weight for {module.name}.{name}")
        module.load_state_dict(values, strict=False)

    features: dict[str, Tensor] = {}
    hf_inputs: dict[str, Tensor] = {}
    count = 0
    inputs: dict[str, EncoderInputs] = {}
    if spec.family.modality == "image":
        dummy = encoder.dummy_inputs(torch.device("cpu"))
        pixels = torch.randn_like(dummy.pixels)
        features[spec.name] = encoder(replace(dummy, pixels=pixels))
        count = len(features[spec.name])
        inputs[spec.name] = replace(
            dummy, pixels=pixels, positions_K=torch.arange(_TEXT, _TEXT + count)
        )
        hf_inputs["pixel_values"] = pixels
    ids = torch.randint(3, _PLACEHOLDER, (2 * _TEXT + count,))
    ids[_TEXT : _TEXT + count] = _PLACEHOLDER
    length = len(ids)
    everywhere = torch.arange(length)
    targets = torch.full_like(ids, IGNORE_TARGET)
    meta = MicrobatchMeta((), length)
    batch = Microbatch(ids, targets, everywhere, [0, length], inputs, meta)
    logits = llm.logits(batch, features, everywhere)
    expected = hf_model(input_ids=ids[None], use_cache=False, **hf_inputs).logits[0]
    return ((logits - expected).norm() / expected.norm()).item()
